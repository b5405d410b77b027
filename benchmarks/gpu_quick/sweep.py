"""Launch parameters of the ops that say what to try (``tunable``): writes kernels/tuned/."""

import os
from collections.abc import Iterator

from benchmarks import tune
from benchmarks._cases import Case
from benchmarks._device import ON_GPU
from benchmarks.gpu_quick.problems import Size

SECONDS = float(os.environ.get("FASTENC_SWEEP_SECONDS", "120"))
LIMIT = SECONDS + 60
OPTIONS = ["--seconds", str(SECONDS)]


def cases(size: Size) -> Iterator[Case]:
    yield "table", sweep


def sweep() -> dict:
    if not ON_GPU:
        return {"skipped": "tuning times kernels on a GPU"}
    return {"finished": tune.main(OPTIONS) == 0}
