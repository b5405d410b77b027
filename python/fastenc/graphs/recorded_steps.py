"""Optimiser steps that replay CUDA graphs of their micro-batches."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._base.transfer import send_arguments, staged
from fastenc.graphs.recording import Recorder, WeightAddresses, copied, overwrite
from fastenc.graphs.token_buckets import Bucket, at_least, bucket_of, pad_to
from fastenc.models.pretrained import PretrainedModel
from fastenc.ops import dispatch
from fastenc.ops.labelled import IGNORED
from fastenc.packing import PackedBatch

# Padding is computed like real tokens. With eight sizes from a power of two to the next, at most an eighth is padding.
SIZES_PER_DOUBLING = 8
MAX_TOKENS = 32_768
MAX_GRAPHS = 64
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Arguments = Mapping[str, Any]  # keyword arguments of a model: "batch", "labels" and others
# (arguments, factors) → float64 sums. Runs forward and backward of a micro-batch; ``factors`` are the weights of the
# terms of its loss.
MicroBatch = Callable[[Arguments, Tensor], Tensor]
# Sums over all micro-batches → the result of the step. Clips the gradient, and sets ``found_inf`` if it is not finite.
Finish = Callable[[Tensor], Tensor]


class _Recording(NamedTuple):
    arguments: dict[str, Any]  # the model's arguments that the graph reads
    factors: Tensor
    output: Tensor | None  # the result that it writes, if it is of the last micro-batch
    replay: Callable[[], None]


class RecordedSteps:
    """Runs optimiser steps by replaying CUDA graphs of their micro-batches, one for each bucket of batch shapes.

    The graph of a step's last micro-batch includes the optimiser's update, so a step with one micro-batch is one graph.
    Random numbers are the same as without graphs: every replay advances the device's default generator.

    Args:
        optimizer: a fused Adam or AdamW. Its kernel changes no weights while ``found_inf``, a float32 scalar, is 1.
            Recording runs the step, and must not train. The learning rates are replaced by tensors.
        micro_batch: runs forward and backward of one micro-batch.
        finish: runs after the last micro-batch; it may set ``found_inf`` and must not reset it.
        recorder: records a micro-batch; None runs every step without graphs.
    Raises: ValueError for a model or an optimiser that cannot be recorded.
    """

    def __init__(
        self,
        model: PretrainedModel,
        optimizer: torch.optim.Optimizer,
        micro_batch: MicroBatch,
        finish: Finish,
        recorder: Recorder | None,
        max_tokens: int = MAX_TOKENS,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        _check_model(model)
        _check_optimizer(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self.max_tokens, self.max_graphs = max_tokens, max_graphs
        self._micro_batch, self._finish, self._recorder = micro_batch, finish, recorder
        self._recordings: OrderedDict[tuple, _Recording] = OrderedDict()
        self._device = device = next(model.parameters()).device
        self.found_inf = torch.zeros((), device=device)
        optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._lrs = torch.zeros(len(optimizer.param_groups), device=device).unbind()
        for group in optimizer.param_groups:
            group["capturable"] = True  # torch requires it, although fused kernels always are
        self._sums: Tensor | None = None
        # Steps with several micro-batches accumulate their gradients in these buffers, which all graphs share.
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._addresses = WeightAddresses(model)

    def __call__(self, micro_batches: Sequence[Arguments], factors: Tensor) -> Tensor:
        """Run one optimiser step.

        Args:
            micro_batches: the model's arguments for each micro-batch, on the host or the device.
            factors: float64 (micro-batches, n), a row for each call of ``micro_batch``.
        Returns: a copy of the result of ``finish``.
        Raises: ValueError for a model in evaluation mode or with hooks, and for arguments that cannot be padded;
            RuntimeError if the step cannot be recorded.
        """
        if not self.model.training:
            raise ValueError(
                "a training step needs a model in training mode, got evaluation mode: call model.train()"
            )
        if self._addresses.changed():
            self.reset()
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            if group["lr"] is not lr:
                lr.fill_(group["lr"])
                group["lr"] = lr
        factors = staged(factors, self._device).to(self._device, non_blocking=True)
        if self._sums is None:
            self._sums = torch.zeros_like(factors[0])
        if len(micro_batches) > 1 and not self._gradients:
            self._find_gradients(micro_batches[0], factors[0])
        last = len(micro_batches) - 1
        for number, (arguments, row) in enumerate(zip(micro_batches, factors, strict=True)):
            output = self._run(arguments, row, number == 0, number == last)
        assert output is not None
        return output.clone()

    def reset(self) -> None:
        """Drop all recordings. Call it after replacing a module of the model."""
        self._recordings.clear()
        self._gradients.clear()
        self._addresses = WeightAddresses(self.model)

    def __len__(self) -> int:
        """The number of recordings."""
        return len(self._recordings)

    def _run(self, arguments: Arguments, factors: Tensor, first: bool, last: bool) -> Tensor | None:
        bucket = None if self._recorder is None else self._bucket(arguments["batch"])
        if self._recorder is None or bucket is None:
            return self._compute(send_arguments(arguments, self._device), factors, first, last)
        padded = _pad(arguments, bucket, self.model.config.pad_token_id)
        recording = self._recording(self._recorder, bucket, padded, factors, first, last)
        for name, value in padded.items():
            if isinstance(value, PackedBatch):
                overwrite(recording.arguments[name], value)
            elif isinstance(value, Tensor):
                source = staged(value, self._device)
                recording.arguments[name].copy_(source, non_blocking=True)
        recording.factors.copy_(factors)
        recording.replay()
        return recording.output

    def _bucket(self, batch: PackedBatch) -> Bucket | None:
        """The bucket of a batch, or None if it runs without a graph.

        That is a large batch, one that cannot be padded, or one that the model rejects with an error.
        """
        longest, tokens = self.model.positions, batch.total_tokens
        if tokens == batch.num_sequences or batch.hidden is not None or batch.max_seqlen > longest:
            return None
        return bucket_of(
            batch, longest, self.max_tokens, per_doubling=SIZES_PER_DOUBLING, may_be_full=True
        )

    def _compute(
        self, arguments: Arguments, factors: Tensor, first: bool, last: bool
    ) -> Tensor | None:
        alone, sums = first and last, self._sums
        assert sums is not None
        for parameter in self._parameters():
            parameter.grad = None if alone else self._gradients.get(parameter)
        if first and not alone:
            torch._foreach_zero_(list(self._gradients.values()))
        sums.add_(self._micro_batch(arguments, factors))
        if not last:
            return None
        output = self._finish(sums)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        sums.zero_()
        return output

    def _find_gradients(self, arguments: Arguments, factors: Tensor) -> None:
        """Allocate buffers for the gradients of the parameters that get one."""
        self.optimizer.zero_grad(set_to_none=True)
        with self._same_random_numbers():
            self._micro_batch(send_arguments(arguments, self._device), factors)
        self._gradients = {
            p: torch.zeros_like(p.grad) for p in self._parameters() if p.grad is not None
        }
        self.optimizer.zero_grad(set_to_none=True)

    def _recording(
        self,
        recorder: Recorder,
        bucket: Bucket,
        padded: dict[str, Any],
        factors: Tensor,
        first: bool,
        last: bool,
    ) -> _Recording:
        precision = dispatch.autocast_dtype(self._device.type)
        types = padded["batch"].token_type_ids is None
        rest = [
            (name, value.shape if isinstance(value, Tensor) else value)
            for name, value in padded.items()
            if name != "batch"
        ]
        left_out = ("params", "lr", "initial_lr")
        constants = [
            {name: value for name, value in group.items() if name not in left_out}
            for group in self.optimizer.param_groups
        ]
        key = (bucket, types, precision, first, last, *rest, repr(constants))
        if key in self._recordings:
            self._recordings.move_to_end(key)
            return self._recordings[key]
        _check_recordable(self.model)
        copy_of: dict[type, Callable[[Any], Any]] = {
            PackedBatch: lambda batch: copied(batch, self._device),
            Tensor: lambda tensor: tensor.to(self._device, copy=True),
        }
        copies = {name: copy_of.get(type(v), lambda v: v)(v) for name, v in padded.items()}
        factors = factors.clone()
        while len(self._recordings) >= self.max_graphs:
            self._recordings.popitem(last=False)
        with self._unchanged():
            output, replay = recorder(partial(self._compute, copies, factors, first, last))
        self._recordings[key] = _Recording(copies, factors, output, replay)
        return self._recordings[key]

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Inside, steps change nothing: the optimiser's kernel is switched off, and all else is restored at the end."""
        assert self._sums is not None
        tensors = [self.found_inf, self._sums, *self._gradients.values()]
        values = [tensor.clone() for tensor in tensors]
        self.found_inf.fill_(1)
        try:
            with self._same_random_numbers():
                yield
        finally:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

    def _same_random_numbers(self):
        return torch.random.fork_rng([self._device] if self._device.type == "cuda" else [])

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def _check_model(model: PretrainedModel) -> None:
    if not model.loss_ignores_padding:
        raise ValueError(
            "a step as a CUDA graph pads its batches, so the model's loss must be a mean over labelled items, got "
            f"this {type(model).__name__}: train it without graphs"
        )


def _check_optimizer(model: PretrainedModel, optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups
    fused = all(group.get("fused") for group in groups)
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or not fused:
        raise ValueError(
            "a step as a CUDA graph needs torch's Adam or AdamW with fused=True, got "
            f"{type(optimizer).__name__}{'' if fused else ' without it'}: make such an optimiser"
        )
    known = set(map(id, model.parameters()))
    if any(id(parameter) not in known for group in groups for parameter in group["params"]):
        raise ValueError(
            "the optimiser must be of the model's parameters, got others too: make it from model.parameters()"
        )


def _check_recordable(model: PretrainedModel) -> None:
    """Raise ValueError for hooks, which would run only while recording, and for gradient checkpointing."""
    for name, module in model.named_modules():
        if any(getattr(module, hooks) for hooks in HOOKS):
            raise ValueError(
                f"a recorded step would run the hooks of module {name or 'model'!r} once only: remove them, or train "
                "without graphs"
            )
        if getattr(module, "gradient_checkpointing", False):
            raise ValueError(
                f"module {name or 'model'!r} has gradient_checkpointing on, which reads the random state on the host: "
                "turn it off, or train without graphs"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"a recorded step would run the hooks of parameter {name!r} once only: remove them, or train without "
                "graphs"
            )


def _pad(arguments: Arguments, bucket: Bucket, pad_token_id: int) -> dict[str, Any]:
    """The arguments padded to the bucket's shape; padding has the label -100.

    Raises: ValueError naming an argument that cannot be padded.
    """
    batch = arguments["batch"]
    rows = {
        batch.total_tokens: bucket.total_tokens,
        batch.num_sequences: bucket.num_sequences,
    }
    padded: dict[str, Any] = {"batch": pad_to(batch, bucket, pad_token_id)}
    for name, value in arguments.items():
        if name == "max_labels" and value is not None:
            padded[name] = min(bucket.total_tokens, at_least(value, SIZES_PER_DOUBLING))
        elif isinstance(value, Tensor):
            counts = name.endswith("labels") and value.dtype == torch.int64 and value.dim() == 1
            if not counts or value.shape[0] not in rows:
                raise ValueError(
                    "a tensor argument of a recorded step must be int64 labels, one for each token or each sequence, "
                    f"got {name}, {value.dtype} of shape {tuple(value.shape)}: train without graphs"
                )
            missing = rows[value.shape[0]] - value.shape[0]
            padded[name] = F.pad(value, (0, missing), value=IGNORED)
        elif name != "batch":
            padded[name] = value
    return padded
