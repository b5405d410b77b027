"""The fused forward of transformers' encoder-decoders: decoders on packed targets, and the loss over the labels."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastenc.integrations.transformers import base_model
from fastenc.integrations.transformers.base_model import PackedRun
from fastenc.integrations.transformers.batch_metadata import read_metadata
from fastenc.integrations.transformers.live_embeddings import embed
from fastenc.integrations.transformers.live_encoder import LiveEncoder
from fastenc.integrations.transformers.live_reading import Reading
from fastenc.models.architectures import ARCHITECTURES, Architecture
from fastenc.models.architectures.base import WHOLE
from fastenc.models.decoder import attended_source
from fastenc.nn.frozen_layers import FrozenLayers
from fastenc.nn.layer_cache import LayerCache
from fastenc.nn.stack import run_stack
from fastenc.ops import linear_masked_cross_entropy, masked_cross_entropy
from fastenc.ops import pack as pack_rows
from fastenc.ops.gemm import linear
from fastenc.packing import PackedBatch, check_cu_seqlens, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLASSES = ("ForSequenceClassification", "ForQuestionAnswering")
SOURCE = ("encoder_hidden_states", "encoder_attention_mask")


def architecture_of(model: Any) -> Architecture | None:
    """The architecture of a whole encoder-decoder of transformers, or None if it is none that patch supports."""
    architecture = ARCHITECTURES.get(getattr(model.config, "model_type", ""))
    if architecture is None or not architecture.has_decoder:
        return None
    name, home = type(model).__name__, type(model).__module__
    names = ("Model", architecture.whole_class, *CLASSES)
    supported = {architecture.class_prefix + each for each in names}
    return architecture if name in supported and home.startswith("transformers.") else None


def has_loss(model: Any) -> bool:
    """Whether a whole encoder-decoder has a language-model head."""
    architecture = architecture_of(model)
    return architecture is not None and architecture.head_of(type(model).__name__) == WHOLE


def stacks_of(model: "PreTrainedModel") -> tuple[Any, Any]:
    """The encoder and the decoder of a whole model."""
    base: Any = model.base_model
    return base.encoder, base.decoder


def decoder_reason(
    decoder: "PreTrainedModel", live: LiveEncoder, arguments: dict[str, Any]
) -> str | None:
    """Why a decoder must take its own forward for a call without cache, or None."""
    reason = base_model.inputs_reason(decoder, arguments)
    if reason is not None:
        return reason
    states, mask = (arguments.get(name) for name in SOURCE)
    if type(states) is not Tensor or states.dim() != 3:
        return "there are no states of an encoder"
    if mask is not None and (type(mask) is not Tensor or mask.shape != states.shape[:2]):
        return "encoder_attention_mask is not (batch, length)"
    own = {name: value for name, value in arguments.items() if name not in SOURCE}
    # The class is a decoder's, and its configuration says so.
    reason = base_model.arguments_reason(decoder, live, own | {"is_decoder": False})
    target_mask = arguments.get("attention_mask")
    if reason is None and target_mask is not None:
        reason = base_model.padding_reason(target_mask, read_metadata(target_mask, None))
    if reason is not None:
        return reason
    sizes = read_metadata(mask, None)
    if sizes is not None and sizes.empty_rows:
        # transformers gives its targets the mean of the source's values, and the kernels give them 0.
        return "a source has no token"
    return None


def run_decoder(
    live: LiveEncoder,
    reading: Reading,
    arguments: dict[str, Any],
    target: PackedBatch,
    states: Tensor,
    source: PackedBatch,
    wanted: frozenset[int] = frozenset(),
    caches: Sequence[LayerCache] | None = None,
    frozen: FrozenLayers | None = None,
) -> PackedRun:
    """Decode a packed target.

    Args:
        states: those of the packed ``source``.
        wanted: numbers of the states to keep.
        caches: for each layer its keys and values of earlier tokens; then ``target`` has the new tokens only.
        frozen: the layers' packed weights. None: those that :func:`fastenc.freeze` has made, if any.
    """
    check_cu_seqlens(target.cu_seqlens, target.total_tokens, target.max_seqlen)
    x, tied_weight = embed(live, reading, arguments, target, caches[0].length if caches else 0)
    modules = reading.stack_modules(frozen or live.frozen.current())
    attended = attended_source(states, source, target)
    sequences = (target.cu_seqlens, target.max_seqlen)
    kept: list[Tensor | None] = []
    for number, state in enumerate(
        run_stack(x, *sequences, live.stack, modules, None, attended, caches)
    ):
        kept.append(state.to(x.dtype) if number in wanted else None)
    return PackedRun(state.to(x.dtype), tuple(kept), target, tied_weight)


def decode(
    decoder: "PreTrainedModel", live: LiveEncoder, reading: Reading, arguments: dict[str, Any]
) -> Any:
    """A decoder's output without cache, in the class that its own forward returns."""
    states, mask = arguments["encoder_hidden_states"], arguments.get("encoder_attention_mask")
    source = _packed(states, mask)
    target = _packed(base_model.inputs_of(arguments), arguments.get("attention_mask"))
    wanted = base_model.wanted_states(decoder, live, arguments)
    packed = run_decoder(
        *(live, reading, arguments, target),
        *(pack_rows(states, source), source, wanted or frozenset()),
    )
    return base_model.output(decoder, live, packed, arguments, wanted)


def _packed(inputs: Any, mask: Tensor | None) -> PackedBatch:
    """The batch of (batch, length) ids, or of (batch, length, width) states, which have no ids."""
    ids = inputs if inputs.dim() == 2 else inputs.new_zeros(inputs.shape[:2], dtype=torch.long)
    return pack(ids, mask)


def with_loss(
    model: Any,
    readings: Sequence[tuple[LiveEncoder, Reading]],
    arguments: dict[str, Any],
    labelled_logits_only: bool,
) -> Any:
    """Loss and logits of a call with labels; with ``labelled_logits_only`` the loss without logits.

    A target ends with its last label. The positions after it are not computed, and their logits are 0.

    Args: readings: of the encoder and of the decoder.
    """
    from transformers.modeling_outputs import Seq2SeqLMOutput

    (encoder, encoder_reading), (decoder, decoder_reading) = readings
    labels = arguments["labels"]
    of_encoder = {name: arguments.get(name) for name in ("input_ids", "attention_mask")}
    mask = of_encoder["attention_mask"]
    sizes = read_metadata(mask, None)
    source = base_model.run(encoder, encoder_reading, of_encoder, sizes, None)
    ids = arguments.get("decoder_input_ids")
    if ids is None:
        ids = _decoder_input_ids(model, labels)
    counted = (labels != -100).flip(1).cumsum(1).flip(1)
    target = pack(ids, counted > 0)
    packed = run_decoder(
        decoder, decoder_reading, {"input_ids": ids}, target, source.last, source.batch
    )
    hidden = packed.last
    assert target.indices is not None  # pack() sets it
    targets = labels.reshape(-1)[target.indices]
    scale = encoder.architecture.output_scale(encoder.config)
    hidden = hidden if scale == 1.0 else hidden * scale
    bias = getattr(model, "final_logits_bias", None)
    bias = None if bias is None else bias.flatten().to(hidden.dtype)
    weight, logits = model.lm_head.weight, None
    if labelled_logits_only:
        loss = linear_masked_cross_entropy(hidden, weight, bias, targets)
    else:
        logits = linear(hidden, weight, bias)
        loss = masked_cross_entropy(logits, targets)
        logits = packed.padded(logits)
    loss = base_model.nan_without_labels(loss, targets)
    result = Seq2SeqLMOutput(
        loss=loss, logits=logits, encoder_last_hidden_state=source.padded(source.last)
    )
    return base_model.in_form_asked_for(result, model, arguments)


def _decoder_input_ids(model: Any, labels: Tensor) -> Tensor:
    """The labels, shifted right as the class does it."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    # M2M100 has no such method: its forward calls a function of its module.
    config, module = model.config, sys.modules[type(model).__module__]
    start = config.decoder_start_token_id
    ids: Tensor = module.shift_tokens_right(labels, config.pad_token_id, start)
    return ids


def loss_reason(model: Any, arguments: dict[str, Any]) -> str | None:
    """Why a call with labels cannot compute encoder, decoder and loss on packed tokens, or None."""
    known = {
        "input_ids",
        "attention_mask",
        "decoder_input_ids",
        "labels",
        "return_dict",
        "use_cache",
        # The Trainer gives it, and the classes' losses do not read it.
        "num_items_in_batch",
    }
    if extra := base_model.given_names(arguments) - known:
        return f"it was called with {', '.join(sorted(extra))}"
    labels, head = arguments["labels"], model.lm_head
    if type(labels) is not Tensor or labels.dim() != 2 or arguments.get("input_ids") is None:
        return "labels and input_ids are not (batch, length)"
    ids = arguments.get("decoder_input_ids")
    if ids is not None and ids.shape != labels.shape:
        return "decoder_input_ids have another shape than labels"
    if type(head) is not torch.nn.Linear or head.bias is not None or head._forward_hooks:
        return "lm_head is not that of the class"
    if model.config.output_hidden_states:
        return "hidden states are requested"
    return None


def padding_labels_reason(arguments: dict[str, Any]) -> str | None:
    """Why the loss of a call with ``decoder_attention_mask`` needs the decoder's states of padding, or None."""
    labels, mask = arguments["labels"], arguments.get("decoder_attention_mask")
    if type(labels) is not Tensor or type(mask) is not Tensor or labels.shape != mask.shape:
        return None
    labelled = bool(((mask == 0) & (labels != -100)).any())
    return "a padding token has a label" if labelled else None
