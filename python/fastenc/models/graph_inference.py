"""Inference on small batches by CUDA graphs: one launch instead of a hundred."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc.models.graph_recording import (
    CudaGraphRecorder,
    Recorder,
    WeightAddresses,
    check_limits,
    copied,
    overwrite,
)
from fastenc.models.pretrained import PretrainedModel
from fastenc.models.token_buckets import Bucket, bucket_of, cut_to, pad_to
from fastenc.ops import _dispatch
from fastenc.packing import PackedBatch


class _Recording(NamedTuple):
    batch: PackedBatch  # what the graph reads
    output: Any  # what it writes
    replay: Callable[[], None]


class InferenceRunner:
    """Calls a model through recordings of its forward, one for each bucket of batch shapes.

    See :func:`compile_inference`, which makes it. ``runner(batch, **options)`` returns what ``model(batch, **options)``
    returns, in tensors of its own.
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
        """Raises: ValueError in training mode, and what the model raises; RuntimeError if it cannot be recorded."""
        model = self.model
        if model.training:
            raise ValueError("a recorded model computes without dropout: call model.eval() first")
        if any(isinstance(value, Tensor) for value in options.values()):
            raise ValueError(
                "a recorded model takes a batch and options that are no tensors: call the model itself for a loss"
            )
        device = next(model.parameters()).device
        bucket = None
        if self._recorder and batch.total_tokens and batch.max_seqlen <= model.positions:
            bucket = bucket_of(batch, model.positions, self.max_tokens)
        # What is recorded lives on, and a tensor made in inference mode could not be written to outside.
        with torch.inference_mode(False), torch.no_grad():
            if self._recorder is None or bucket is None:
                # Enough work to keep the device busy, or an error that is the model's to raise.
                return model(batch.to(device), **options)
            if self._addresses.changed():
                self.reset()
            padded = pad_to(batch, bucket, model.config.pad_token_id)
            recording = self._recording(self._recorder, bucket, padded, device, options)
            overwrite(recording.batch, padded)
            recording.replay()
            return _cut(recording.output, bucket, batch)

    def reset(self) -> None:
        """Forget every recording, as after a module of the model was replaced."""
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
        precision = _dispatch.autocast_dtype(device.type)
        key = (bucket, padded.token_type_ids is None, precision, *sorted(options.items()))
        if key in self._recordings:
            self._recordings.move_to_end(key)
            return self._recordings[key]
        static = copied(padded, device)

        def run() -> Any:
            # Autocast's cache would hand the graph casts of weights that it frees on its exit.
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
    """A model's forward for small batches, whose time is otherwise that of launching its kernels.

    A batch is padded up to a bucket: a number of tokens (from 32), of sequences and a longest length (from 64), each
    one of 2, 3, 4, 6, 8, 12, …. The first batch of a bucket records a CUDA graph; the next ones are copied into its
    inputs and replay it. The padding is sequences of its own, which no real token attends to. Weights changed in place
    are seen; a weight that was replaced or moved drops the recordings; after replacing a module call ``reset()``.

    Args:
        model: an ``Encoder``, or one of fastenc's models over it, in evaluation mode.
        max_tokens: batches of more tokens, padding included, run without a graph.
        max_graphs: recordings to keep; the one not used for longest makes room. All share one memory pool.
    Returns: an :class:`InferenceRunner`. On a CPU, which launches no kernels, it calls the model as it is.
    Raises: ValueError for another kind of model (a patched transformers model has to ask its mask for the sizes of the
        batch in every call, which a graph cannot) or a limit below 1.
    Numerics: the model's own; a product of another number of rows may add in another order. Deterministic: as the
        model, for the same bucket.
    Memory: a bucket's inputs and outputs, and once for all buckets what the largest of them needs in between.
    """
    if not isinstance(model, PretrainedModel):
        raise ValueError(
            f"compile_inference takes fastenc's own models, got {type(model).__name__}: load the checkpoint with "
            "fastenc.Encoder.from_pretrained or a model of fastenc.models"
        )
    check_limits(max_tokens=max_tokens, max_graphs=max_graphs)
    device = next(model.parameters()).device
    recorder = CudaGraphRecorder(device, "the model's forward") if device.type == "cuda" else None
    return InferenceRunner(model, max_tokens, max_graphs, recorder)


def _cut(output: Any, bucket: Bucket, batch: PackedBatch) -> Any:
    """The batch's own part of a model's output."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        return cut_to(value, bucket, batch) if isinstance(value, Tensor) else value

    return replace(output, **{f.name: cut(getattr(output, f.name)) for f in fields(output)})
