"""What the objectives of encoder-decoders share: blocks of text are corrupted, and source and target are packed."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from random import Random

from fastenc._base.seeds import derive_seed
from fastenc.data.blocks import text_of_block
from fastenc.data.store import StoredExamples
from fastenc.packing import ModelArguments, pack_sequences, pack_targets
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike


class Seq2SeqCollator(ABC):
    """Corrupts blocks of text and packs both sides: [CLS] source [SEP] and [CLS] target [SEP].

    T5's tokenizers have no [CLS]. The random numbers depend on (seed, step) only, so a resumed run sees the same
    batches as an uninterrupted one. With ``static`` they depend on (seed, the block's tokens).

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        start_id: as in :func:`fastenc.packing.pack_targets`.
        static: corrupt a block in the same way in every epoch.
        seed: seed of all random numbers.
    """

    def __init__(
        self, tokenizer: TokenizerLike, start_id: int | None, *, static: bool = False, seed: int = 0
    ):
        self.special = special_tokens(tokenizer)
        self.start_id, self.static, self.seed = start_id, static, seed

    @abstractmethod
    def corrupt(self, text: Sequence[int], rng: Random) -> tuple[Sequence[int], Sequence[int]]:
        """(source, target) of a text, all without the special tokens at their ends."""

    def __call__(self, blocks: Sequence[Sequence[int]], step: int) -> ModelArguments:
        """The model's arguments.

        Returns: {"batch": PackedBatch of the sources,
            "target": PackedBatch of the decoder's inputs,
            "labels": int64 (target tokens,)}.
        """
        rng = Random(derive_seed(self.seed, step))
        sources: list[list[int]] = []
        targets: list[list[int]] = []
        for ids in blocks:
            if self.static:
                rng = Random(derive_seed(self.seed, str(list(ids))))
            sides = self.corrupt(text_of_block(ids, self.special), rng)
            for side, packed in zip(sides, (sources, targets), strict=True):
                packed.append([*self.special.begin, *side, self.special.sep])
        decoder, labels = pack_targets(targets, self.start_id)
        return {"batch": pack_sequences(sources), "target": decoder, "labels": labels}


def longest_block(blocks: Sequence[Sequence[int]]) -> int:
    """Number of tokens of the longest block; 0 without blocks."""
    lengths: Iterable[int] = (
        blocks.lengths.tolist() if isinstance(blocks, StoredExamples) else map(len, blocks)
    )
    return max(lengths, default=0)
