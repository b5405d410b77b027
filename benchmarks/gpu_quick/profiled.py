"""Each op's kernels once between the profiler's start and stop, for Nsight Compute (benchmarks/gpu_parts.sh)."""

import torch

from benchmarks import gpu_quick
from benchmarks._device import ON_GPU
from benchmarks.gpu_quick.problems import problems, results


def main() -> None:
    for name, make in problems(gpu_quick.REAL):
        if name.endswith("dropout 0.0"):
            continue
        problem = make()
        run = lambda problem=problem: results(problem, problem.inputs, "auto")
        run()  # compiles
        if ON_GPU:
            torch.cuda.synchronize()
            with torch.cuda.profiler.profile():
                run()
                torch.cuda.synchronize()


if __name__ == "__main__":
    main()
