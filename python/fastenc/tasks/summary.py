"""Describes a data set in words for the user."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

SHOWN = 12  # number of labels in a description


def count_labels(labels: Iterable[str]) -> str:
    """The number of each label, the most frequent first, such as "neg 60, pos 40"."""
    counts = Counter(labels)
    counted = [f"{label} {count:,}" for label, count in counts.most_common(SHOWN)]
    if len(counts) > SHOWN:
        counted.append(f"and {len(counts) - SHOWN:,} more")
    return ", ".join(counted)


def number_range(values: Sequence[float]) -> str:
    """The range and mean of numbers, such as "0 to 5, mean 2.61"."""
    return f"{min(values):.4g} to {max(values):.4g}, mean {sum(values) / len(values):.4g}"


def describe_lengths(lengths: Sequence[int], room: int) -> str:
    """Number and lengths of sequences, and how many of them have the largest length ``room``."""
    full = sum(length >= room for length in lengths)
    text = f"{len(lengths):,} sequences of {min(lengths)} to {max(lengths)} tokens, median {median(lengths):g}"
    return (
        f"{text}; {full:,} fill all {room}, beyond which texts are cut or read in windows"
        if full
        else text
    )
