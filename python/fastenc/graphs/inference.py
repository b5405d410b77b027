"""Inference on small batches with CUDA graphs: one launch for the whole forward instead of one for each kernel."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc.graphs.recording import (
    Recorder,
    WeightAddresses,
    check_limits,
    copied,
    graph_recorder,
    overwrite,
)
from fastenc.graphs.token_buckets import Bucket, bucket_of, cut_to, pad_to
from fastenc.models.pretrained import PretrainedModel
from fastenc.ops import dispatch
from fastenc.packing import PackedBatch


class _Recording(NamedTuple):
    batch: PackedBatch  # the tensors that the graph reads
    output: Any  # the tensors that it writes
    replay: Callable[[], None]


class InferenceRunner:
    """Calls a model by replaying CUDA graphs of its forward, one for each bucket of batch shapes.

    Made by :func:`compile_inference`. ``runner(batch, **options)`` returns the same as ``model(batch, **options)``, in
    new tensors.
    """

    def __init__(
        self, model: PretrainedModel, max_tokens: int, max_graphs: int, recorder: Recorder | None
    ) -> None:
        self.model = model
        self.max_tokens, self.max_graphs = max_tokens, max_graphs
        self._recorder = recorder
        self._recordings: OrderedDict[tuple, _Recording] = OrderedDict()
        self._addresses = WeightAddresses(model)

    def __call__(self, batch: PackedBatch, **options: Any) -> Any:
        """The model's output for the batch, without gradients.

        Raises: ValueError in training mode or for options that are tensors; RuntimeError if the forward cannot be
            recorded; and the errors of the model.
        """
        model = self.model
        if model.training:
            raise ValueError(
                "a recorded model is for inference, got a model in training mode: call model.eval() first"
            )
        if tensors := [name for name, value in options.items() if isinstance(value, Tensor)]:
            raise ValueError(
                f"options of a recorded model must not be tensors, got {', '.join(tensors)}: call the model itself for "
                "a loss"
            )
        device = next(model.parameters()).device
        bucket = None
        if self._recorder and batch.total_tokens and batch.max_seqlen <= model.positions:
            bucket = bucket_of(batch, model.positions, self.max_tokens)
        # The recorded tensors are overwritten by later calls, which is not possible for tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if self._recorder is None or bucket is None:
                # A large batch, for which launches do not matter, or one that the model rejects with an error.
                return model(batch.to(device), **options)
            if self._addresses.changed():
                self.reset()
            padded = pad_to(batch, bucket, model.config.pad_token_id)
            recording = self._recording(self._recorder, bucket, padded, device, options)
            overwrite(recording.batch, padded)
            recording.replay()
            return _cut(recording.output, bucket, batch)

    def reset(self) -> None:
        """Drop all recordings. Call it after replacing a module of the model."""
        self._recordings.clear()
        self._addresses = WeightAddresses(self.model)

    def __len__(self) -> int:
        """The number of recordings."""
        return len(self._recordings)

    def _recording(
        self,
        recorder: Recorder,
        bucket: Bucket,
        padded: PackedBatch,
        device: torch.device,
        options: dict,
    ) -> _Recording:
        precision = dispatch.autocast_dtype(device.type)
        key = (bucket, padded.token_type_ids is None, precision, *sorted(options.items()))
        if key in self._recordings:
            self._recordings.move_to_end(key)
            return self._recordings[key]
        static = copied(padded, device)

        def run() -> Any:
            # With its cache, autocast would free cast weights on exit that the graph still reads.
            with torch.autocast(device.type, precision, precision is not None, cache_enabled=False):
                return self.model(static, **options)

        while len(self._recordings) >= self.max_graphs:
            self._recordings.popitem(last=False)
        recording = _Recording(static, *recorder(run))
        self._recordings[key] = recording
        return recording


def compile_inference(
    model: PretrainedModel, *, max_tokens: int = 8192, max_graphs: int = 64
) -> InferenceRunner:
    """Run a model's forward with CUDA graphs. It helps small batches, whose time is that of launching the kernels.

    A batch is padded to a bucket, which has a number of tokens (at least 32), a number of sequences and a max_seqlen
    (at least 64), each one of 2, 3, 4, 6, 8, 12, …. The first batch of a bucket records a CUDA graph. Later batches are
    copied into the graph's inputs and replay it. The padding forms separate sequences, to which no real token attends.
    Weights that are changed in place are used. If a weight was replaced or moved, the recordings are dropped. After
    replacing a module, call ``reset()``.

    Args:
        model: an ``Encoder`` or another model of fastenc.models, in evaluation mode.
        max_tokens: batches with more tokens, padding included, run without a graph.
        max_graphs: largest number of recordings; the least recently used one is dropped. All share one memory pool.
    Returns: an :class:`InferenceRunner`. On a CPU, which launches no kernels, it calls the model.
    Raises: ValueError for another class of model, or a limit below 1. A patched transformers model reads the sizes of
        the batch from its mask in every call, which a graph cannot do: give ``fastenc.encoder_of(model)``.
    Numerics: those of the model. A matrix product with another number of rows may sum in another order. Deterministic:
        as the model, for the same bucket.
    Memory: the inputs and outputs of each bucket, and the intermediate tensors of the largest one.
    """
    if not isinstance(model, PretrainedModel):
        raise ValueError(
            f"compile_inference takes fastenc's own models, got {type(model).__name__}: give a model of "
            "fastenc.models, or fastenc.encoder_of(model) of a patched model"
        )
    check_limits(max_tokens=max_tokens, max_graphs=max_graphs)
    recorder = graph_recorder(next(model.parameters()).device, "the model's forward")
    return InferenceRunner(model, max_tokens, max_graphs, recorder)


def _cut(output: Any, bucket: Bucket, batch: PackedBatch) -> Any:
    """A model's output without the padding's rows."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        return cut_to(value, bucket, batch) if isinstance(value, Tensor) else value

    return replace(output, **{f.name: cut(getattr(output, f.name)) for f in fields(output)})
