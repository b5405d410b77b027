"""The encoder-decoder: the model of sequence-to-sequence tasks and of span corruption."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastenc._base.files import write_text_atomically
from fastenc._base.json_values import JsonObject
from fastenc._base.progress import progress_bar, unless_few
from fastenc.models import checkpoint
from fastenc.models.architectures.base import WHOLE
from fastenc.models.checkpoint import read_json
from fastenc.models.config import LAYER_MIX, EncoderConfig
from fastenc.models.decoder import Decoder
from fastenc.models.embedding.text_batches import tokenize
from fastenc.models.encoder import Encoder
from fastenc.models.generation import SearchOptions, search
from fastenc.models.generation_config import (
    GENERATION_CONFIG,
    search_options,
    search_settings,
)
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.frozen_head import FrozenHead
from fastenc.ops import linear_masked_cross_entropy
from fastenc.packing import PackedBatch, check_batch_size, length_sorted_batches, pack_sequences

SHARED, HEAD, LOGITS_BIAS = "shared.weight", "lm_head", "final_logits_bias"


class Seq2Seq(PretrainedModel):
    """An encoder and a decoder that predicts a target's tokens one by one.

    The families: T5, mT5, umT5, Flan; BART, mBART, Marian, Pegasus, M2M100 and NLLB (dense).

        h = Encoder(source),  s = Decoder(target, h),  logits = scale * s E^T + bias

    E is the word embeddings, or an output layer of its own (T5 v1.1). Neither source nor target has padding.

    Attributes:
        decoder_start_token_id: the first token of the decoder's input (:func:`fastenc.packing.pack_targets`). None for
            an mBART whose targets begin with their language's token.
        eos_token_ids: the tokens that end a target.
        generation_config: the checkpoint's generation_config.json, which gives :meth:`generate` its defaults; saved
            with the model. None: the checkpoint has none.
    Source: Raffel et al. 2020, arXiv:1910.10683; Lewis et al. 2019, arXiv:1910.13461.
    """

    architecture = WHOLE
    loss_ignores_padding = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.encoder = Encoder(config.replace(pooler=False))
        self.encoder.adapted.of_encoder_decoder = True
        self.decoder = Decoder(config.decoder(), self.encoder.embeddings.word)
        tied = config.extra.get("tie_word_embeddings", True) is not False
        self.lm_head = None if tied else self._new_head()
        has_bias = config.architecture.has_logits_bias(config)
        self.final_logits_bias: Tensor | None
        self.register_buffer(LOGITS_BIAS, torch.zeros(1, config.vocab_size) if has_bias else None)
        self.output_scale = config.architecture.output_scale(config)
        self.generation_config: dict[str, Any] | None = None
        self.init_modules(self.decoder)
        if self.lm_head is not None:
            self.init_weights(self.lm_head, HEAD)
        self.frozen_head = FrozenHead()

    def _new_head(self) -> nn.Linear:
        return nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)

    @property
    def decoder_start_token_id(self) -> int | None:
        return self.config.architecture.decoder_start(self.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = self.config.extra.get("eos_token_id", self.config.architecture.eos_token_id)
        ids = (self.generation_config or {}).get("eos_token_id", ids)
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
            self.output_weight(),
            self._logits_bias(hidden.dtype),
            labels,
            label_smoothing=label_smoothing,
        )
        return ModelOutput(loss=loss)

    def generate(
        self,
        texts_or_batch: str | Sequence[str] | PackedBatch,
        *,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        batch_size: int = 32,
        show_progress: bool | None = None,
        **options: Any,
    ) -> Any:
        """The targets of texts, by greedy or beam search, without dropout in either mode of the model.

        The weights are taken as frozen during the call, so another thread must not change them.

        Args:
            texts_or_batch: one text or several, for the checkpoint's tokenizer; or a packed batch of token ids. Longer
                texts are cut to the model's positions.
            max_new_tokens, num_beams, options: as in :meth:`generate_ids`.
            batch_size: texts per batch. Batches have texts of similar length; the result is in the given order.
            show_progress: show a progress bar on stderr. None: on a terminal, if there are more than ten batches.
        Returns: a text for each text, without special tokens, or for a batch what :meth:`generate_ids` returns.
        Raises: ValueError for a model without tokenizer, an item that is not a text, and as :meth:`generate_ids`.
        """
        options |= {"max_new_tokens": max_new_tokens, "num_beams": num_beams}
        if isinstance(texts_or_batch, PackedBatch):
            return self.generate_ids(texts_or_batch, **options)
        max_new_tokens = self._search_options(**options).max_new_tokens  # before any work
        single = isinstance(texts_or_batch, str)
        texts = [texts_or_batch] if isinstance(texts_or_batch, str) else list(texts_or_batch)
        tokenizer = self.own_tokenizer()
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(
                    f"generate takes texts, got {text!r} as text {index}: leave it out"
                )
        check_batch_size(batch_size)
        ids = tokenize(texts, tokenizer, self.positions)
        batches = length_sorted_batches([len(each) for each in ids], batch_size)
        show_progress = unless_few(show_progress, len(batches))
        device = self.encoder.embeddings.word.weight.device
        targets: list[list[int]] = [[] for _ in texts]
        with (
            self.encoder.frozen.during_call(self.encoder, calls=len(batches)),
            self.decoder.frozen.during_call(self.decoder, calls=len(batches) * max_new_tokens),
        ):
            for chosen in progress_bar(batches, "generate", "batch", show_progress):
                batch = pack_sequences([ids[index] for index in chosen]).to(device)
                for index, target in zip(chosen, self.generate_ids(batch, **options), strict=True):
                    targets[index] = target
        answers = [tokenizer.decode(target) for target in targets]
        return answers[0] if single else answers

    def generate_ids(
        self,
        batch: PackedBatch,
        *,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | None = None,
        decoder_start_token_id: int | None = None,
        forced_bos_token_id: int | None = None,
        min_new_tokens: int | None = None,
        no_repeat_ngram_size: int | None = None,
    ) -> list[list[int]]:
        """The target of each source, by greedy or beam search with a cache of keys and values.

        The tokens are those of transformers' ``generate`` with the same options and ``do_sample=False``. What is None
        is the checkpoint's, from its generation_config.json or else its config.json, or else the value named here.

        Args:
            batch: the packed sources.
            max_new_tokens: the most tokens of a target, with the end token. None: 128; a checkpoint may give
                ``max_length``, which counts the start token too.
            num_beams: partial targets that are kept for each source. None: 1, greedy search.
            length_penalty: of beam search: a target's score is the sum of its log-probabilities divided by its number
                of tokens to this power. None: 1.
            early_stopping: of beam search: end as soon as there are ``num_beams`` finished targets. None: False.
            decoder_start_token_id: the decoder's first token.
            forced_bos_token_id: the target's first token, such as the language of mBART or NLLB. A checkpoint's
                ``forced_eos_token_id`` is the last token of a target that reaches max_new_tokens.
            min_new_tokens: the least tokens of a target with the end token. None: 0; a checkpoint may give
                ``min_length``.
            no_repeat_ngram_size: n: no n tokens in a row occur twice in a target. None: 0, any may.
        Returns: for each source the target's tokens, without the start token, with the end token if it was reached.
        Raises: ValueError for options out of bounds, without a start token, for targets beyond the positions, and for a
            checkpoint that asks for what is not computed here, such as ``repetition_penalty``. Its ``do_sample`` has no
            effect.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "batch")}
        return search(self, batch, self._search_options(**given))

    def _search_options(self, **given: Any) -> SearchOptions:
        own = self.generation_config
        stored, file = (
            (self.config.extra, "config.json") if own is None else (own, GENERATION_CONFIG)
        )
        settings = search_settings(stored, given, file)
        start = settings.pop("decoder_start_token_id", None)
        start = self.decoder_start_token_id if start is None else start
        if start is None:
            raise ValueError(
                "this checkpoint has no decoder_start_token_id, because its targets begin with their language: give "
                "the language's token as decoder_start_token_id"
            )
        options = search_options(settings, start, self.eos_token_ids)
        self.decoder.check_room(options.max_new_tokens)
        return options

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size), the decoder's output → (rows, vocabulary)."""
        bias = self._logits_bias(hidden.dtype)
        return self.frozen_head.linear(self._scaled(hidden), self.output_weight(), bias)

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.output_scale == 1.0 else hidden * self.output_scale

    def output_weight(self) -> Tensor:
        """(vocabulary, hidden_size): an output layer of its own, or the word embeddings."""
        return (self.encoder.embeddings.word if self.lm_head is None else self.lm_head).weight

    def _logits_bias(self, dtype: torch.dtype) -> Tensor | None:
        bias = self.final_logits_bias
        return None if bias is None else bias.flatten().to(dtype)

    # Checkpoints

    @classmethod
    def check_task(cls, folder: Path, hf_config: JsonObject) -> None:
        super().check_task(folder, hf_config)
        # Raises ValueError for a family without decoders.
        if EncoderConfig.from_hf(hf_config).decoder().layer_mix:
            raise ValueError(
                f"config.json: {LAYER_MIX} must not be set for an encoder-decoder, whose decoder reads the encoder's "
                "last layer: leave it out"
            )

    def family_names(self, with_prefix: bool) -> dict[str, tuple[str, ...]]:
        architecture, table = self.config.architecture, dict[str, tuple[str, ...]]()
        prefix = self._prefix() if with_prefix else ""
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

    def _prefix(self) -> str:
        prefix = self.config.architecture.whole_prefix
        return f"{prefix}." if prefix else ""

    @classmethod
    def constant_tensors(cls, config: EncoderConfig) -> dict[str, Tensor]:
        architecture = config.architecture
        return {
            architecture.name_in_whole(part, name): value
            for part in (config, config.decoder())
            for name, value in architecture.constant_values(part).items()
        }

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

    def read_beside(self, folder: Path) -> None:
        if (folder / GENERATION_CONFIG).exists():
            self.generation_config = read_json(folder / GENERATION_CONFIG)

    def write_beside(self, folder: Path) -> None:
        if self.generation_config is not None:
            text = json.dumps(self.generation_config, ensure_ascii=False, indent=2)
            write_text_atomically(folder / GENERATION_CONFIG, text)

    def head_names(self) -> dict[str, str]:
        return {HEAD: HEAD, LOGITS_BIAS: LOGITS_BIAS}

    def stored_prefixes(self) -> tuple[str, ...]:
        return "encoder.", "decoder."

    def extra_config(self) -> JsonObject:
        return {"is_encoder_decoder": True}
