"""Compiles an op's CUDA source for GPUs that are not present and reads each kernel's resources from ptxas's report."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from torch.utils.cpp_extension import include_paths

from tests.helpers import ROOT

KERNEL = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


class Usage(NamedTuple):
    """For a thread: registers, bytes of stack and bytes of spills; for a block: bytes of shared memory."""

    registers: int
    stack: int
    spills: int
    shared: int


def compile_for(architectures: list[int], source: Path, nvcc: str) -> dict[tuple[str, int], Usage]:
    """{(mangled name, architecture): usage} of every kernel in the file; its host code is compiled too."""
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    folders = [f"-I{path}" for path in (ROOT / "csrc", *include_paths())]
    flags = ["-O3", "-std=c++20", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    flags += ["--expt-relaxed-constexpr", "-Xptxas=-v", "-Werror=all-warnings"]
    done = subprocess.run(
        [nvcc, "-c", "-o", "/dev/null", *flags, *targets, *folders, str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    usages, kernel = {}, None
    for line in done.stderr.splitlines():
        if match := KERNEL.search(line):
            kernel = match[1], int(match[2])
        elif match := STACK.search(line):
            stack, stores, loads = map(int, match.groups())
        elif match := USED.search(line):
            usages[kernel] = Usage(int(match[1]), stack, stores + loads, int(match[2] or 0))
    return usages
