"""Launches through Triton's compiler, with a driver that starts nothing: what is compiled, and how often."""

import json
import shutil

import pytest
import torch
from fastenc.kernels.attention_call import self_attention_call

from tests.helpers.processes import compiling

pytest.importorskip("triton")


def test_each_kernel_is_compiled_once_for_every_number_of_tokens_and_with_fused_multiply_adds():
    """One token, a multiple of 16, and another number: Triton itself would specialise on them."""
    done = compiling("-m", "benchmarks.launch_costs", "--seconds", "0")
    assert "fp fusion" not in done.stderr.lower(), done.stderr
    variants = json.loads(done.stdout)["variants"]
    of_one, *others = variants.values()
    assert len(of_one) > 25 and {"_column_sum_kernel", "attention_short_bwd_kernel"} <= set(of_one)
    assert all(all(fused) for variant in variants.values() for fused in variant.values())
    # Attention with global tokens chooses among its variants by the longest sequence, and one token is a short one.
    by_length = {"attention_fwd_kernel", "attention_bwd_kv_kernel", "_attention_delta_kernel"}
    rest = lambda variant: {name: fused for name, fused in variant.items() if name not in by_length}
    assert all(variant == others[0] for variant in others)
    assert rest(others[0]) == rest(of_one)


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
    """The first pointer that is not aligned compiles the kernel once more; a second one does not."""
    done = compiling("-c", LOOK_UPS)
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
    done = compiling("-c", COMPILING_ONLY)
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
    done = compiling("-c", ONCE_MORE)
    first, last = done.stdout.splitlines()
    assert first == "6 (3, 2, 1) True True"
    assert last == "(None, None, None) _column_sum_kernel True"


@pytest.fixture
def debugging(monkeypatch):
    """The interpreter with device assertions, which TRITON_DEBUG=1 adds to compiled kernels."""
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
    attention_call = self_attention_call(offsets, longest, scale=0.25)
    with pytest.raises(Exception, match=message):
        attention.attention_forward(q, q, q, *attention_call)


@pytest.mark.parametrize(
    "version,plain", [("3.5.1", True), ("3.6.0", False), ("3.9.0+git1", False), ("3.10.0", True)]
)
def test_a_launcher_of_an_unknown_triton_is_not_called_directly(version, plain, monkeypatch):
    from fastenc.kernels import run

    monkeypatch.delenv("FASTENC_PLAIN_LAUNCH", raising=False)
    assert run.launches_are_plain(version) is plain
    monkeypatch.setenv("FASTENC_PLAIN_LAUNCH", "1")
    assert run.launches_are_plain(version)


PLAIN = """
import torch
from benchmarks._stub_driver import _Launcher
from fastenc.kernels import run
from fastenc.kernels.column_sum import column_sum

for _ in range(2):
    column_sum(torch.randn(65, 64))
print(len(_Launcher.last), _Launcher.last[7] is not None, len(list(run.signatures())))
"""


def test_launches_can_be_tritons_own(monkeypatch):
    monkeypatch.setenv("FASTENC_PLAIN_LAUNCH", "1")
    assert compiling("-c", PLAIN).stdout.split()[1:] == ["True", "0"]


LOOK_UP_KEY = """
import random
import torch
from benchmarks import _stub_driver
from triton.runtime.jit import JITFunction
from fastenc.kernels import column_sum, run
from fastenc.kernels.attention_forward import attention_fwd_kernel
from fastenc.kernels.layer_norm_forward import layer_norm_fwd_kernel

class Kernel:
    metadata = packed_metadata = function = None
    def run(self, *arguments):
        Kernel.started = self
    def launch_metadata(self, *arguments):
        pass
    def __getitem__(self, grid):
        return self.run

def compile(self, key, signature, device, constexprs, options, attrs, warmup):
    return self.device_caches[device][0].setdefault(key, Kernel())

JITFunction._do_compile = compile
JITFunction._pack_args = lambda self, backend, kwargs, bound, specialization, options: (options, None, None, None)
draw = random.Random(0)
dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.int32]
stores = {dtype: torch.zeros(4096, dtype=dtype) for dtype in dtypes}
numbers = [1, 16, 17, 32, 2**31, 2**31 + 16, -16]

def value(kernel, name, first):
    if name.endswith("_ptr"):
        if not first and draw.random() < 0.1:
            return None
        return stores[draw.choice(dtypes)][draw.choice([0, 0, 0, 8, 16, 1, 3, 4]):][:draw.choice([0, 1, 64])]
    if kernel.params[kernel.arg_names.index(name)].is_constexpr:
        return draw.choice([True, False, 16, 32, 64, "ieee", "tf32"])
    if name in ("scale", "eps", "drop_scale"):
        return draw.choice([0.1, 1.0, 0.0])
    return draw.choice(numbers)

wrong, known = 0, 0
for kernel in (column_sum._column_sum_kernel, layer_norm_fwd_kernel, attention_fwd_kernel):
    names, calls = kernel.arg_names, []
    for _ in range(300):
        arguments = dict(draw.choice(calls)) if calls and draw.random() < 0.9 else {}
        for name in [draw.choice(names)] if arguments else names:
            arguments[name] = value(kernel, name, name == names[0])
        calls.append(arguments)
        launch = {"num_warps": draw.choice([4, 8])}
        compiled = lambda: sum(len(s.compiled) for s in run.signatures())
        before = compiled()
        run.run(kernel, (1, 2), **arguments, **launch)
        known += compiled() == before
        mine = Kernel.started
        wrong += mine is not kernel.run(**arguments, **launch, grid=(1,), warmup=True, enable_fp_fusion=True)
print(wrong, known)
"""


def test_the_look_up_key_tells_apart_what_triton_does():
    """Random arguments, most of which differ from an earlier call in one respect. Nothing is compiled."""
    wrong, known = map(int, compiling("-c", LOOK_UP_KEY).stdout.split())
    assert wrong == 0 and known > 50


PARAMETERS = """
import struct
from benchmarks import _fake_gpu
from triton.backends.nvidia import driver

seen, begin, start = [], driver.CudaLauncher.__init__, driver.CudaLauncher.__call__

def noting(self, source, metadata):
    self.noted = source, metadata
    begin(self, source, metadata)

def started(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
    seen.append((*self.noted, [x, y, z], arguments))
    return start(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments)

driver.CudaLauncher.__init__, driver.CudaLauncher.__call__ = noting, started
import sys
sys.modules["benchmarks._stub_driver"] = _fake_gpu
from benchmarks import launch_costs
from fastenc.kernels import run

for name, op in launch_costs.calls(65):
    op(); op()
wrong = []
launches = _fake_gpu.launches()
for launch, (source, metadata, grid, arguments) in zip(launches, seen, strict=True):
    names = source.fn.arg_names
    constants = {place[0]: value for place, value in source.constants.items()}
    aligned = {place[0] for place, values in source.attrs.items() if any(v[0] == "tt.divisibility" for v in values)}
    expected = []
    for place, (name, value) in enumerate(zip(names, arguments, strict=True)):
        parameter_type = source.signature[name]
        if parameter_type == "constexpr" or place in constants:
            constant = constants.get(place)
            if getattr(constant, "value", constant) != value:
                wrong.append((source.name, name, constant, value))
        elif parameter_type[0] == "*":
            expected.append([8, value.data_ptr()])
        elif parameter_type in ("fp32", "f32"):
            expected.append([4, struct.unpack("I", struct.pack("f", value))[0]])
        else:
            size = int(parameter_type[1:]) // 8
            expected.append([size, value & (2 ** (8 * size) - 1)])
        if place in aligned and expected[-1][1] % 16:
            wrong.append((source.name, name, "not aligned"))
    got, scratch = launch["parameters"][:len(expected)], launch["parameters"][len(expected):]
    if got != expected or any(value for _, value in scratch):
        wrong.append((source.name, expected, launch["parameters"]))
    if (launch["grid"], launch["threads"], launch["shared"]) != (grid, 32 * metadata.num_warps, metadata.shared):
        wrong.append((source.name, grid, launch))
compiled = sum(len(signature.compiled) for signature in run.signatures())
print(len(launches), compiled, wrong)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real libcuda is loaded here")
@pytest.mark.skipif(not shutil.which("gcc"), reason="the noting libcuda takes a C compiler")
def test_the_driver_gets_every_parameter_as_the_kernel_was_compiled_for():
    """First and repeated launches, through Triton's own launcher. Memory would be corrupted by a number where the
    kernel reads a pointer, by another constant than the compiled one, or by an unaligned pointer that counts as
    aligned."""
    launches, compiled, wrong = compiling("-c", PARAMETERS).stdout.split(maxsplit=2)
    assert wrong == "[]\n"
    assert int(launches) >= 2 * int(compiled) > 40
