"""Our names and those of a checkpoint: of modules, and of the fields of config.json."""

import re

from torch import Tensor

# Name of our module or parameter → name in the checkpoint, or several names, whose tensors are stacked in ours.
Names = dict[str, str | tuple[str, ...]]

BERT_CONFIG = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "activation": "hidden_act",
    "eps": "layer_norm_eps",
    "hidden_dropout_p": "hidden_dropout_prob",
    "attention_dropout_p": "attention_probs_dropout_prob",
    "classifier_dropout_p": "classifier_dropout",
    "initializer_range": "initializer_range",
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
BERT_EMBEDDINGS: Names = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}


def split_rows(name: str, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """The tensors that a checkpoint stacks in one. Raises: ValueError if its rows cannot be divided."""
    if not tensor.dim() or tensor.shape[0] % count:
        raise ValueError(
            f"{name} must be {count} stacked tensors of as many rows, got shape {tuple(tensor.shape)}: is the "
            "checkpoint damaged?"
        )
    return tensor.chunk(count) if tensor.shape[0] else (tensor,) * count


def renamed_in_layer(name: str, tensor: Tensor, modules: Names) -> dict[str, Tensor]:
    """A checkpoint's tensor by transformers' names of modules in layers ("layers.0", ...); others keep their name.

    Args: modules: the file's name of a module → transformers' name, or several names, whose tensors the file stacks.
    """
    in_layer = re.match(r"(layers\.\d+)\.(.+)\.(weight|bias)$", name)
    if in_layer is None or in_layer[2] not in modules:
        return {name: tensor}
    layer, module, kind = in_layer.groups()
    theirs = modules[module]
    if isinstance(theirs, str):
        return {f"{layer}.{theirs}.{kind}": tensor}
    parts = split_rows(name, tensor, len(theirs))
    return {f"{layer}.{each}.{kind}": part for each, part in zip(theirs, parts, strict=True)}


def dropouts_in_layers(count: int, path: str, names: dict[str, str]) -> dict[str, str]:
    """The entries of :meth:`Architecture.dropout_names` for all layers. ``path`` has {i} for the layer's number."""
    return {
        f"layers.{i}.{field}": f"{path}.{name}".format(i=i)
        for i in range(count)
        for field, name in names.items()
    }


def in_layers(count: int, path: str, names: Names) -> Names:
    """The entries of :meth:`Architecture.names` for all layers.

    ``path`` and the names may have {i} for the layer's number and {next} for the following number.
    """
    table: Names = {}
    for i in range(count):
        fill = lambda name, i=i: f"{path}.{name}".format(i=i, next=i + 1)
        for ours, theirs in names.items():
            table[f"layers.{i}.{ours}"] = (
                fill(theirs) if isinstance(theirs, str) else tuple(map(fill, theirs))
            )
    return table


def query_key_norms(count: int) -> Names:
    """The entries of :meth:`Architecture.names` for the norms of queries and keys in LLaMA's layers."""
    norms: Names = {"query_norm": "q_norm", "key_norm": "k_norm"}
    return in_layers(count, "layers.{i}.self_attn", norms)


def first_norms(count: int, path: str, last: str) -> Names:
    """The entries of :meth:`Architecture.names` for pre-norm layers' first norms and the norm after the last.

    A layer's first norm is described as the last norm of the preceding layer (nn/layer_spec.py). ``path`` has {i} for
    the layer's number.
    """
    paths = [path.format(i=i) for i in range(count)]
    names = {f"layers.{i}.out_norm": name for i, name in enumerate([*paths[1:], last])}
    return {"first_norm": paths[0], **names}
