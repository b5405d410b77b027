"""Launches through Triton's compiler with a driver that starts nothing: what is compiled, and how often."""

import json
import os
import subprocess
import sys

import pytest
import torch
from fastenc.kernels.attention_call import self_attention_call

from tests.helpers import ROOT

pytest.importorskip("triton")


def run_compiled(*arguments):
    """Python without Triton's interpreter, which this process has chosen."""
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=compiling, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_each_kernel_is_compiled_once_for_every_number_of_tokens_and_with_fused_multiply_adds():
    """One token, a multiple of 16 and neither: Triton would compile sizes in."""
    done = run_compiled("-m", "benchmarks.launch_costs", "--seconds", "0")
    assert "fp fusion" not in done.stderr.lower(), done.stderr
    variants = json.loads(done.stdout)["variants"]
    assert len(variants) > 15
    assert [name for name, found in variants.items() if found != [True]] == []


LOOK_UPS = """
import torch
from benchmarks import _stub_driver
from fastenc.kernels import column_sum, run

x = torch.randn(65, 64)
for rows in (x, x[1:], x.flatten()[1:-63].view(64, 64), x.flatten()[2:-62].view(64, 64), x, x.half()):
    column_sum.column_sum(rows)
    print(*(len(signature.compiled) for signature in run.signatures()))
"""


def test_a_launch_is_looked_up_by_dtype_and_alignment():
    """A pointer that is not aligned is compiled for once more, another one like it is not."""
    done = run_compiled("-c", LOOK_UPS)
    assert done.stdout.split() == ["1", "1", "2", "2", "2", "3"]


COMPILING_ONLY = """
import torch
from benchmarks import _stub_driver
from fastenc.kernels.column_sum import column_sum
from fastenc.kernels.run import compiling_only

def start(*arguments):
    raise AssertionError("started")

_stub_driver._Launcher.__call__ = start
with compiling_only():
    column_sum(torch.zeros(4, 8))
try:
    column_sum(torch.zeros(4, 8))
except AssertionError:
    print("compiled, then started")
"""


def test_kernels_can_be_compiled_without_being_started():
    done = run_compiled("-c", COMPILING_ONLY)
    assert done.stdout == "compiled, then started\n", done.stderr[-3000:]


ONCE_MORE = """
import torch
from triton import knobs
from benchmarks._stub_driver import _Launcher
from fastenc.kernels import run
from fastenc.kernels.column_sum import _column_sum_kernel

x, partial = torch.randn(65, 64), torch.empty(3, 64)
launch = lambda: run.run(_column_sum_kernel, (3, 2), x, partial, 65, 64, ROWS=32, BLOCK=128, num_warps=4)
launch()
first, hook = _Launcher.last, lambda metadata: None
launch()
again = _Launcher.last
knobs.runtime.launch_enter_hook.add(hook)
launch()
hooked = _Launcher.last
same = lambda a, b: all(x is y or x == y for x, y in zip(a[:6] + a[9:], b[:6] + b[9:], strict=True))
print(len(first) - 9, first[:3], same(first, again), same(first, hooked))
print(again[6:9], hooked[6].get()["name"], hook in hooked[7].calls)
"""


def test_a_kernel_started_again_gets_what_triton_gives_it_and_a_profilers_hooks():
    done = run_compiled("-c", ONCE_MORE)
    first, last = done.stdout.splitlines()
    assert first == "6 (3, 2, 1) True True"
    assert last == "(None, None, None) _column_sum_kernel True"


@pytest.fixture
def debugging(monkeypatch):
    """The interpreter with device assertions, as compiled kernels have them under TRITON_DEBUG=1."""
    if torch.cuda.is_available():
        pytest.skip("a failed assertion would end the process's CUDA context")
    from triton.runtime import interpreter

    options = interpreter.InterpreterOptions(debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["short", "any length"])
@pytest.mark.parametrize(
    "offsets,longest,message",
    [
        ((0, 30, 70), 39, "a sequence is longer than max_seqlen"),
        ((0, 30, 60), 40, "cu_seqlens ends before the last token"),
    ],
)
def test_offsets_that_do_not_fit_are_asserted_when_debugging(
    debugging, dtype, offsets, longest, message
):
    from fastenc.kernels import attention

    q = torch.randn(70, 1, 16, dtype=dtype)
    offsets = torch.tensor(offsets, dtype=torch.int32)
    longest = longest if dtype == torch.float16 else min(longest, 32) if longest < 40 else longest
    call = self_attention_call(offsets, longest, scale=0.25)
    with pytest.raises(Exception, match=message):
        attention.attention_forward(q, q, q, *call)
