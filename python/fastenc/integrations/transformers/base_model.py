"""The fused forward of a Hugging Face base model: unpad once, fused layers, pad once."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastenc.integrations.transformers import architectures
from fastenc.integrations.transformers.batch_facts import BatchFacts, take_facts
from fastenc.nn.encoder_layer import encoder_layer
from fastenc.nn.inference_layer import InferenceLayer, wants_inference
from fastenc.ops import tied_embedding_layer_norm, unpack
from fastenc.ops._dispatch import choose
from fastenc.packing import PackedBatch, pack

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
# Arguments that do not change the numbers this forward computes.
HARMLESS = {"return_dict", "output_hidden_states", "use_cache", "num_items_in_batch"}


class PackedRun(NamedTuple):
    """What the layers gave, still packed."""

    hidden_states: list[Tensor]  # the embeddings' output, then each layer's if all were asked for
    batch: PackedBatch
    word_table: Tensor  # the word embeddings' weight as a decoder that is tied to it takes it

    def padded(self, hidden: Tensor) -> Tensor:
        """(batch, length, ...); the places of padding hold 0."""
        assert self.batch.padded_shape is not None  # pack() sets it
        rows, length = self.batch.padded_shape
        if self.batch.total_tokens == rows * length:
            return hidden.view(rows, length, *hidden.shape[1:])
        return unpack(hidden, self.batch)


class Layers:
    """The layers of one base model.

    Attributes:
        parts: each layer's modules, as :func:`obstacle` found them at the start of the present call.
        inference: the prepacked inference layers, kept from call to call.
    """

    def __init__(self) -> None:
        self._noted: tuple[Tensor, BatchFacts] | None = None
        self.parts: list[architectures.LayerParts] = []
        self.inference: list[InferenceLayer] = []

    def read(self, base: Any) -> None:
        """Raises: AttributeError if a layer lacks a part."""
        modules = architectures.layers_of(base)
        self.parts = [architectures.parts_of(base, layer) for layer in modules]
        if len(self.inference) != len(modules):
            self.inference = [InferenceLayer() for _ in modules]

    def facts(self, arguments: dict) -> BatchFacts | None:
        """What the host must know of the call's mask: as its task model has noted, or taken now."""
        if self._noted is not None and self._noted[0] is arguments.get("attention_mask"):
            return self._noted[1]
        return take_facts(arguments)

    @contextmanager
    def noted(self, arguments: dict, facts: BatchFacts | None) -> Iterator[None]:
        """Inside, the base model need not read what its task model has read."""
        mask = arguments.get("attention_mask")
        self._noted = None if mask is None or facts is None else (mask, facts)
        try:
            yield
        finally:
            self._noted = None


def obstacle(base: Any, layers: Layers, arguments: dict, facts: BatchFacts | None) -> str | None:
    """Why this call must take the model's own forward, or None. Reads the layers' modules."""
    config = base.config
    extra = {
        name
        for name, value in arguments.items()
        if name not in INPUTS and name not in HARMLESS and value is not None and value is not False
    }
    if extra:
        return f"it was called with {', '.join(sorted(extra))}"
    if getattr(config, "output_attentions", False):
        return "config.output_attentions is on"
    if getattr(config, "is_decoder", False):
        return "config.is_decoder is on"
    inputs, mask = _inputs(arguments), arguments.get("attention_mask")
    if not isinstance(inputs, Tensor):
        return "it needs exactly one of input_ids and inputs_embeds"
    if inputs.shape[1] == 0 or inputs.shape[0] == 0:
        return "the batch is empty"
    if mask is not None and (mask.dim() != 2 or mask.shape != inputs.shape[:2]):
        return "attention_mask is not (batch, length)"
    if torch.jit.is_tracing() or torch.compiler.is_compiling():
        return "it is being traced"
    if facts is not None and facts.leading_padding:
        # Heads and poolers read a row's first place, where only the padded computation has a vector.
        return "a row starts with padding"
    parameter = base.embeddings.word_embeddings.weight
    if choose("attention", "auto", parameter) == "reference":
        return f"there is no fused attention for {parameter.dtype} on {parameter.device.type}"
    return _changed_module(base, layers)


def run(
    base: Any, layers: Layers, arguments: dict, facts: BatchFacts | None, keep_all: bool
) -> PackedRun:
    """Embed and encode the real tokens only, after :func:`obstacle` found none."""
    inputs, mask = _inputs(arguments), arguments.get("attention_mask")
    rows, length = inputs.shape[:2]
    places = torch.zeros((rows, length), dtype=torch.long, device=inputs.device)
    total, longest = (None, None) if facts is None else (facts.total_tokens, facts.max_seqlen)
    ids = places if inputs.dim() == 3 else inputs
    batch = pack(ids, mask, total_tokens=total, max_seqlen=longest)
    x, word_table = _embed(base, arguments, batch)
    states = [x]
    heads, activation = architectures.num_heads(base), str(architectures.activation(base))
    for parts, inference in zip(layers.parts, layers.inference, strict=True):
        options = parts.options(heads, activation)
        call = (x, batch.cu_seqlens, batch.max_seqlen, parts.weights(), options)
        if wants_inference(x, options):
            x = inference(*call)
        else:
            inference.forget()
            layer = parts.containers[0]
            recompute = layer.training and getattr(layer, "gradient_checkpointing", False)
            x = (
                checkpoint(encoder_layer, *call, use_reentrant=False)
                if recompute
                else encoder_layer(*call)
            )
        if keep_all:
            states.append(x)
    # Autocast's narrower dtype stays inside the layers, as in the model's own forward.
    dtype = base.embeddings.word_embeddings.weight.dtype
    states = [state.to(dtype) for state in (states if keep_all else [x])]
    return PackedRun(states, batch, word_table)


def output(base: Any, packed: PackedRun, arguments: dict):
    """The class that the model's own forward returns, padded, or a tuple."""
    from transformers import modeling_outputs

    hidden = packed.padded(packed.hidden_states[-1])
    fields: dict[str, Any] = {"last_hidden_state": hidden}
    if getattr(base, "pooler", None) is not None:
        fields["pooler_output"] = base.pooler(hidden)
    if wanted(base, arguments, "output_hidden_states"):
        fields["hidden_states"] = tuple(map(packed.padded, packed.hidden_states))
    classes = {
        "DistilBertModel": "BaseModelOutput",
        "ElectraModel": "BaseModelOutputWithPastAndCrossAttentions",
    }
    name = classes.get(type(base).__name__, "BaseModelOutputWithPoolingAndCrossAttentions")
    result = getattr(modeling_outputs, name)(**fields)
    return result if wanted(base, arguments, "return_dict") else result.to_tuple()


def wanted(model: Any, arguments: dict, name: str) -> bool:
    """A switch given in the call, or else the configuration's."""
    value = arguments.get(name)
    return bool(getattr(model.config, name) if value is None else value)


def warn_once(base: Any, reason: str) -> None:
    """Say once a reason that a call takes the model's own forward."""
    said = base.__dict__.setdefault("_fastenc_said", set())
    if reason not in said:
        said.add(reason)
        warnings.warn(
            f"fastenc: {type(base).__name__} takes its own forward, because {reason}", stacklevel=4
        )


def _inputs(arguments: dict) -> Any:
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        return None
    return ids if embeds is None else embeds


def _embed(base: Any, arguments: dict, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The embeddings of one row of real tokens, fused or by the model's own module, and the word table."""
    assert batch.padded_shape is not None  # pack() sets it
    rows, length = batch.padded_shape
    take = lambda padded: padded.reshape(rows * length, *padded.shape[2:])[batch.indices][None]
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    inputs = _inputs(arguments)
    position_ids = arguments.get("position_ids")
    if position_ids is None:
        position_ids = _positions(base, ids, rows, length, inputs.device)
    call = {"position_ids": take(position_ids.expand(rows, length))}
    # DistilBERT's module has no default for input_ids.
    call["input_ids"] = None if ids is None else take(ids)
    types = arguments.get("token_type_ids") if architectures.takes_token_types(base) else None
    if types is not None:
        call["token_type_ids"] = take(types.expand(rows, length))
    if embeds is None and _plain_embeddings(base):
        x, word_table = _fused_embeddings(architectures.embedding_parts(base), call)
    else:
        if embeds is not None:
            call["inputs_embeds"] = take(embeds)
        if architectures.takes_token_types(base) and types is None:
            call["token_type_ids"] = torch.zeros_like(call["position_ids"])
        x, word_table = base.embeddings(**call), base.embeddings.word_embeddings.weight
    if hasattr(base, "embeddings_project"):
        x = base.embeddings_project(x)
    return x[0], word_table


def _plain_embeddings(base: Any) -> bool:
    """Whether the fused embeddings compute what calling the model's own module would."""
    module = base.embeddings
    name = type(module).__name__
    if name not in architectures.EMBEDDINGS or not type(module).__module__.startswith(
        "transformers."
    ):
        return False
    try:
        parts = architectures.embedding_parts(base)
    except AttributeError:
        return False
    plain_table = lambda table: (
        type(table) is nn.Embedding
        and table.max_norm is None
        and not (table.scale_grad_by_freq or table.sparse)
        and table.weight.dtype == parts.word.weight.dtype
    )
    return (
        all(map(plain_table, parts.tables()))
        and type(parts.norm) is nn.LayerNorm
        and type(parts.dropout) is nn.Dropout
        and not any(map(is_hooked, (module, *parts.tables(), parts.norm, parts.dropout)))
    )


def _fused_embeddings(
    parts: architectures.EmbeddingParts, call: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    return tied_embedding_layer_norm(
        call["input_ids"],
        parts.word.weight,
        parts.norm.weight,
        parts.norm.bias,
        position_ids=call["position_ids"],
        position=parts.position.weight,
        token_type_ids=call.get("token_type_ids"),
        token_type=None if parts.token_type is None else parts.token_type.weight,
        padding_idx=parts.word.padding_idx,
        position_padding_idx=parts.position.padding_idx,
        dropout_p=parts.dropout.p if parts.dropout.training else 0.0,
        eps=parts.norm.eps,
    )


def _positions(base, ids: Tensor | None, rows: int, length: int, device) -> Tensor:
    """Positions in the padded row, as the family counts them: padding on the left shifts BERT's."""
    if architectures.BASE_MODELS[type(base).__name__] != "roberta":
        return torch.arange(length, device=device).expand(rows, length)
    padding = base.embeddings.padding_idx
    if ids is None:
        return (torch.arange(length, device=device) + padding + 1).expand(rows, length)
    real = ids.ne(padding).long()
    return real.cumsum(1) * real + padding


def _changed_module(base: Any, layers: Layers) -> str | None:
    """A module that is not what the fused layer stands for: replaced, hooked or given another forward."""
    if architectures.activation(base) is None:
        return "its activation is not one of the fused layer's"
    try:
        layers.read(base)
    except AttributeError as error:
        return f"a layer lacks a part ({error})"
    for parts in layers.parts:
        for module in parts.linears():
            if type(module) is not nn.Linear:
                return f"a linear layer is a {type(module).__name__}"
            if module.bias is None:
                return "a linear layer has no bias"
        for module in parts.norms():
            if type(module) is not nn.LayerNorm:
                return f"a LayerNorm is a {type(module).__name__}"
        for module in (*parts.containers, *parts.linears(), *parts.norms()):
            if is_hooked(module):
                return f"a {type(module).__name__} has hooks or a forward of its own"
    stack = architectures.stack_of(base)
    return "its layer stack has hooks" if is_hooked(stack) else None


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward."""
    return "forward" in module.__dict__ or has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    return (
        bool(module._forward_pre_hooks)
        or bool(module._backward_hooks)
        or bool(module._backward_pre_hooks)
        or any(not _is_recorder(hook) for hook in module._forward_hooks.values())
    )


def _is_recorder(hook) -> bool:
    # Transformers leaves these on after the first call that asked for attentions; they only look.
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
