"""What tasks of pairs of texts have in common: how inputs are read, and files of their similarities."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from fastenc.data.pairs import PairExample, TextPairs, iterate_pairs
from fastenc.data.readers import in_parts
from fastenc.data.rows import numbered_rows
from fastenc.data.writers import lines_of
from fastenc.tasks.base import Model, Task


class TextPairTask(Task[Model, TextPairs, PairExample, Tensor]):
    """A task whose predictions for a pair of texts are compared with each other."""

    text: tuple[str, ...]
    quoting: str | None
    # What gives the predictions of single texts.
    of_texts: ClassVar[str]

    @abstractmethod
    def similarities(self, predictions: Tensor) -> list[float]:
        """How similar each pair's predictions are."""

    def columns_of_metrics(self, path: str | Path) -> tuple[str, ...]:
        """The columns of texts that metrics read: that of hard negatives only if the file has it."""
        _, first = next(numbered_rows(path, self.text[:2], self.quoting))
        return tuple(name for name in self.text if name in first)

    def data_of(self, inputs: Sequence[Any]) -> TextPairs:
        """The data of pairs of texts."""
        for index, each in enumerate(inputs):
            if isinstance(each, str) or len(each) != 2 or not all(isinstance(t, str) for t in each):
                raise ValueError(
                    f"input {index} must be a pair of texts, whose similarity is predicted, got {each!r}: "
                    f"{self.of_texts}"
                )
        return TextPairs([tuple(each) for each in inputs], [])

    def read_inputs(self, path: str | Path) -> TextPairs:
        # Prediction does not need the hard negatives of training.
        return TextPairs(list(iterate_pairs(path, self.text[:2], self.quoting)), [])

    def input_parts(self, path: str | Path, size: int) -> Iterator[TextPairs]:
        for texts in in_parts(iterate_pairs(path, self.text[:2], self.quoting), size):
            yield TextPairs(texts, [])

    def sequence_lengths(self, example: PairExample) -> list[int]:
        return [*map(len, example.texts)]

    def lines(
        self, model: Model, data: TextPairs, predictions: Tensor, suffix: str
    ) -> Iterable[str]:
        rows = [{"similarity": value} for value in self.similarities(predictions)]
        return lines_of(rows, suffix)
