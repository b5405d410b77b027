"""A RoBERTa as a Longformer, which reads longer texts. Source: Beltagy et al. 2020, arXiv:2004.05150, section 5."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from fastenc.models import checkpoint
from fastenc.models.architectures.longformer import WINDOW, Longformer, is_width
from fastenc.models.architectures.roberta import Camembert, Roberta, XlmRoberta
from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import Encoder
from fastenc.models.pretrained import PretrainedModel, architecture_of
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_files import save_tokenizer

SOURCES = (Roberta, XlmRoberta, Camembert)
POSITIONS = "embeddings.position_embeddings.weight"
ENCODER = ("embeddings.", "encoder.", "pooler.")


def convert_to_longformer(
    path_or_hub_id: str | Path,
    folder: str | Path,
    *,
    max_positions: int = 4096,
    attention_window: int | Sequence[int] = 512,
) -> None:
    """Write the checkpoint of a RoBERTa as one of a Longformer with more positions, head and tokenizer included.

    The table of positions is copied again and again until it is long enough. The projections of global tokens are those
    of all tokens. So texts of at most half a window give RoBERTa's states, and ``mlm`` on long texts continues from its
    loss.

    Args:
        path_or_hub_id: a RoBERTa, XLM-RoBERTa or CamemBERT: a folder, or a name on the Hugging Face hub.
        folder: where to write; transformers' Longformer classes and fastenc read it.
        max_positions: the largest number of tokens of a text.
        attention_window: the number of tokens that a token sees, half of them on each side: an even number for all
            layers, or one for each layer.
    Raises: ValueError for another family, an adaptation, positions that are no more than before, a wrong window, a
        folder that has a checkpoint, or weights that do not fit the source's config.json.
    Source: Beltagy et al. 2020, arXiv:2004.05150, section 5.
    """
    source, folder = checkpoint.resolve(path_or_hub_id), Path(folder)
    if (folder / checkpoint.CONFIG).exists():
        raise ValueError(f"{folder} has a checkpoint already: give another folder")
    if (source / checkpoint.ADAPTER_CONFIG).exists():
        raise ValueError(
            f"{source} holds an adaptation, not a model's weights: merge it into the model first"
        )
    values = checkpoint.read_config(source)
    config = EncoderConfig.from_hf(values)
    if type(config.architecture) not in SOURCES:
        names = ", ".join(each.name for each in SOURCES)
        raise ValueError(
            f"a Longformer is made of one of {names}, {source} holds a {config.family}: give such a model"
        )
    first, positions = config.position_offset, config.max_positions
    if max_positions <= positions:
        raise ValueError(
            f"max_positions must be more than the {positions} that {source} has, got {max_positions}: give more"
        )
    windows = _window_of_each_layer(attention_window, config.num_layers)
    tokenizer = Encoder.from_pretrained(source).tokenizer  # this checks that weights and config fit
    tensors = PretrainedModel.by_current_names(config, checkpoint.read_tensors(source), source)
    converted = {
        **values,
        "model_type": Longformer.name,
        "architectures": [Longformer.class_prefix + (architecture_of(values) or "Model")],
        WINDOW: windows,
        "max_position_embeddings": max_positions + first,
    }
    if tokenizer is not None:
        converted["sep_token_id"] = special_tokens(tokenizer).sep
    tensors[POSITIONS] = _repeated(tensors[POSITIONS], first, max_positions)
    tensors |= _global_projections(tensors, config.num_layers)
    prefix = "" if architecture_of(values) == "Model" else f"{Longformer.prefix}."
    checkpoint.write_tensors(
        folder,
        {
            (prefix if name.startswith(ENCODER) else "") + name: tensor
            for name, tensor in tensors.items()
        },
    )
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder, max_length=max_positions)
    checkpoint.write_config(folder, converted)


def _window_of_each_layer(given: int | Sequence[int], num_layers: int) -> list[int]:
    """Raises: ValueError for windows that are not even, or not as many as layers."""
    windows = [given] * num_layers if isinstance(given, int) else list(given)
    if len(windows) != num_layers or not all(map(is_width, windows)):
        raise ValueError(
            f"attention_window must be an even integer above 0, or one for each of the {num_layers} layers, got "
            f"{given}: give such windows"
        )
    return windows


def _global_projections(tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The projections of global tokens: copies of those of all tokens."""
    layers = (f"encoder.layer.{i}.attention.self" for i in range(num_layers))
    names = product(layers, ("query", "key", "value"), ("weight", "bias"))
    return {
        f"{layer}.{name}_global.{leaf}": tensors[f"{layer}.{name}.{leaf}"].clone()
        for layer, name, leaf in names
    }


def _repeated(table: Tensor, first: int, positions: int) -> Tensor:
    """The rows before the first position, then the rows of all positions again and again."""
    rows = table[first:]
    copies = -(-positions // rows.shape[0])
    return torch.cat([table[:first], rows.repeat(copies, 1)[:positions]])
