"""Optimiser steps with CUDA graphs: one launch for the whole step instead of one for each kernel."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastenc.graphs.recorded_steps import MAX_GRAPHS, MAX_TOKENS, Arguments, RecordedSteps
from fastenc.graphs.recording import Recorder, check_limits, graph_recorder
from fastenc.models.pretrained import PretrainedModel
from fastenc.ops import dispatch


class TrainingResult(NamedTuple):
    """Loss and gradient norm of a step, float64 scalars on the model's device. Reading them waits for the device."""

    loss: Tensor
    grad_norm: Tensor


class TrainingRunner:
    """Runs optimiser steps of a model with CUDA graphs. Made by :func:`compile_training`."""

    def __init__(
        self,
        model: PretrainedModel,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        recorder: Recorder | None,
        max_tokens: int,
        max_graphs: int,
    ) -> None:
        self.model, self.max_grad_norm = model, max_grad_norm
        self.steps = RecordedSteps(
            model, optimizer, self._micro_batch, self._finish, recorder, max_tokens, max_graphs
        )

    def __call__(
        self, *micro_batches: Arguments, weights: Sequence[float] | None = None
    ) -> TrainingResult:
        """Run one optimiser step: gradient of the weighted sum of the micro-batches' losses, clipping, update.

        Args:
            micro_batches: the model's arguments for each micro-batch, with labels, as a collator makes them.
            weights: weights of the losses; None: 1 / (number of micro-batches) each. If the micro-batches have
                different numbers of labelled items, give each its share of them. Then the loss is the mean over all
                items.
        Returns: loss and gradient norm.
        Raises: ValueError for a model in evaluation mode or with hooks, and for arguments that cannot be padded;
            RuntimeError if the step cannot be recorded.
        """
        if not micro_batches:
            raise ValueError(
                "a step needs at least one micro-batch, got none: call step(arguments)"
            )
        if weights is None:
            weights = [1 / len(micro_batches)] * len(micro_batches)
        if len(weights) != len(micro_batches):
            raise ValueError(
                f"weights must have a number for each of the {len(micro_batches)} micro-batches, got {len(weights)}: "
                "give as many"
            )
        self.steps.found_inf.zero_()
        factors = torch.tensor(weights, dtype=torch.float64).unsqueeze(1)
        return TrainingResult(*self.steps(micro_batches, factors).unbind())

    def reset(self) -> None:
        """Drop all recordings. Call it after replacing a module of the model."""
        self.steps.reset()

    def __len__(self) -> int:
        """The number of recordings."""
        return len(self.steps)

    def _micro_batch(self, arguments: Arguments, factors: Tensor) -> Tensor:
        device = factors.device.type
        precision = dispatch.autocast_dtype(device)
        # With its cache, autocast would free cast weights on exit that the graph still reads.
        with torch.autocast(device, precision, precision is not None, cache_enabled=False):
            loss = self.model(**arguments).loss
        if loss is None:
            raise ValueError("the model must return a loss, got no loss: give labels")
        with torch.autocast(device, enabled=False):
            loss = loss.double() * factors
            loss.backward()
        return loss.detach()

    def _finish(self, sums: Tensor) -> Tensor:
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        result = torch.cat((sums, norm.double().unsqueeze(0)))
        self.steps.found_inf.logical_or_(~result.isfinite().all())
        return result


def compile_training(
    model: PretrainedModel,
    optimizer: torch.optim.Optimizer,
    *,
    max_grad_norm: float | None = None,
    max_tokens: int = MAX_TOKENS,
    max_graphs: int = MAX_GRAPHS,
) -> TrainingRunner:
    """Run optimiser steps with CUDA graphs. It helps small batches, whose time is that of launching the kernels.

        step = fastenc.compile_training(model, torch.optim.AdamW(model.parameters(), fused=True), max_grad_norm=1.0)
        for arguments in batches:  # {"batch": PackedBatch, "labels": Tensor, ...}
            with torch.autocast("cuda", torch.bfloat16):
                loss, grad_norm = step(arguments)

    A batch is padded to a bucket, which has a number of tokens (eight sizes from a power of two to the next), a number
    of sequences and a max_seqlen (two sizes each), and a number of labelled tokens (eight sizes). The first batch of a
    bucket records forward, backward, clipping and update as one CUDA graph. Later batches are copied into the graph's
    inputs and replay it. The padding forms separate sequences with the label -100.

    ``step(a, b)`` runs several micro-batches in one step, with a graph for each. A step whose loss or gradient is not
    finite changes no weights. Learning rates may change between steps, also by torch's schedulers. If a weight was
    replaced, moved or frozen, the recordings are dropped. Call ``reset()`` after replacing a module or switching a
    submodule to evaluation mode. The model may be evaluated between steps.

    Args:
        model: a model of fastenc.models whose loss is a mean over labelled items: ``MaskedLM``, ``TokenClassifier``
            without a CRF, ``SequenceClassifier`` with one label and without chunks.
        optimizer: torch's Adam or AdamW with ``fused=True`` over the model's parameters.
        max_grad_norm: a gradient with a larger Euclidean norm is scaled down to this norm; None: no clipping.
        max_tokens: micro-batches with more tokens, padding included, run without a graph.
        max_graphs: largest number of recordings; the least recently used one is dropped. All share one memory pool.
    Returns: a :class:`TrainingRunner`. On a CPU, which launches no kernels, it runs the steps without graphs.
    Raises: ValueError for another model or optimiser, or a limit below 1.
    Numerics: those of the same steps without graphs. A matrix product with another number of rows may sum in another
        order.
    Memory: the inputs of each bucket, the intermediate tensors of the largest one, and for steps with several
        micro-batches the gradients.
    """
    if not isinstance(model, PretrainedModel):
        raise ValueError(
            f"compile_training takes fastenc's own models, got {type(model).__name__}: load the checkpoint with a "
            "model of fastenc.models"
        )
    check_limits(max_tokens=max_tokens, max_graphs=max_graphs)
    recorder = graph_recorder(next(model.parameters()).device, "the training step")
    return TrainingRunner(model, optimizer, max_grad_norm, recorder, max_tokens, max_graphs)
