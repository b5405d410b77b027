"""The first minutes on a GPU: see ``python -m benchmarks.gpu_quick --help``. One file for each section."""

from collections.abc import Callable, Iterable, Iterator

from benchmarks._cases import Case
from benchmarks.gpu_quick import (
    check,
    invariant,
    peers,
    pretrain,
    prewarm,
    rules,
    steps,
    sweep,
    timing,
)
from benchmarks.gpu_quick.problems import Size

# The number of tokens, and the length of each sequence.
STEPS = ((4096, 128), (16384, 128), (65536, 128), (65536, 512))
REAL = Size(16384, 12, 30522, (64, 128, 512), ("bert-base", "minilm"), STEPS)
SMALL = Size(128, 1, 50, (64, 128), ("minilm",), ((32, 16),))
SECTIONS = {
    "prewarm": prewarm,
    "check": check,
    "time": timing,
    "step": steps,
    "pretrain": pretrain,
    "graphs": steps,
    "invariant": invariant,
    "peers": peers,
    "rules": rules,
    "sweep": sweep,
}
# A dry run (benchmarks/_dry_run.py) changes these: the report's name, the command that starts a section, what the
# report says of the machine, and a function that is applied to the cases.
FILE = "gpu_quick.json"
RUNNER: tuple[str, ...] = ()
REMARKS: dict[str, str] = {}
noted: Callable[[Iterable[Case]], Iterable[Case]] = iter


def cases_of(section: str, size: Size) -> Iterator[Case]:
    return steps.graph_cases(size) if section == "graphs" else SECTIONS[section].cases(size)
