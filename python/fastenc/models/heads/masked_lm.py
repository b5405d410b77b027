"""The masked-LM model: an encoder and a head that computes logits for the labelled tokens only."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fastenc.models import checkpoint
from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import EncoderOutput, encoder_under_head
from fastenc.models.layer_stack import EncoderLayer
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.activation import activate_plain
from fastenc.nn.embedding_table import EmbeddingTable
from fastenc.nn.embeddings import make_norm
from fastenc.nn.layer import run_with_queries
from fastenc.nn.layer_call import LayerCall
from fastenc.nn.layer_inputs import AttentionInputs, LayerState, rows_of
from fastenc.nn.layer_spec import NormSpec
from fastenc.nn.pooling import check_not_empty
from fastenc.ops import linear_masked_cross_entropy
from fastenc.ops.gemm import linear
from fastenc.ops.labelled import existing_rows, find_labelled, select_labelled
from fastenc.packing import PackedBatch, first_tokens

MASK_DECODER = "mask_decoder"  # key in config.json


class LabelledRows(NamedTuple):
    """The result of :func:`fastenc.ops.labelled.select_labelled`, after the head's transform.

    Fields:
        hidden: (rows, decoder_width), input of the decoder (:meth:`Architecture.decoder_width`).
        targets: int64 (rows,), labels; -100 in rows beyond the labelled ones.
        indices: int64 (rows,), indices of the rows among the packed tokens, or None if the rows are all tokens.
    """

    hidden: Tensor
    targets: Tensor
    indices: Tensor | None


class MaskedLMHead(nn.Module):
    """logits = LN(act(hidden W + b)) E^T + bias, where E is the word embeddings, or an untied decoder's weight.

    A family may have neither the dense layer nor the norm, or an inner layer act(hidden W_i) before the dense layer.

    Raises: ValueError for a family that has no masked-LM head.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        architecture = config.architecture
        if architecture.lm_head is None:
            raise ValueError(
                f"the model's family must have a masked-LM head, got {config.family}: take a model of another family"
            )
        spec = architecture.head(config, architecture.lm_head)
        width = architecture.decoder_width(config)
        self.inner = self.dense = self.norm = None
        if "inner" in spec.names:
            self.inner = nn.Linear(config.hidden_size, spec.inner_size, bias=False)
        if "dense" in spec.names:
            inputs = spec.inner_size or config.hidden_size
            self.dense = nn.Linear(inputs, width, bias=spec.dense_bias)
        if "norm" in spec.names:
            bias = architecture.biases(config).norm
            self.norm = make_norm(NormSpec("layer", config.eps), width, bias)
        # A head without a decoder reads the word embeddings, tied or not.
        tied = config.extra.get("tie_word_embeddings", True) or "decoder" not in spec.names
        # In transformers the decoder's bias has two names, in most families. With an untied decoder, the one inside the
        # decoder counts.
        inside = not tied and spec.decoder_has_bias
        decoder_bias = {"bias": f"{spec.names['decoder']}.bias"} if inside else {}
        self.names = {**spec.names, **decoder_bias}
        self.decoder = None if tied else nn.Linear(width, config.vocab_size, bias=False)
        has_bias = architecture.decoder_bias(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if has_bias else None
        self.activation = spec.kernel_activation(config.activation)

    def transform(self, hidden: Tensor) -> Tensor:
        """LN(act(hidden W + b)): (rows, hidden_size) → (rows, decoder_width)."""
        for layer in (self.inner, self.dense):
            if layer is not None:
                hidden = activate_plain(linear(hidden, layer.weight), layer.bias, self.activation)
        return hidden if self.norm is None else self.norm(hidden)


class MaskedLM(PretrainedModel):
    """Predicts tokens from the context on both sides: the model of masked-LM pretraining.

    With ``mask_decoder``, the head reads DeBERTa's enhanced mask decoder, in which absolute positions P take part:

        z_0 = H + P,  z_{i+1} = Layer_L(queries and residual z_i, keys and values H),  the head reads z_2

    H is the input of the last layer, Layer_L. transformers does not compute it, although the heads of the published
    checkpoints were trained with it.

    Args:
        mask_decoder: whether to decode so; None: as the configuration says. The checkpoint must have position
            embeddings that the encoder does not read.
    Raises: ValueError for ``mask_decoder`` with a family or a configuration that does not have it.
    Source: Devlin et al. 2018, arXiv:1810.04805; He et al. 2020, arXiv:2006.03654, section 3.2, and
        github.com/microsoft/DeBERTa, masked_language_model.py, for the decoder.
    """

    architecture = "ForMaskedLM"
    has_pooler: ClassVar[bool] = False
    loss_ignores_padding = True

    def __init__(self, config: EncoderConfig, *, mask_decoder: bool | None = None):
        if mask_decoder is not None:
            config = config.replace(extra={**config.extra, MASK_DECODER: mask_decoder})
        super().__init__(config)
        self.encoder = encoder_under_head(config, self.has_pooler)
        self.head = MaskedLMHead(config)
        self.mask_positions: nn.Embedding | None = None
        if config.extra.get(MASK_DECODER):
            if "mask_positions" not in config.architecture.names(config):
                raise ValueError(
                    "mask_decoder is for a DeBERTa whose encoder reads no position embeddings (position_biased_input: "
                    f"false), got family {config.family!r}: leave it out"
                )
            if config.embedding_size != config.hidden_size:
                raise ValueError(
                    f"mask_decoder needs embeddings of the layers' width {config.hidden_size}, got "
                    f"{config.embedding_size}: leave it out"
                )
            self.mask_positions = EmbeddingTable(config.max_positions, config.hidden_size)
            self.init_weights(self.mask_positions, "position")
        self.init_modules(self.head)

    def _to_canonical(self, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        needed = self.family_names(with_prefix=False).get("mask_positions.weight", ())
        # If config.json asks for the decoder, the file is incomplete, and the base class says so.
        asked_by_caller = not checkpoint.read_config(folder).get(MASK_DECODER)
        if asked_by_caller and not tensors.keys() >= {*needed}:
            raise ValueError(
                f"mask_decoder needs a checkpoint with position embeddings, {folder} lacks {needed[0]}: leave it out"
            )
        return super()._to_canonical(tensors, folder)

    def forward(
        self, batch: PackedBatch, labels: Tensor | None = None, max_labels: int | None = None
    ) -> ModelOutput:
        """Loss over the labelled tokens, or logits of every token.

        Args:
            labels: int64 (total_tokens,), -100 where there is nothing to predict. With labels, the head computes the
                labelled tokens only, and ``logits`` is None.
            max_labels: the number of labelled tokens or an upper bound of it, as MlmCollator gives it. On a GPU the
                head computes this many tokens, or all tokens without it, so that nothing waits for the device.
        Returns: the mean loss over the labelled tokens (0 if there is none), or logits (total_tokens, vocabulary).
        """
        if labels is None:
            encoded, decoder_weight = self.encode(batch)
            return ModelOutput(logits=self.logits(encoded.last_hidden_state, decoder_weight))
        rows, decoder_weight, _ = self.encode_labelled(batch, labels, max_labels)
        return ModelOutput(loss=self.loss(rows, decoder_weight))

    def encode(
        self, batch: PackedBatch, output_tokens: Tensor | None = None
    ) -> tuple[EncoderOutput, Tensor]:
        """(the encoder's output, the decoder's weight E (vocabulary, decoder_width)).

        Args: output_tokens: as in the encoder's forward.
        """
        decoder = self.head.decoder
        inputs_of_last: list[tuple[Tensor, AttentionInputs]] = []

        def keep(number: int, x: Tensor, inputs: AttentionInputs) -> None:
            if number == self.config.num_layers - 1:
                inputs_of_last.append((x, inputs))

        visit = None if self.mask_positions is None else keep
        output = self.encoder(
            batch, tied_weight=decoder is None, visit_input=visit, output_tokens=output_tokens
        )
        if self.mask_positions is not None:
            hidden = self._decode(batch, self.mask_positions, *inputs_of_last[0])
            output = replace(output, last_hidden_state=rows_of(hidden, output_tokens))
        return output, output.tied_weight if decoder is None else decoder.weight

    def _decode(
        self, batch: PackedBatch, positions: nn.Embedding, x: Tensor, inputs: AttentionInputs
    ) -> Tensor:
        """The enhanced mask decoder's output (total_tokens, hidden_size)."""
        self.encoder.frozen.require_weights("the mask decoder")
        if self.encoder.adapted.current is not None:
            raise ValueError(
                "the mask decoder does not compute adaptations, got one in use: merge it into the weights, or load "
                "the model with mask_decoder=False"
            )
        if batch.max_seqlen > positions.num_embeddings:
            raise ValueError(
                f"with the mask decoder a sequence may have at most {positions.num_embeddings} tokens, got "
                f"{batch.max_seqlen}: cut it or split it"
            )
        stack = self.encoder.stack
        layer = self.encoder.layers[stack.module_of_layer[-1]]
        assert isinstance(layer, EncoderLayer)
        spec, state = stack.layers[-1], LayerState(x, x)
        z = x + positions(batch.position_ids).to(x.dtype)
        for _ in range(2):
            z = run_with_queries(
                LayerCall(state, inputs, layer.weights(), spec, layer.dropout()), z
            )
        return z

    def logits(self, hidden: Tensor, decoder_weight: Tensor) -> Tensor:
        """(rows, hidden_size) → (rows, vocabulary). decoder_weight: from :meth:`encode`."""
        return linear(self.head.transform(hidden), decoder_weight, self.head.bias)

    def encode_labelled(
        self, batch: PackedBatch, labels: Tensor, max_labels: int | None = None
    ) -> tuple[LabelledRows, Tensor, Tensor | None]:
        """(the labelled rows, the decoder's weight, the pooler's output if the model reads it).

        The last layer computes its feed-forward sublayer for these tokens alone.

        Args: labels, max_labels: as in the forward.
        """
        _check_labels(labels, batch.total_tokens)
        targets, indices = find_labelled(labels, max_labels=max_labels)
        if indices is None:
            encoded, decoder_weight = self.encode(batch)
            hidden, pooled = encoded.last_hidden_state, encoded.pooled
        else:
            tokens, first = existing_rows(indices, batch.total_tokens), 0
            if self.has_pooler:
                check_not_empty(batch.cu_seqlens)
                tokens, first = torch.cat([first_tokens(batch), tokens]), batch.num_sequences
            encoded, decoder_weight = self.encode(batch, tokens)
            hidden, pooled = encoded.last_hidden_state[first:], None
            if self.has_pooler:
                pooled = self.encoder.pool_first(encoded.last_hidden_state[:first])
        return LabelledRows(self.head.transform(hidden), targets, indices), decoder_weight, pooled

    def labelled(
        self, hidden: Tensor, labels: Tensor, max_labels: int | None = None
    ) -> LabelledRows:
        """The labelled rows of ``hidden`` (total_tokens, hidden_size), after the head's transform."""
        _check_labels(labels, hidden.shape[0])
        chosen, targets, indices = select_labelled(hidden, labels, max_labels=max_labels)
        return LabelledRows(self.head.transform(chosen), targets, indices)

    def loss(self, rows: LabelledRows, decoder_weight: Tensor) -> Tensor:
        """Mean loss over the labelled rows, 0 if there is none. decoder_weight: from :meth:`encode`."""
        return linear_masked_cross_entropy(
            rows.hidden,
            decoder_weight,
            self.head.bias,
            rows.targets,
            max_labels=rows.targets.shape[0],
        )

    def head_names(self) -> dict[str, str]:
        return {f"head.{ours}": theirs for ours, theirs in self.head.names.items()}


def _check_labels(labels: Tensor, tokens: int) -> None:
    if labels.shape != (tokens,):
        raise ValueError(
            f"labels must have shape ({tokens},), one for each packed token, got {tuple(labels.shape)}"
        )
