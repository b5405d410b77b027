"""Denoising (BART): the source is a corrupted text, the target is the whole text."""

from collections.abc import Sequence
from random import Random

from fastenc.data.corruption import delete_tokens, infill, mask_tokens, permute_sentences, rotate
from fastenc.data.sentences import SPACED_MARKS, UNSPACED_MARKS
from fastenc.models import Seq2Seq
from fastenc.objectives.base import Objective
from fastenc.objectives.seq2seq import Seq2SeqCollator
from fastenc.text.tokenizer_like import TokenizerLike


class DenoiseCollator(Seq2SeqCollator):
    """Corrupts texts by up to five kinds of noise, in this order; by default by the first and the third.

    The target is the text. The share of a kind of noise is that of the tokens which are there when its turn comes.

    Args:
        tokenizer: with a mask token.
        start_id, static, seed: as in :class:`fastenc.objectives.seq2seq.Seq2SeqCollator`.
        permute_sentences: put the sentences in random order. A sentence ends after a token that ends with a full stop,
            or another mark that ends sentences, and at a document's end.
        rotation: let the text begin with a random token.
        infilling: share of tokens in spans, each of which becomes one mask token.
        mean_span: mean of the spans' lengths, which are Poisson-distributed; a span of length 0 inserts a mask token.
        token_masking: share of tokens that become the mask token.
        token_deletion: share of tokens that are deleted.
    Raises: ValueError for a share outside [0, 1), a mean length that is not positive and finite, no noise at all, or a
        tokenizer without a mask token.
    Source: Lewis et al. 2019, arXiv:1910.13461, sections 2.2 and 5.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        start_id: int | None,
        *,
        permute_sentences: bool = True,
        rotation: bool = False,
        infilling: float = 0.3,
        mean_span: float = 3.0,
        token_masking: float = 0.0,
        token_deletion: float = 0.0,
        static: bool = False,
        seed: int = 0,
    ):
        super().__init__(tokenizer, start_id, static=static, seed=seed)
        shares = dict(
            infilling=infilling, token_masking=token_masking, token_deletion=token_deletion
        )
        for name, share in shares.items():
            if not 0 <= share < 1:
                raise ValueError(
                    f"{name} must be in [0, 1), got {share}: give a share of the tokens"
                )
        if not 0 < mean_span < float("inf"):
            raise ValueError(f"mean_span must be positive and finite, got {mean_span}: 3 is usual")
        if not (permute_sentences or rotation or any(shares.values())):
            raise ValueError(
                "there must be some noise, got none: give infilling, token_masking, token_deletion, "
                "permute_sentences or rotation"
            )
        self.permute_sentences, self.rotation = permute_sentences, rotation
        self.infilling, self.mean_span = infilling, mean_span
        self.token_masking, self.token_deletion = token_masking, token_deletion
        self.mask_id = self.special.mask
        self._ends = sentence_end_ids(tokenizer) | {self.special.sep}

    def corrupt(self, text: Sequence[int], rng: Random) -> tuple[Sequence[int], Sequence[int]]:
        noisy = text
        if self.permute_sentences:
            noisy = permute_sentences(noisy, self.sentence_ends(noisy), rng)
        if self.rotation:
            noisy = rotate(noisy, rng)
        if self.infilling:
            noisy = infill(noisy, self.infilling, self.mean_span, self.mask_id, rng)
        if self.token_masking:
            noisy = mask_tokens(noisy, self.token_masking, self.mask_id, rng)
        if self.token_deletion:
            noisy = delete_tokens(noisy, self.token_deletion, rng)
        return noisy, text

    def sentence_ends(self, text: Sequence[int]) -> list[int]:
        """Index after the last token of each sentence that has an end; marks that follow each other are one end."""
        ends = [token in self._ends for token in text]
        return [
            index
            for index, (end, next_end) in enumerate(zip(ends, [*ends[1:], False], strict=True), 1)
            if end and not next_end
        ]


def sentence_end_ids(tokenizer: TokenizerLike) -> frozenset[int]:
    """Ids of the tokens whose text ends with a mark that ends sentences."""
    marks = (*SPACED_MARKS, *UNSPACED_MARKS)
    vocabulary = range(tokenizer.get_vocab_size())
    return frozenset(number for number in vocabulary if tokenizer.decode([number]).endswith(marks))


def _collator(
    tokenizer: TokenizerLike, blocks: Sequence[Sequence[int]], seed: int, **options
) -> DenoiseCollator:
    return DenoiseCollator(tokenizer, seed=seed, **options)


DENOISE = Objective(
    Seq2Seq,
    ("doc-sentences", "full-sentences"),
    _collator,
    family="bart",
    tokenizers=("bpe", "wordpiece", "unigram"),
    options=(
        "permute_sentences",
        "rotation",
        "infilling",
        "mean_span",
        "token_masking",
        "token_deletion",
        "static",
    ),
)
