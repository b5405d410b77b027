"""What the functions from texts to vectors need of an encoder."""

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor, nn

from fastenc.models.config import EncoderConfig
from fastenc.models.embedding.sentence_files import SentenceSettings
from fastenc.nn.frozen_weights import FrozenWeights, WeightsOwner
from fastenc.packing import PackedBatch
from fastenc.text.tokenizer_like import TokenizerLike


class EmbeddingsLike(Protocol):
    @property
    def word(self) -> nn.Embedding: ...


class EncoderLike(WeightsOwner, Protocol):
    """:class:`fastenc.Encoder`, which imports these functions and therefore cannot be imported by them."""

    training: bool
    config: EncoderConfig
    tokenizer: TokenizerLike | None
    sentence: SentenceSettings | None
    sparse: bool
    frozen: FrozenWeights

    @property
    def embeddings(self) -> EmbeddingsLike: ...

    @property
    def positions(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    def __call__(
        self,
        batch: PackedBatch,
        *,
        visit: Callable[[int, Tensor], None] | None = None,
        pooled: bool = True,
    ) -> object: ...

    def adaptation_of_task(self, task: str) -> tuple[str, str]: ...

    def own_tokenizer(self) -> TokenizerLike: ...

    def pooled_vectors(self, batch: PackedBatch, pooling: str) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def eval(self) -> object: ...

    def train(self, mode: bool = True) -> object: ...
