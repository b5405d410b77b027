"""Span corruption (T5) and mixtures of denoisers (UL2): sentinels replace spans of the text, which are the target."""

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from fastenc.data.corruption import (
    PREFIX,
    longest_text,
    noise_counts,
    noise_spans,
    replace_spans,
)
from fastenc.data.tokenizer_training import MODES
from fastenc.models import Seq2Seq
from fastenc.objectives.base import Objective
from fastenc.objectives.seq2seq import Seq2SeqCollator, longest_block
from fastenc.text.special_tokens import SENTINEL, sentinel_ids
from fastenc.text.tokenizer_like import TokenizerLike


class Denoiser(NamedTuple):
    """How spans of a text are corrupted.

    Fields:
        density: share of the tokens that are noise, in (0, 1).
        mean_length: mean length of a noise span, at least 1; ``PREFIX``: the text's end is one span.
        mode: token before the source that names the kind of denoiser; None: no token.
    """

    density: float
    mean_length: float
    mode: str | None = None


R, S, X = MODES
# Tay et al. 2022, arXiv:2205.05131, table 1. S is a prefix LM: the last quarter of the text is the target.
UL2_DENOISERS = (
    Denoiser(0.15, 3.0, R),
    Denoiser(0.15, 8.0, R),
    Denoiser(0.25, PREFIX, S),
    Denoiser(0.5, 3.0, X),
    Denoiser(0.5, 8.0, X),
    Denoiser(0.15, 64.0, X),
    Denoiser(0.5, 64.0, X),
)


class SpanCorruptionCollator(Seq2SeqCollator):
    """Replaces noise spans by sentinels; the target is each sentinel and the tokens that it stands for.

        text:   Thank you for inviting me to your party last week
        source: Thank you <extra_id_0> me to your party <extra_id_1> week
        target: <extra_id_0> for inviting <extra_id_1> last

    Each text gets one of the denoisers, all with the same probability. A denoiser with a mode also begins the source
    with the mode's token.

    Args:
        tokenizer: with T5's sentinels <extra_id_0>, …, and with the modes' tokens.
        start_id, static, seed: as in :class:`fastenc.objectives.seq2seq.Seq2SeqCollator`.
        denoisers: at least one.
        longest: largest number of tokens of a block, which decides how many sentinels are needed.
    Raises: ValueError for a density or a mean length out of range, and if the tokenizer lacks a mode's token or has too
        few sentinels.
    Source: Raffel et al. 2019, arXiv:1910.10683, section 3.1.4, and its code; Tay et al. 2022, arXiv:2205.05131.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        start_id: int | None,
        denoisers: Sequence[Denoiser],
        longest: int = 0,
        *,
        static: bool = False,
        seed: int = 0,
    ):
        super().__init__(tokenizer, start_id, static=static, seed=seed)
        for density, mean_length, _ in denoisers:
            check_denoiser(density, mean_length)
        self.sentinels, self.denoisers = sentinel_ids(tokenizer), denoisers
        needed = max(noise_counts(longest, each.density, each.mean_length)[1] for each in denoisers)
        if needed > len(self.sentinels):
            raise ValueError(
                f"a text of {longest} tokens has up to {needed} noise spans, but the tokenizer has "
                f"{len(self.sentinels)} sentinels {SENTINEL.format(0)}, …: give a smaller block_size, longer spans, or "
                "a tokenizer with more sentinels"
            )
        self.modes = {
            mode: tokenizer.token_to_id(mode) for *_, mode in denoisers if mode is not None
        }
        for mode, number in self.modes.items():
            if number is None:
                raise ValueError(
                    f"the tokenizer must have the tokens of the modes {', '.join(self.modes)}, got none for {mode}: "
                    "add it with add_special_tokens, or train a tokenizer with model_type t5"
                )

    def corrupt(self, text: Sequence[int], rng: Random) -> tuple[list[int], list[int]]:
        density, mean_length, mode = rng.choice(self.denoisers)
        spans = noise_spans(len(text), density, mean_length, rng)
        source, target = replace_spans(text, spans, self.sentinels)
        return source if mode is None else [self.modes[mode], *source], target  # type: ignore[list-item]


def check_denoiser(density: float, mean_length: float) -> None:
    """Raises: ValueError for a density outside (0, 1), or a mean length below 1."""
    if not 0 < density < 1:
        raise ValueError(f"probability must be in (0, 1), got {density}: 0.15 is usual")
    if not mean_length >= 1:
        raise ValueError(f"mean_span must be at least 1, got {mean_length}: 3 is usual")


def _span_corruption(
    tokenizer: TokenizerLike,
    blocks: Sequence[Sequence[int]],
    seed: int,
    *,
    start_id: int | None,
    probability: float = 0.15,
    mean_span: float = 3.0,
    static: bool = False,
) -> SpanCorruptionCollator:
    denoisers = [Denoiser(probability, mean_span)]
    longest = longest_block(blocks)
    return SpanCorruptionCollator(tokenizer, start_id, denoisers, longest, static=static, seed=seed)


def _ul2(
    tokenizer: TokenizerLike,
    blocks: Sequence[Sequence[int]],
    seed: int,
    *,
    start_id: int | None,
    static: bool = False,
) -> SpanCorruptionCollator:
    longest = longest_block(blocks)
    return SpanCorruptionCollator(
        tokenizer, start_id, UL2_DENOISERS, longest, static=static, seed=seed
    )


def _text_length(room: int, *, probability: float, mean_span: float, **_: Any) -> int:
    check_denoiser(probability, mean_span)
    return longest_text(room, probability, mean_span)


def _text_length_of_ul2(room: int, **_: Any) -> int:
    # One token of the source is the mode's.
    return min(longest_text(room - 1, each.density, each.mean_length) for each in UL2_DENOISERS)


SPAN_CORRUPTION = Objective(
    Seq2Seq,
    ("full-sentences", "doc-sentences"),
    _span_corruption,
    family="t5",
    tokenizers=("t5",),
    options=("probability", "mean_span", "static"),
    text_length=_text_length,
)
UL2 = Objective(
    Seq2Seq,
    ("full-sentences", "doc-sentences"),
    _ul2,
    family="t5",
    tokenizers=("t5",),
    options=("static",),
    text_length=_text_length_of_ul2,
)
