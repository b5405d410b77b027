"""FASTENC_DEBUG and Triton's kernels: rows that no kernel writes are NaN, and assertions are compiled in."""

import pytest
import torch
from fastenc.kernels.attention_call import self_attention_call

from fastenc._base import debug
from tests.helpers.processes import compiling

pytest.importorskip("triton")

TOKENS, USED = 70, 60
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def used_offsets():
    return torch.tensor([0, 30, USED], dtype=torch.int32)


def attention(half):
    q, k, v = torch.randn(3, TOKENS, 1, 16, dtype=torch.float16 if half else torch.float32)
    attention_call = self_attention_call(used_offsets(), 40, scale=0.25)
    out, lse = torch.ops.fastenc.attention_fwd(q, k, v, *attention_call)
    gradients = torch.ops.fastenc.attention_bwd(
        out, None, out, lse, q, k, v, *attention_call, False, False, False
    )
    return {"out": out, "lse": lse.mT, "dk": gradients[1], "dv": gradients[2]}


def segment_pool():
    argmax = torch.empty(0, dtype=torch.int32)
    dx = torch.ops.fastenc.segment_pool_bwd(torch.randn(2, 8), argmax, used_offsets(), TOKENS, 0)
    return {"dx": dx}


def rotary():
    x, table = torch.randn(TOKENS, 1, 16), torch.randn(40, 16)
    return {"rotated": torch.ops.fastenc.rotary(x, table, used_offsets(), 40, False)}


def head_statistics():
    q, k = torch.randn(2, TOKENS, 1, 16)
    arguments = (used_offsets(), None, None, 40, 0.25, -1, -1, False)
    return {"statistics": torch.ops.fastenc.head_statistics(q, k, *arguments)[0]}


OPS = {
    "attention, short": lambda: attention(half=True),
    "attention, any length": lambda: attention(half=False),
    "segment_pool": segment_pool,
    "rotary": rotary,
    "head_statistics": head_statistics,
}


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="there an assertion about the offsets ends the CUDA context"
)
@pytest.mark.parametrize("name", OPS)
def test_rows_behind_the_last_offset_are_nan_when_debugging(triton_kernels, monkeypatch, name):
    """The ops are called directly, as a compiled graph does, which checks no offsets."""
    monkeypatch.setattr(debug, "ENABLED", True)
    for result, values in OPS[name]().items():
        rows = values.flatten(1)
        assert rows[:USED].isfinite().all(), result
        assert rows[USED:].isnan().all(), result


def test_what_an_op_allocates_is_left_open_otherwise(triton_kernels, monkeypatch):
    filled = []
    monkeypatch.setattr(debug, "ENABLED", False)
    monkeypatch.setattr(debug._FilledWithNaN, "__torch_dispatch__", lambda *_: filled.append(1))
    with DEVICE:
        OPS["rotary"]()
    assert not filled


ASSERTIONS = """
import torch
from benchmarks import _stub_driver
from fastenc._base import debug
from fastenc.kernels import run
from fastenc.kernels.attention_call import self_attention_call
from fastenc.ops import library

q = torch.randn(70, 1, 16, dtype=torch.float16)
call = self_attention_call(torch.tensor([0, 30, 70], dtype=torch.int32), 40, scale=0.25)
library.triton_kernels["attention_fwd"](q, q, q, *call)
for signature in run.signatures():
    for compiled in signature.compiled.values():
        print(signature.kernel, "__assertfail" in compiled.asm["ptx"])
"""


@pytest.mark.parametrize("value", ["0", "1"])
def test_assertions_are_compiled_when_debugging(value, tmp_path):
    # A cache of its own: one that was carried from another machine may lack the PTX code.
    done = compiling("-c", ASSERTIONS, FASTENC_DEBUG=value, TRITON_CACHE_DIR=str(tmp_path))
    compiled = dict(line.split() for line in done.stdout.splitlines())
    assert compiled["attention_short_fwd_kernel"] == str(value == "1")
