"""Runs a benchmark as on an H200 without one, to find mistakes in it before a machine is lent. It gives no times.

    python -m benchmarks._dry_run MODULE [ARGUMENT ...]

Ops on CPU tensors use their Triton kernels. These are compiled for sm_90, and Triton's own launcher starts them on a
driver that starts nothing (_fake_gpu.py), so results stay zero. Sizes are small, and models have one layer. Nothing is
timed: the report of a case lists the kernels that were started. A case that starts none has failed.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from io import StringIO
from itertools import islice
from pathlib import Path

import torch

os.environ["FASTENC_WARP_GROUPS"] = "1"
from fastenc.kernels import batch_invariance, device, launch

from benchmarks import _compare, _fake_gpu, _tuning

FOLDER = Path(__file__).parent
MULTIPROCESSORS = 132
REMARK = "a dry run: nothing was computed, nothing was timed"
MODULE = "benchmarks._dry_run"


def as_on_a_gpu() -> None:
    """Dispatch, launch rules and grids of sm_90 for CPU tensors."""
    from torch.utils._device import _device_constructors

    from fastenc.nn import adamw
    from fastenc.nn.ways import cpu_inference
    from fastenc.ops import attention_blocks, dispatch, library

    dispatch.unsupported_reason = lambda op, impl, x, cpp_limit, triton_limit: (
        triton_limit if impl != "cudnn" else "cuDNN is not there"
    )
    batch_invariance.DEVICES.add("cpu")
    cpu_inference.unsupported_reason = lambda layer_call: "a GPU has no such way"
    attention_blocks.choose = lambda *arguments, **options: "triton"
    adamw.runs_on = lambda device: os.environ.get("FASTENC_ADAMW") != "0"
    overrides = torch.library.Library("fastenc", "IMPL")
    kept.append(overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that the kernel is overridden
        for name, kernel in library.triton_kernels.items():
            kernel = with_values(kernel) if name == "unpack" else kernel
            overrides.impl(name, kernel, "CPU", allow_override=True)
    _device_constructors()  # torch makes a table of them at its first use; it must hold the originals
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, zeroed(getattr(owner, name)))
    launch.architecture = lambda device: "sm_90"
    device.persistent_programs = lambda device, each: each * MULTIPROCESSORS
    for name, module in list(sys.modules.items()):
        if name.startswith("fastenc.kernels.") and hasattr(module, "persistent_programs"):
            module.persistent_programs = device.persistent_programs


def with_values(unpack):
    """``unpack`` with the reference's result: later steps depend on the labels and masks of a padded batch."""
    from fastenc.reference import packing as reference

    @wraps(unpack)
    def run(*arguments):
        unpack(*arguments)
        return reference.unpack(*arguments)

    return run


def zeroed(new):
    """``new`` with zeros: from uninitialised memory, a step could end with a NaN loss."""

    @wraps(new)
    def filled(*arguments, **options):
        tensor = new(*arguments, **options)
        return tensor if tensor.is_meta else tensor.detach().zero_()

    return filled


kept: list = []  # keep them alive: a library's registrations end with it
running = ""  # the benchmark or case; its name begins with the op's


def compare(providers: dict, **options) -> dict:
    """Replaces ``_compare.compare``: calls each provider once."""
    rows = {}
    for name, provider in providers.items():
        if isinstance(provider, str):
            rows[name] = {"missing": provider}
            continue
        before = len(_fake_gpu.launches())
        try:
            provider()
        except Exception as error:
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:150]}
            continue
        kernels = kernels_since(before)
        rows[name] = {"dry run": "not timed", "kernels": ", ".join(kernels)}
        if name.startswith("fastenc"):
            rows[name] |= unstarted(kernels, running)
    return rows


def kernels_since(launches: int) -> dict[str, int]:
    return Counter(each["kernel"] for each in _fake_gpu.launches(launches))


def unstarted(kernels: dict[str, int], name: str) -> dict[str, str]:
    return {} if kernels or in_cuda(name) else {"failed": "it starts no kernel"}


def noted(cases: Iterable) -> Iterator:
    for name, run_case in cases:
        yield name, partial(started, name, run_case)


def started(name: str, run_case) -> dict:
    """The kernels that a case started, and whether it failed; without its figures."""
    global running
    running, before = name, len(_fake_gpu.launches())
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # the output has times
        row = run_case()
    kernels = kernels_since(before)
    failed = {"failed": row["failed"]} if "failed" in row else unstarted(kernels, name)
    print(f"  {name}: {', '.join(kernels) or 'CUDA C++, not started'}", flush=True)
    return {"dry run": REMARK, "kernels": kernels, **failed}


def in_cuda(name: str) -> bool:
    """Whether the op's kernel is CUDA C++, which this driver does not start."""
    from fastenc.ops.dispatch import DECLARED

    op = name.partition(",")[0]
    return op in DECLARED and "cuda" in DECLARED[op].implementations


def small_sizes() -> None:
    _tuning.TOKENS = 512
    from benchmarks import bench_models, bench_seq2seq_step, gpu_quick, tune
    from benchmarks.gpu_quick import sweep
    from fastenc.profiling import models

    for name, config in models.SIZES.items():
        models.SIZES[name] = replace(config, num_layers=1)
    bench_models.TOKENS, bench_models.DTYPE = 512, torch.bfloat16
    bench_models.AUTOCAST = bench_models.GRAPHS = True
    bench_seq2seq_step.MODEL = dict(layers=1, heads=12, width=768, inner=2048)
    bench_seq2seq_step.PAIRS, bench_seq2seq_step.EQUAL = 2, (512, 114)
    bench_seq2seq_step.AUTOCAST = bench_seq2seq_step.OPTIMIZER = True
    gpu_quick.REAL = gpu_quick.REAL._replace(
        tokens=1024, vocabulary=1000, batches=((512, 128), (1024, 512))
    )
    gpu_quick.FILE, gpu_quick.RUNNER = "dry_run.json", (MODULE,)
    gpu_quick.REMARKS, gpu_quick.noted = {"device": REMARK}, noted
    # The sweep makes one launch for each op; every result counts as right, and every time is the same.
    sweep.ON_GPU = tune.ON_GPU = True
    tune.kernel_clock = lambda: lambda operation, prepare: 1.0
    tune.Tuner._right = staticmethod(lambda result, truth, tolerance: True)
    modules = [import_module(f"benchmarks.{path.stem}") for path in FOLDER.glob("bench_*.py")]
    tuned = [module.tuned for module in modules if hasattr(module, "tuned")]
    # Two of each; for attention a long and a short one.
    tune.problems = lambda dtype: (
        make for problems in tuned for make in islice(problems(dtype), 2)
    )
    launch.TABLES = _fake_gpu.FOLDER
    for tunable in launch.registry.values():
        tunable.grid = {name: values[:1] for name, values in tunable.grid.items()}
    sweep.OPTIONS = ["--processes", "0"]


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    global running
    as_on_a_gpu()
    _compare.compare = compare
    small_sizes()
    sys.argv = sys.argv[1:]
    name = sys.argv[0]
    running = name.rpartition(".")[2].removeprefix("bench_")
    # Not run as __main__: that would be a second copy of the module, with the sizes of a GPU.
    module = import_module(name)
    raise SystemExit(
        (module if hasattr(module, "main") else import_module(f"{name}.__main__")).main()
    )


if __name__ == "__main__":
    main()
