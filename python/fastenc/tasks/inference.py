"""A model's logits and loss on examples, in batches of similar lengths."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from fastenc._base.progress import progress_bar
from fastenc._base.transfer import send_arguments
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.objectives.loss_terms import labelled_items
from fastenc.packing import ModelArguments, PackedBatch, length_sorted_batches

# Adds what is cached for the examples with these indices to their batch (FeatureCache.fill).
Fill = Callable[[PackedBatch, Sequence[int]], PackedBatch]


class TokenSequence(Protocol):
    """An example: a sequence of tokens with what the task needs beside them."""

    @property
    def input_ids(self) -> Sequence[int]: ...


Example = TypeVar("Example", bound=TokenSequence)


@torch.inference_mode()
def run_model(
    model: PretrainedModel,
    examples: Sequence[Example],
    collate: Callable[[Sequence[Example]], ModelArguments],
    logits_of: Callable[[ModelArguments], list[int] | None],
    batch_size: int = 32,
    show_progress: bool | None = False,
    fill: Fill | None = None,
    loss_items: Callable[[ModelArguments], int] = lambda arguments: labelled_items(
        arguments["labels"]
    ),
    keep: Callable[[Tensor], Tensor] = Tensor.float,
) -> tuple[list[Tensor], float]:
    """Compute a model's logits and mean loss on examples, in evaluation mode. Batches have similar lengths.

    Args:
        collate: as :meth:`fastenc.tasks.Task.collate`.
        logits_of: as :meth:`fastenc.tasks.Task.logits_of`.
        fill: function of a batch and the indices of its examples that adds cached outputs of the encoder to the batch
            (:meth:`fastenc.adapt.FeatureCache.fill`).
        loss_items: as :meth:`fastenc.tasks.Task.loss_items`.
        keep: as :meth:`fastenc.tasks.Task.keep`.
    Returns: (logits, loss). logits: float32 on the CPU for each example, in their order, of shape (num_labels,), or
        (rows, num_labels) if ``logits_of`` returns numbers of rows. loss: the mean over all labelled items, 0 without
        labels.
    """
    device = next(model.parameters()).device
    results: list[Tensor | None] = [None] * len(examples)
    total, items = torch.zeros((), dtype=torch.float64, device=device), 0
    outputs = []
    batches = length_sorted_batches([len(each.input_ids) for each in examples], batch_size)
    with evaluation_mode(model):
        for chosen in progress_bar(batches, "predicting", "batch", show_progress):
            arguments = collate([examples[i] for i in chosen])
            counts = logits_of(arguments)
            if fill is not None:
                arguments["batch"] = fill(arguments["batch"], chosen)
            output = model(**send_arguments(arguments, device))
            if output.loss is not None:
                labelled = loss_items(arguments)
                total, items = total + output.loss * labelled, items + labelled
            outputs.append((chosen, counts, keep(output.logits)))
    # Copied to the CPU at the end, so that the host does not wait for the device between batches.
    for chosen, counts, logits in outputs:
        logits = logits.cpu()
        of_examples = logits if counts is None else logits.split(counts)
        for index, values in zip(chosen, of_examples, strict=True):
            results[index] = values
    return cast(list[Tensor], results), total.item() / max(items, 1)
