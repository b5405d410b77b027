"""Sizes of a padded batch that the host needs for packing it: counted by the collator, or read from the device."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

KEY = "batch_metadata"
ASSERTING = ("cuda", "meta")  # devices with torch._assert_async
LARGEST_ID = 2**31 - 1  # stands for no id in a minimum


@dataclass  # not frozen: Lightning sets the fields of a copy when it moves or casts a batch
class BatchMetadata:
    """Counts of one call's attention mask and labels.

    Fields:
        total_tokens: number of real tokens.
        max_seqlen: number of real tokens of the longest sequence.
        padding: number of padding tokens.
        leading_padding: number of padding tokens before the first real token of their row; of a row without real
            tokens all.
        gaps: number of padding tokens between real tokens of their row.
        empty_rows: number of rows without real tokens.
        labelled: number of labels that are not -100.
        labelled_padding: number of labels at padding tokens that are not -100.
        global_tokens: number of tokens that the mask marks as global (2, Longformer).
        lowest_padding_id, highest_padding_id: the range of the ids of the padding tokens at the rows' ends, empty
            without any; None if the ids were not read.
        between_padding_ids: number of these tokens whose id is neither the lowest nor the highest; None as above.
    labelled and labelled_padding are 0 if the labels do not have the shape of the mask.
    """

    total_tokens: int
    max_seqlen: int
    padding: int
    leading_padding: int
    gaps: int
    empty_rows: int
    labelled: int
    labelled_padding: int
    global_tokens: int
    lowest_padding_id: int | None = None
    highest_padding_id: int | None = None
    between_padding_ids: int | None = None

    def padding_has_id(self, token_id: int | None) -> bool:
        """Whether the ids were read and every padding token at a row's end has this one."""
        return (
            token_id is not None and self.lowest_padding_id == self.highest_padding_id == token_id
        )

    def other_padding_id(self, token_id: int | None) -> int | None:
        """The one id of padding tokens at the rows' ends that is neither ``token_id`` nor 0.

        Args: token_id: the padding's id in the model's configuration.
        Returns: None without such an id, with several (random ids, as in a benchmark), or if ``token_id`` is None.
        """
        if token_id is None or self.between_padding_ids != 0:
            return None
        others = {self.lowest_padding_id, self.highest_padding_id} - {token_id, 0}
        return others.pop() if len(others) == 1 else None


class DataCollatorWithSeqlens:
    """A data collator that also counts, on the host, the sizes that a patched model needs for packing a batch.

    On an accelerator a patched model (:func:`fastenc.patch`) otherwise reads them from the attention mask in every
    forward, which waits for the device. Wrap the collator of a Trainer or a DataLoader to avoid that::

        Trainer(fastenc.patch(model), data_collator=fastenc.DataCollatorWithSeqlens(collator), ...)

    The batch gets an additional entry, ``batch_metadata``, which the forward of a patched model takes. The model must
    be called with the mask, the labels and the padding of the collator. With others, a CPU raises an error, and a GPU
    ends the program with an assertion on the device. Batches must not be concatenated after the collator. accelerate
    does that if one process reads an IterableDataset for all (``dispatch_batches``).

    Args:
        collator: returns a mapping with ``attention_mask`` (batch, length) and, if there are any, ``labels``.
    """

    def __init__(self, collator: Callable[..., Any]):
        self.collator = collator

    def __call__(self, features: Any) -> Any:
        batch = self.collator(features)
        metadata = read_metadata(
            batch.get("attention_mask"), batch.get("labels"), batch.get("input_ids")
        )
        if metadata is not None:
            batch[KEY] = metadata
        return batch

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped collator, such as ``tokenizer``, which a Trainer saves."""
        if name == "collator":  # it does not exist yet during unpickling
            raise AttributeError(name)
        return getattr(self.collator, name)


def take_metadata(arguments: dict, reads_ids: bool = False) -> BatchMetadata | None:
    """Remove the collator's metadata from a call's arguments and return them; without any, read them from the mask.

    Args:
        reads_ids: whether the padding tokens' ids are needed.
    Raises: ValueError on a CPU if the metadata are those of another mask or other labels.
    """
    collated: BatchMetadata | None = arguments.pop(KEY, None)
    mask, labels = arguments.get("attention_mask"), arguments.get("labels")
    ids = arguments.get("input_ids") if reads_ids else None
    lacks_ids = ids is not None and collated is not None and collated.lowest_padding_id is None
    # A slice of the batch, as DataParallel gives to a replica, has other metadata.
    if (
        collated is None
        or mask is None
        or lacks_ids
        or mask.numel() != collated.total_tokens + collated.padding
    ):
        return read_metadata(mask, labels, ids)
    if labels is None:  # a Trainer with label smoothing does not pass the labels to the model
        collated = replace(collated, labelled=0, labelled_padding=0)
    if ids is None:
        collated = replace(
            collated, lowest_padding_id=None, highest_padding_id=None, between_padding_ids=None
        )
    if mask.device.type not in ASSERTING:
        read = read_metadata(mask, labels, ids)
        if read not in (None, collated):
            raise ValueError(
                "attention_mask, labels and padding must be those that DataCollatorWithSeqlens has counted, got a call "
                f"with {read} after a collator that counted {collated}: change them inside the wrapped collator"
            )
        return read
    counted = _count(mask, labels, ids)
    if counted is None:
        return None
    same = [count == given for count, given in zip(counted, astuple(collated), strict=False)]
    torch._assert_async(torch.stack(same).all())
    return collated


def read_metadata(
    mask: Tensor | None, labels: Tensor | None, ids: Tensor | None = None
) -> BatchMetadata | None:
    """The metadata of a mask and labels. On an accelerator this is the only point of a forward that waits for it.

    Args:
        mask: (batch, length), non-zero at real tokens.
        labels: counted if there is one for each element of the mask.
        ids: the tokens' ids, read if they have the shape of the mask.
    Returns: None if the mask is None or has another number of dimensions.
    """
    numbers = _count(mask, labels, ids)
    return None if numbers is None else BatchMetadata(*torch.stack(numbers).tolist())


def _count(mask: Tensor | None, labels: Tensor | None, ids: Tensor | None) -> list[Tensor] | None:
    """The fields of :class:`BatchMetadata` as scalars on the mask's device."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.numel():
        return None
    real = mask != 0
    lengths = real.sum(1)
    total = lengths.sum()
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    ends = (real * positions).amax(1)
    leading = mask.shape[1] - (real * positions.flip(0)).amax(1)
    zero = lengths.new_zeros(())
    labelled = labelled_padding = zero
    if labels is not None and labels.numel() == mask.numel():
        has_label = labels.reshape(mask.shape) != -100
        labelled, labelled_padding = has_label.sum(), (has_label & ~real).sum()
    return [
        total,
        lengths.max(),
        mask.numel() - total,
        leading.sum(),
        (ends - leading - lengths).clamp(min=0).sum(),
        (lengths == 0).sum(),
        labelled,
        labelled_padding,
        (mask == 2).sum(),
        *_padding_ids(ids, positions > ends[:, None]),
    ]


def _padding_ids(ids: Tensor | None, padding: Tensor) -> list[Tensor]:
    """The last three fields of :class:`BatchMetadata`, or nothing if ids are not of the mask's shape."""
    if not isinstance(ids, Tensor) or ids.shape != padding.shape:
        return []
    ids = ids.long()
    low = torch.where(padding, ids, LARGEST_ID).amin()
    high = torch.where(padding, ids, -1).amax()
    return [low, high, (padding & (ids != low) & (ids != high)).sum()]
