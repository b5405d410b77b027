"""A patched transformers model as an :class:`fastenc.Encoder`: our calls on packed batches, its weights."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastenc.integrations.transformers.live_embeddings import tables_of
from fastenc.integrations.transformers.live_encoder import FrozenOwner, LiveEncoder, Reading
from fastenc.models.adapters.adaptation_state import AdaptationState
from fastenc.models.encoder import Encoder
from fastenc.nn.embeddings import embed
from fastenc.nn.layer_call import Prepared
from fastenc.nn.pooling import pool
from fastenc.nn.stack import StackModules
from fastenc.packing import PackedBatch


class PatchedEncoder(Encoder):
    """An encoder that reads its weights from a patched transformers model in every call.

    It computes what every :class:`fastenc.Encoder` computes: packed batches, ``encode``, ``embed_words``,
    :mod:`fastenc.analysis`. The weights, the mode (training or evaluation) and the gradients are the model's. Weights
    that change in the model change here. ``fastenc.adapt`` does not take it; PEFT's LoRA in the model does its work.
    """

    def __init__(self, model: Any, live: LiveEncoder, tokenizer: Any = None):
        nn.Module.__init__(self)
        self.model, self.live, self.tokenizer = model, live, tokenizer
        self.config, self.stack, self.frozen = live.config, live.stack, live.frozen
        self.mix, self.sentence, self.adapted = None, None, AdaptationState()
        self.task_options = {}

    @property
    def training(self) -> bool:
        return self.model.training if "model" in self._modules else False

    @training.setter
    def training(self, mode: bool) -> None:
        """The mode is the model's: ``train`` and ``eval`` set it there."""

    @property
    def embeddings(self) -> "LiveEmbeddings":  # type: ignore[override]
        return LiveEmbeddings(self.live, self._read())

    @property
    def layers(self) -> Any:  # type: ignore[override]
        raise ValueError(
            "the layers of a patched model belong to the model: fastenc.adapt takes fastenc.Encoder, "
            "and a patched model takes PEFT's LoRA"
        )

    def _stack_modules(self, frozen: Sequence[Prepared] | None = None) -> StackModules:
        return self._read().stack_modules(frozen)

    def layer_weights(self) -> Any:
        return FrozenOwner(self.model, self.live).layer_weights()

    def layer_adaptations(self) -> Any:
        return FrozenOwner(self.model, self.live).layer_adaptations()

    def _pooled(self, x: Tensor, batch: PackedBatch) -> Tensor | None:
        if getattr(self.model, "pooler", None) is None or not batch.num_sequences:
            return None
        first = pool(x, batch.cu_seqlens, "cls")
        return self.live.kind.live_pooled(self.model, first[:, None])

    def _read(self) -> Reading:
        reading = self.live.read(self.model)
        reason = reading.unsupported_reason or reading.weight_difference()
        if reason is not None:
            raise ValueError(
                f"an encoder of a patched model needs the fused forward, got {type(self.model).__name__}, which runs "
                f"its own forward, because {reason}: undo that"
            )
        return reading


class LiveEmbeddings:
    """The embeddings of a live model, called as :class:`fastenc.nn.embeddings.Embeddings` is."""

    def __init__(self, live: LiveEncoder, reading: Reading):
        self.live, self.reading = live, reading
        self.word = reading.modules["embeddings.word"]
        self.position = reading.modules.get("embeddings.position")

    def __call__(
        self, batch: PackedBatch, tied_weight: bool = False, first_position: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        types = self.reading.modules.get("embeddings.token_type")
        one_type = types is None or types.weight.shape[0] == 1
        x, table = embed(
            self.live.embeddings,
            tables_of(self.reading),
            batch.input_ids,
            position_ids=None if self.position is None else batch.position_ids,
            position_offset=self.live.config.position_offset + first_position,
            token_type_ids=None if one_type else batch.token_type_ids,
            dropout_p=self.reading.embedding_dropout_p,
        )
        return x, table if tied_weight else None


def backend_of(tokenizer: Any) -> Any:
    """A ``tokenizers.Tokenizer`` without padding and truncation, from one or from transformers' fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    copy = type(backend).from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    return copy
