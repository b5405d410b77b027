"""The encoder-decoder: the model of sequence-to-sequence tasks and of span corruption."""

from pathlib import Path

import torch
from torch import Tensor, nn

from fastenc._base.json_values import JsonObject
from fastenc.models import checkpoint
from fastenc.models.config import EncoderConfig
from fastenc.models.decoder import Decoder
from fastenc.models.encoder import Encoder
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel
from fastenc.ops import linear_masked_cross_entropy
from fastenc.ops.gemm import linear
from fastenc.packing import PackedBatch

SHARED, HEAD, LOGITS_BIAS = "shared.weight", "lm_head", "final_logits_bias"


class Seq2Seq(PretrainedModel):
    """An encoder and a decoder that predicts a target's tokens one by one (T5, mT5, umT5, Flan; BART, mBART).

        h = Encoder(source),  s = Decoder(target, h),  logits = scale * s E^T + bias

    E is the word embeddings, or an output layer of its own (T5 v1.1). Neither source nor target has padding.

    Attributes:
        decoder_start_token_id: the first token of the decoder's input (:func:`fastenc.packing.pack_targets`). None for
            an mBART whose targets begin with their language's token.
        eos_token_ids: the tokens that end a target.
    Source: Raffel et al. 2020, arXiv:1910.10683; Lewis et al. 2019, arXiv:1910.13461.
    """

    architecture = "ForConditionalGeneration"
    loss_ignores_padding = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.encoder = Encoder(config.replace(pooler=False))
        self.decoder = Decoder(config.decoder(), self.encoder.embeddings.word)
        tied = config.extra.get("tie_word_embeddings", True) is not False
        self.lm_head = None if tied else self._new_head()
        has_bias = config.architecture.has_logits_bias(config)
        self.final_logits_bias: Tensor | None
        self.register_buffer(LOGITS_BIAS, torch.zeros(1, config.vocab_size) if has_bias else None)
        self.output_scale = config.architecture.output_scale(config)
        for part in (self.decoder, self.lm_head):
            if part is not None:
                self.init_modules(part)

    def _new_head(self) -> nn.Linear:
        return nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)

    @property
    def decoder_start_token_id(self) -> int | None:
        return self.config.architecture.decoder_start(self.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = self.config.extra.get("eos_token_id", self.config.architecture.eos_token_id)
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)

    def forward(
        self,
        batch: PackedBatch,
        target: PackedBatch,
        labels: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> ModelOutput:
        """Loss over the target's labels, or the logits of the target's tokens.

        Args:
            batch: the packed source.
            target: the packed decoder input, one sequence for each of the source's, shifted right: the start token and
                the labels without the last (:func:`fastenc.packing.pack_targets`).
            labels: int64 (target tokens,), -100 where there is nothing to predict. With labels, no logits are kept, and
                ``logits`` is None.
            label_smoothing: as in :func:`fastenc.ops.linear_masked_cross_entropy`.
        Returns: the mean loss over the labels (0 if there is none), or logits (target tokens, vocabulary).
        """
        source = self.encoder(batch)
        hidden = self.decoder(target, source.last_hidden_state, batch)
        if labels is None:
            return ModelOutput(logits=self.logits(hidden))
        if labels.shape != hidden.shape[:1]:
            raise ValueError(
                f"labels must have shape ({hidden.shape[0]},), one for each token of the target, got "
                f"{tuple(labels.shape)}: make both with fastenc.packing.pack_targets"
            )
        loss = linear_masked_cross_entropy(
            self._scaled(hidden),
            self._output_weight(),
            self._logits_bias(hidden.dtype),
            labels,
            label_smoothing=label_smoothing,
        )
        return ModelOutput(loss=loss)

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size), the decoder's output → (rows, vocabulary)."""
        bias = self._logits_bias(hidden.dtype)
        return linear(self._scaled(hidden), self._output_weight(), bias)

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.output_scale == 1.0 else hidden * self.output_scale

    def _output_weight(self) -> Tensor:
        return (self.encoder.embeddings.word if self.lm_head is None else self.lm_head).weight

    def _logits_bias(self, dtype: torch.dtype) -> Tensor | None:
        bias = self.final_logits_bias
        return None if bias is None else bias.flatten().to(dtype)

    # Checkpoints

    def family_names(self, with_prefix: bool) -> dict[str, tuple[str, ...]]:
        architecture, table = self.config.architecture, dict[str, tuple[str, ...]]()
        prefix = (
            f"{architecture.whole_prefix}." if with_prefix and architecture.whole_prefix else ""
        )
        for part, model in (("encoder", self.encoder), ("decoder", self.decoder)):
            names = architecture.names(model.config)
            for key in model.state_dict():
                module, leaf = key.rsplit(".", 1)
                if module == "embeddings.word":
                    continue
                theirs = names[module]
                several = (theirs,) if isinstance(theirs, str) else theirs
                table[f"{part}.{key}"] = tuple(
                    f"{prefix}{architecture.name_in_whole(model.config, name)}.{leaf}"
                    for name in several
                )
        table["encoder.embeddings.word.weight"] = (f"{prefix}{SHARED}",)
        own = {f"{HEAD}.weight", LOGITS_BIAS} & self.state_dict().keys()
        return table | {name: (name,) for name in own}

    @classmethod
    def renamed(cls, config: EncoderConfig, stored: str, tensor: Tensor) -> dict[str, Tensor]:
        name = stored.removeprefix(f"{config.architecture.whole_prefix}.")
        # Old files have a table here that no model reads.
        if name.endswith(".EncDecAttention.relative_attention_bias.weight"):
            return {}
        return {SHARED if name.endswith(".embed_tokens.weight") else name: tensor}

    def _to_canonical(self, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        # As in transformers, the weights and not config.json say whether there is an output layer of its own.
        head, shared = tensors.get(f"{HEAD}.weight"), tensors.get(SHARED)
        tied = head is None or (shared is not None and checkpoint.same(head, shared))
        with torch.device("meta"):
            self.lm_head = None if tied else self._new_head()
        state = super()._to_canonical(tensors, folder)
        state.pop("decoder.embeddings.word.weight")  # the encoder's
        if self.final_logits_bias is not None and LOGITS_BIAS not in tensors:
            state[LOGITS_BIAS] = torch.zeros(self.final_logits_bias.shape)
        return state

    def head_names(self) -> dict[str, str]:
        return {HEAD: HEAD, LOGITS_BIAS: LOGITS_BIAS}

    def stored_prefixes(self) -> tuple[str, ...]:
        return "encoder.", "decoder."

    def extra_config(self) -> JsonObject:
        return {"is_encoder_decoder": True}
