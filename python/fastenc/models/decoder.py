"""The decoder of an encoder-decoder: embeddings and layers over packed targets, which attend to a packed source."""

from collections.abc import Sequence

from torch import Tensor

from fastenc.models.config import EncoderConfig
from fastenc.models.layer_stack import LayerStack
from fastenc.nn.embedding_table import EmbeddingTable
from fastenc.nn.layer_cache import LayerCache
from fastenc.nn.layer_inputs import Source
from fastenc.nn.stack import run_stack
from fastenc.packing import PackedBatch, check_cu_seqlens


def attended_source(states: Tensor, source: PackedBatch, target: PackedBatch) -> Source:
    """What a decoder's tokens attend to. A sequence of the source may have several targets, which follow each other.

    Args: states: (source tokens, hidden_size).
    """
    targets = target.num_sequences // max(1, source.num_sequences)
    offsets = target.cu_seqlens if targets == 1 else target.cu_seqlens[::targets]
    return Source(
        states, source.cu_seqlens, source.max_seqlen, offsets, target.max_seqlen * targets
    )


class Decoder(LayerStack):
    """The layers of a decoder. Each token sees itself, the tokens before it in its sequence, and the whole source.

    Args:
        config: from :meth:`EncoderConfig.decoder`.
        word: the word embeddings, which are the encoder's.
    """

    def __init__(self, config: EncoderConfig, word: EmbeddingTable):
        super().__init__()
        self.config = config
        self.make_stack(config)
        self.embeddings.word = word

    def forward(
        self,
        target: PackedBatch,
        states: Tensor,
        source: PackedBatch,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """The last layer's output (target tokens, hidden_size).

        Args:
            target: the decoder's input tokens, one sequence for each of the source's; with ``caches`` the new tokens.
            states: (source tokens, hidden_size), the encoder's output for ``source``.
            caches: one for each layer. Then sequence i of the source may have several targets, which follow each other.
        Raises: ValueError if the numbers of sequences do not belong together, for token ids outside the vocabulary, and
            for targets longer than the model's positions.
        """
        self._check(target, source, caches)
        check_cu_seqlens(target.cu_seqlens, target.total_tokens, target.max_seqlen)
        x, _ = self.embeddings(target)
        attended = attended_source(states, source, target)
        modules = self._stack_modules(self.frozen.current())
        *_, last = run_stack(
            x, target.cu_seqlens, target.max_seqlen, self.stack, modules, None, attended, caches
        )
        return last

    def _check(
        self, target: PackedBatch, source: PackedBatch, caches: Sequence[LayerCache] | None
    ) -> None:
        several = caches is not None and source.num_sequences and target.num_sequences
        whole = target.num_sequences % source.num_sequences == 0 if several else False
        if target.num_sequences != source.num_sequences and not whole:
            raise ValueError(
                f"the target must have one sequence for each of the source's {source.num_sequences}, got "
                f"{target.num_sequences}: pack both in the same order"
            )
        self.check_room(target.max_seqlen + (caches[0].length if caches else 0))

    def check_room(self, tokens: int) -> None:
        """Raise ValueError for more tokens of a target than the model has positions."""
        positions = self.config.max_positions
        if self.embeddings.position is not None and tokens > positions:
            raise ValueError(
                f"a target may have at most {positions} tokens, the model's positions, got {tokens}: cut it, or take a "
                "smaller max_new_tokens"
            )
