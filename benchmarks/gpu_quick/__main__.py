"""The first minutes on a GPU: are the kernels right, how fast are they, beside whom, and what does a step take?

    python -m benchmarks.gpu_quick [SECTION ...] [--output FOLDER] [--small]

Sections run in this order, all of them by default:

    prewarm   several processes compile the kernels of every op and step, into Triton's cache
    check     every op and gradient against float64 at real sizes, dropout included (the masks are the reference's)
    time      each op: microseconds, the roofline's floor, percent of it; forward and backward
    step      masked-LM steps: milliseconds, tokens a second, the host's time
    pretrain  `fastenc pretrain` of a BERT-base on docstrings, or on the file that FASTENC_VISIT_TEXT names
    graphs    the steps of smaller batches as CUDA graphs
    invariant encode's batch_invariant: the same bits in other batches, and its cost
    peers     PyTorch's and cuDNN's attention, F.layer_norm, F.cross_entropy on the same sizes
    rules     on an architecture after sm_90: attention with its rules and with sm_80's
    sweep     launch parameters of the large ops, for FASTENC_SWEEP_SECONDS (120); writes kernels/tuned/

Every case is written to FOLDER/gpu_quick.json when it ends, and prints a line. The sections share a process. A case
that ends this process is written as failed, and another process goes on with the next case. The exit code is 1 if a
case failed or is wrong. torch.compile is not used. Without a GPU, --small runs small sizes with the available kernels,
to find mistakes in these files; `benchmarks/gpu_parts.sh --dry-run` does more.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks import gpu_quick
from benchmarks._cases import Report, run_cases, supervise, unless_wrong
from benchmarks._device import ON_GPU, machine
from benchmarks.gpu_quick import SECTIONS, cases_of
from benchmarks.gpu_quick.problems import Size


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu_quick",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--output", type=Path, default=Path("gpu-quick"), metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="small sizes, also without a GPU")
    parser.add_argument("--cases", action="store_true", help=argparse.SUPPRESS)  # in this process
    given = parser.parse_args(arguments)
    if unknown := set(given.sections) - set(SECTIONS):
        parser.error(f"SECTION must be one of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if not (ON_GPU or given.small or gpu_quick.REMARKS):
        parser.error("torch sees no GPU here: --small tries the script without one")
    given.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRITON_CACHE_DIR", str(given.output.resolve() / "triton-cache"))
    path, sections = given.output / gpu_quick.FILE, given.sections or [*SECTIONS]
    if given.cases:
        return run_sections(path, sections, gpu_quick.SMALL if given.small else gpu_quick.REAL)
    report = Report(path)
    report.content["machine"] = machine() | {"capability": capability(), **gpu_quick.REMARKS}
    for name in sections:
        report.forget(name)
    options = ["--output", str(given.output), *["--small"] * given.small, "--cases"]
    command = [sys.executable, "-m", *gpu_quick.RUNNER, "benchmarks.gpu_quick", *sections, *options]
    return int(bool(supervise(command, path, sections)))


def run_sections(path: Path, sections: list[str], size: Size) -> int:
    """Runs in this process what the report lacks of the sections."""
    for name in sections:
        print(f"{name}:", flush=True)
        cases = cases_of(name, size)
        if name == "time":
            cases = unless_wrong(cases, Report(path).failed("check"))
        limit = SECTIONS[name].LIMIT if ON_GPU else None
        code = run_cases(Report(path), name, gpu_quick.noted(cases), limit=limit)
        if code:
            return code
    return 0


def capability() -> str | None:
    return "{}.{}".format(*torch.cuda.get_device_capability()) if ON_GPU else None


if __name__ == "__main__":
    raise SystemExit(main())
