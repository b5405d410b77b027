"""One optimiser step: the gradient of its micro-batches on all processes, and the update of the weights."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastenc._base.transfer import send, send_arguments
from fastenc.graphs.recorded_steps import RecordedSteps
from fastenc.graphs.recording import graph_recorder
from fastenc.models import LossTerm, Seq2Seq
from fastenc.objectives.loss_terms import count_items, loss_terms, weighted_sum
from fastenc.packing import ModelArguments
from fastenc.train.config import TrainConfig
from fastenc.train.parallel import Parallel

if TYPE_CHECKING:
    from accelerate import Accelerator


class CollatedBatch(NamedTuple):
    """A micro-batch of this process.

    Fields:
        arguments: the model's arguments.
        is_counted: False for a repetition of another process's micro-batch, which has weight 0 in the loss.
    """

    arguments: ModelArguments
    is_counted: bool


class OptimizerStep:
    """Computes the gradient of a step, and updates the weights.

    The gradient is that of the mean loss over all labelled items of the micro-batches on all processes. A loss with
    several terms is the weighted sum of such means.

    On a GPU, if the loss or the gradient of a step is not finite, this step and all later ones change no weights. On a
    CPU, the caller reads the results of :meth:`gradient` before it calls :meth:`update`.

    Fields:
        found_inf: float32 scalar on the device, 1 after a step that was not finite. AdamW's kernel changes nothing if
            it is 1. torch's GradScaler skips steps in the same way.

    Args:
        collate: what made the micro-batches; it counts the items of a loss with several terms.
    Raises: ValueError if ``config.graph`` is True for several processes or for a Seq2Seq.
    """

    def __init__(
        self, accelerator: "Accelerator", parallel: Parallel, collate: Any, config: TrainConfig
    ) -> None:
        self.accelerator, self.parallel, self.collate = accelerator, parallel, collate
        self.model, self.optimizer = parallel.model, parallel.optimizer
        self.processes = accelerator.num_processes
        self.max_grad_norm = config.max_grad_norm or math.inf
        self.found_inf = torch.zeros((), device=accelerator.device)
        parallel.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.recorded_steps = self._record() if config.graph else None

    def _record(self) -> RecordedSteps:
        """Steps that run as CUDA graphs."""
        if self.processes > 1:
            raise ValueError(
                f"graph=True needs a single process, got {self.processes} processes: leave it out, or start one process"
            )
        model = self.parallel.plain_model
        if isinstance(model, Seq2Seq):
            raise ValueError(
                "graph=True records steps with one label for each token or sequence of a batch, got a Seq2Seq, whose "
                "batches have sources and targets: leave it out"
            )
        functions = (self._micro_batch, self._finish_gradient)
        recorder = graph_recorder(self.accelerator.device, "the training step")
        steps = RecordedSteps(model, self.parallel.adamw, *functions, recorder)
        self.found_inf = steps.found_inf
        return steps

    def gradient(
        self, micro_batches: list[CollatedBatch], stop_vote: bool
    ) -> tuple[list[str], Tensor]:
        """Compute the step's gradient. With graphs, this also updates the weights.

        Args:
            stop_vote: whether this process wants the run to stop.
        Returns: the names of the loss's terms, and float64 (4 + terms,): loss, gradient norm, tokens and votes to stop
            of all processes, mean of each term.
        """
        counts = [count_items(self.collate, each.arguments) for each in micro_batches]
        self.terms = names = list(counts[0])
        counted = torch.tensor([each.is_counted for each in micro_batches], dtype=torch.float64)
        items = torch.tensor([list(each.values()) for each in counts], dtype=torch.float64)
        items *= counted[:, None]
        tokens = sum(
            each.arguments["batch"].total_tokens for each in micro_batches if each.is_counted
        )
        totals = torch.tensor([*items.sum(0).tolist(), tokens, stop_vote], dtype=torch.float64)
        totals = self.accelerator.reduce(send(totals, self.accelerator.device), "sum")
        # Each micro-batch's share of the items of each term.
        shares = send(items, self.accelerator.device) * (self.processes / totals[:-2].clamp(min=1))
        results = self._run([each.arguments for each in micro_batches], shares)
        loss_and_norm, means = results[:2], results[2:]
        return names, torch.cat((loss_and_norm, totals[-2:], means))

    def _run(self, micro_batches: list[ModelArguments], shares: Tensor) -> Tensor:
        """Forward and backward of all micro-batches. Returns what :meth:`_finish_gradient` returns."""
        if self.recorded_steps is not None:
            return self.recorded_steps(micro_batches, shares)
        means = torch.zeros_like(shares[0])
        for number, (arguments, row) in enumerate(zip(micro_batches, shares, strict=True), 1):
            arguments = send_arguments(arguments, self.accelerator.device)
            with self.parallel.gradient_sync(number == len(micro_batches)):
                means += self._micro_batch(arguments, row)
        return self._finish_gradient(self.accelerator.reduce(means, "mean"))

    def update(self) -> None:
        """Update the weights, and delete the gradient. With graphs, :meth:`gradient` has done both."""
        if self.recorded_steps is None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _micro_batch(self, arguments: Mapping[str, object], shares: Tensor) -> Tensor:
        """Add a micro-batch's gradient. Returns the mean of each term of its loss times the term's share: (terms,)."""
        with self.accelerator.autocast():
            terms = loss_terms(self.model(**arguments))
        scaled = {
            name: LossTerm(terms[name].mean * share, terms[name].weight)
            for name, share in zip(self.terms, shares.unbind(), strict=True)
        }
        # accelerator.backward would also divide by the launcher's accumulation setting
        weighted_sum(scaled).backward()
        self.term_weights = [term.weight for term in scaled.values()]
        return torch.stack([term.mean for term in scaled.values()]).detach()

    def _finish_gradient(self, means: Tensor) -> Tensor:
        """Clip the gradient. Forbid updates from now on if the gradient or the loss is not finite.

        Args:
            means: float64 (terms,), the mean of each term over the step's items.
        Returns: float64 (2 + terms,): loss, gradient norm, mean of each term.
        """
        # The weights are Python numbers: the host would wait while a tensor of them is copied to the device.
        pairs = zip(means.unbind(), self.term_weights, strict=True)
        loss = torch.stack([mean * weight for mean, weight in pairs]).sum()
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        norm = self.parallel.whole(norm)
        results = torch.cat((torch.stack((loss, norm.double())), means))
        self.found_inf.logical_or_(~results.isfinite().all())
        return results
