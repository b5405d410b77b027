"""Fertility: how many tokens a tokenizer needs for a word, on average over a language's texts."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastenc._base.extras import require
from fastenc._base.files import write_atomically
from fastenc._base.json_values import JsonObject
from fastenc.text.characters import JOINERS, marks
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import without_limits

# Han, Kana, Thai, Lao, Tibetan, Myanmar, Khmer: scripts that put no spaces between words.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u0f00-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)

SOFT_HYPHEN = "\u00ad"


@dataclass(frozen=True)
class Fertility:
    """Counts over a language's texts.

    Fields:
        tokens: number of tokens, special tokens excluded.
        unknown: number of unknown tokens among them.
        words: number of words; None if most letters belong to a script without spaces.
        characters: number of characters that are not white space.
    """

    tokens: int
    unknown: int
    words: int | None
    characters: int

    @property
    def tokens_per_word(self) -> float | None:
        return None if self.words is None else self.tokens / max(self.words, 1)

    @property
    def characters_per_token(self) -> float:
        return self.characters / max(self.tokens, 1)

    @property
    def unknown_share(self) -> float:
        return self.unknown / max(self.tokens, 1)

    def as_json(self) -> JsonObject:
        """The counts and the three ratios, by name."""
        names = ("tokens_per_word", "characters_per_token", "unknown_share")
        return {**vars(self), **{name: getattr(self, name) for name in names}}


def count_words(text: str) -> int | None:
    """Number of words in a text, or None if most of its letters belong to a script without spaces.

    A word is a run of letters, marks, digits and underscores; it may contain ' ’ · or . between two of them, a comma
    between two digits, and joiners and soft hyphens. These are Unicode's default word boundaries without symbols.
    Source: Unicode Standard Annex 29, section 4.1.
    """
    letters, unspaced = (sum(map(str.isalpha, each)) for each in (text, UNSPACED.findall(text)))
    if 2 * unspaced > letters:
        return None
    return len(_word().findall(text))


@cache
def _word() -> re.Pattern[str]:
    inner = rf"[\w{marks()}][\w{marks()}{JOINERS}{SOFT_HYPHEN}]*"
    return re.compile(rf"{inner}(?:(?:['’.·]|(?<=\d),(?=\d)){inner})*")


def measure_fertility(tokenizer: TokenizerLike, texts: Iterable[str]) -> Fertility:
    """Count the tokens, words and characters of texts. They are tokenised line by line.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        texts: of one language; all lines are held in memory.
    Raises: ValueError if all texts are empty.
    Source: fertility, Rust et al. 2021, arXiv:2012.15613.
    """
    lines = [line for text in texts for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(
            "tokens per word are counted in texts with words, got none: give other texts"
        )
    encodings = without_limits(tokenizer).encode_batch_fast(lines, add_special_tokens=False)
    unk = special_tokens(tokenizer).unk
    return Fertility(
        tokens=sum(len(encoding.ids) for encoding in encodings),
        unknown=sum(encoding.ids.count(unk) for encoding in encodings),
        words=count_words("\n".join(lines)),
        characters=sum(len(part) for line in lines for part in line.split()),
    )


def plot_fertility(results: Mapping[str, Mapping[str, Fertility]], image: Path) -> None:
    """Write a bar plot of tokens per word and of characters per token, by language and tokenizer.

    Args:
        results: {tokenizer's name: {language: counts}}, with the same languages for each tokenizer.
        image: the PNG file to write.
    """
    figure_class = require("matplotlib.figure", extra="plots").Figure
    measures = {
        "tokens per word": lambda counts: counts.tokens_per_word,
        "characters per token": lambda counts: counts.characters_per_token,
    }
    languages = list(next(iter(results.values())))
    figure = figure_class(figsize=(9, 1.5 + 0.22 * len(languages)), layout="constrained")
    height = 0.8 / len(results)
    for axis, (label, value) in zip(figure.subplots(1, 2), measures.items(), strict=True):
        for number, (name, counts) in enumerate(results.items()):
            values = [value(counts[language]) or 0 for language in languages]
            offset = (number - (len(results) - 1) / 2) * height
            axis.barh(
                [row + offset for row in range(len(values))], values, height=height, label=name
            )
        axis.set(yticks=range(len(languages)), yticklabels=languages, xlabel=label)
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=len(results))
    write_atomically(image, lambda temporary: figure.savefig(temporary, format="png", dpi=100))
