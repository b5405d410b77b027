"""What the host must know of a padded batch before it can be packed: noted by the collator, or read at once."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

KEY = "batch_metadata"
ASSERTING = ("cuda", "meta")  # devices with torch._assert_async


@dataclass(frozen=True)
class BatchMetadata:
    """Numbers of one call's attention mask and labels.

    Fields:
        total_tokens, max_seqlen: of the packed batch.
        padding: padding tokens; leading_padding: rows that start with one; gaps: those that a real token follows.
        labelled: labels of tokens that are not -100; labelled_padding: those of padding. Both are 0 without a label
            for each element of the mask.
    """

    total_tokens: int
    max_seqlen: int
    padding: int
    leading_padding: int
    gaps: int
    labelled: int
    labelled_padding: int


class DataCollatorWithSeqlens:
    """A data collator that also notes, on the host, the sizes by which :func:`fastenc.patch` packs a batch.

    On an accelerator a patched model reads them from the attention mask, and waits for it, once a forward. With this
    around the collator of a Trainer or a DataLoader nothing is read::

        Trainer(fastenc.patch(model), data_collator=fastenc.DataCollatorWithSeqlens(collator), ...)

    The batch gets one more entry, ``batch_metadata``, which a patched model's forward takes. The masks and labels that
    the model is called with must be the collator's: on a CPU others are refused, on a GPU they end the program by an
    assertion on the device. Batches cannot be joined after the collator, which accelerate does for an IterableDataset
    that one process hands out to others (``dispatch_batches``).

    Args:
        collator: gives a mapping with the ``attention_mask`` (batch, length) and, where there are any, ``labels``.
    """

    def __init__(self, collator: Callable[[Any], Any]):
        self.collator = collator

    def __call__(self, features: Any) -> Any:
        batch = self.collator(features)
        metadata = read_metadata(batch.get("attention_mask"), batch.get("labels"))
        if metadata is not None:
            batch[KEY] = metadata
        return batch

    def __getattr__(self, name: str) -> Any:
        """The collator's own attributes: a Trainer saves its ``tokenizer``."""
        if name == "collator":  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.collator, name)


def take_metadata(arguments: dict) -> BatchMetadata | None:
    """The metadata of a call: what the collator noted, which is taken out of the arguments, or else read now.

    Raises: ValueError if the collator's are of another mask or of other labels, on a CPU.
    """
    noted: BatchMetadata | None = arguments.pop(KEY, None)
    mask, labels = arguments.get("attention_mask"), arguments.get("labels")
    # A part of the batch, such as DataParallel gives a replica, has metadata of its own.
    if noted is None or mask is None or mask.numel() != noted.total_tokens + noted.padding:
        return read_metadata(mask, labels)
    if labels is None:  # a Trainer that smooths labels keeps them to itself
        noted = replace(noted, labelled=0, labelled_padding=0)
    if mask.device.type not in ASSERTING:
        found = read_metadata(mask, labels)
        if found not in (None, noted):
            raise ValueError(
                f"batch_metadata must be of the call's attention_mask and labels, got {noted} for {found}: "
                "change masks and labels inside the collator that DataCollatorWithSeqlens is given"
            )
        return found
    counted = _count(mask, labels)
    if counted is None:
        return None
    same = [found == said for found, said in zip(counted, astuple(noted), strict=True)]
    torch._assert_async(torch.stack(same).all())
    return noted


def read_metadata(mask: Tensor | None, labels: Tensor | None) -> BatchMetadata | None:
    """Read them; on an accelerator this is the one point of a forward that waits for it.

    Args:
        mask: (batch, length), non-zero at real tokens. None, or another shape: there is nothing to read.
        labels: counted where there is one for each element of the mask.
    """
    numbers = _count(mask, labels)
    return None if numbers is None else BatchMetadata(*torch.stack(numbers).tolist())


def _count(mask: Tensor | None, labels: Tensor | None) -> list[Tensor] | None:
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.numel():
        return None
    real = mask != 0
    lengths = real.sum(1)
    total = lengths.sum()
    ends = (real * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1)
    numbers = [
        total,
        lengths.max(),
        mask.numel() - total,
        (~real[:, 0]).sum(),
        (ends - lengths).sum(),
    ]
    if labels is None or labels.numel() != mask.numel():
        return numbers + [lengths.new_zeros(())] * 2
    labelled = labels.reshape(mask.shape) != -100
    return [*numbers, labelled.sum(), (labelled & ~real).sum()]
