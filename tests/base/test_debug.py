"""FASTENC_DEBUG: values are checked wherever they lie. The tensors here say that they are on a GPU."""

import pytest
import torch

from fastenc import ops
from fastenc._base import debug
from fastenc.nn.embeddings import check_ids
from fastenc.nn.pooling import pool
from fastenc.ops.labelled import select_labelled
from fastenc.ops.masked_cross_entropy import check_labels
from fastenc.packing import check_cu_seqlens


class OnGpu(torch.Tensor):
    device = property(lambda self: torch.device("cuda", 0))


def on_gpu(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype).as_subclass(OnGpu)


def offsets(*values):
    return on_gpu(values, torch.int32)


CHECKS = {
    "cu_seqlens must run from 0 to the number of tokens 9, got 0 to 7": lambda: check_cu_seqlens(
        offsets(0, 5, 7), 9, 5
    ),
    "max_seqlen must be at least the longest sequence, got 4": lambda: check_cu_seqlens(
        offsets(0, 5, 7), 7, 4
    ),
    r"labels must be in \[0, 5\)": lambda: check_labels(
        "loss", on_gpu([1, 5]), torch.zeros(2, 5).as_subclass(OnGpu), 5, -100
    ),
    "max_labels must be at least the number of labelled rows, got 1 for 2": lambda: select_labelled(
        torch.zeros(3, 4), on_gpu([1, -100, 2]), max_labels=1
    ),
    r"input_ids must be in \[0, 9\)": lambda: check_ids(on_gpu([9]), 9),
    "an empty sequence has nothing to pool": lambda: pool(
        torch.zeros(2, 4), offsets(0, 2, 2), "mean"
    ),
}


@pytest.mark.parametrize("message", CHECKS)
def test_values_on_a_gpu_are_checked_when_debugging(message, monkeypatch):
    monkeypatch.setattr(debug, "ENABLED", True)
    with pytest.raises(ValueError, match=message):
        CHECKS[message]()


def test_values_on_a_gpu_are_not_read_otherwise(monkeypatch):
    monkeypatch.setattr(debug, "ENABLED", False)
    check_cu_seqlens(offsets(0, 5, 7), 9, 4)
    check_ids(on_gpu([9]), 9)


def test_ids_outside_a_table_are_named_before_any_kernel_starts(monkeypatch):
    monkeypatch.setattr(debug, "ENABLED", True)
    table = torch.randn(9, 64)
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 9\), got 9"):
        ops.embedding_layer_norm(torch.tensor([9]), table, torch.ones(64))


def test_offsets_that_change_unseen_are_read_at_every_call(monkeypatch):
    """A change through NumPy does not count as a new version of the tensor."""
    monkeypatch.setattr(debug, "ENABLED", False)
    cu_seqlens = torch.tensor([0, 5, 7], dtype=torch.int32)
    check_cu_seqlens(cu_seqlens, 7, 5)
    cu_seqlens.numpy()[1] = 9
    check_cu_seqlens(cu_seqlens, 7, 5)
    monkeypatch.setattr(debug, "ENABLED", True)
    with pytest.raises(ValueError, match="sequence 0 has 9 tokens"):
        check_cu_seqlens(cu_seqlens, 7, 5)


def test_a_captured_graph_and_a_compiled_one_read_nothing(monkeypatch):
    monkeypatch.setattr(debug, "ENABLED", True)
    here, there = torch.zeros(1), on_gpu([1])
    assert debug.may_read(here) and debug.may_read(there)
    assert not debug.may_read(here.to("meta"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert debug.may_read(here) and not debug.may_read(there)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not debug.may_read(here)
