"""The arguments of models as collators make them."""

from typing import TypedDict

from torch import Tensor

from fastenc.packing.batch import PackedBatch
from fastenc.packing.documents import Documents


class ModelArguments(TypedDict, total=False):
    """A model's keyword arguments, as a collator makes them. Each model's forward describes its own."""

    batch: PackedBatch
    target: PackedBatch
    labels: Tensor
    label_smoothing: float
    max_labels: int
    pair_labels: Tensor
    uniform_samples: Tensor
    documents: Documents
    text_ids: Tensor
    groups: tuple[tuple[int, int, int], ...]
    lists: Tensor
    teacher: Tensor
    guide: Tensor
    flops_share: Tensor
    spans: Tensor
    windows: Tensor
    starts: Tensor
    ends: Tensor
    word_rows: Tensor
    cu_words: Tensor
