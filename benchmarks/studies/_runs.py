"""What the scripts that measure training share: their options, and runs whose results are stored."""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks._process import isolated
from benchmarks._results import read_cases, write
from benchmarks.studies.task_sets import SETS, TaskSet


class Run(NamedTuple):
    """``measure(*arguments)`` returns a row of scores and times; ``metric`` names the score."""

    case: str
    provider: str
    metric: str
    measure: Callable[..., dict]
    arguments: tuple


def training_options(
    description: str | None, what: str, known: Iterable[str], default: Sequence[str]
) -> argparse.Namespace:
    """Parse the options: (chosen names of ``known``, seeds, epochs, limit)."""
    known = list(known)
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("chosen", nargs="*", metavar=what, help=f"of {'; '.join(known)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    if unknown := set(options.chosen) - set(known):
        parser.error(f"{what} must be of {'; '.join(known)}, got {'; '.join(sorted(unknown))}")
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    options.chosen = options.chosen or list(default)
    return options


def runs_on_sets(
    options: argparse.Namespace,
    measure: Callable[..., dict],
    providers: Callable[[TaskSet], Iterable[str]],
) -> Iterator[Run]:
    """Every provider on every chosen set with every seed: ``measure(set, provider, seed, epochs, limit)``."""
    for seed in options.seeds:
        for name in options.chosen:
            case = f"{SETS[name].title}, {options.epochs} epochs, seed {seed}"
            for provider in providers(SETS[name]):
                arguments = (name, provider, seed, options.epochs, options.limit)
                yield Run(case, provider, SETS[name].metric, measure, arguments)


def collect(name: str, runs: Iterable[Run], limit: int | None) -> None:
    """Execute each run in a process of its own and write its row at once. A run whose row is stored is left out. With a
    limit nothing is written."""
    cases: dict[str, Any] = {} if limit else read_cases(name)
    for case, provider, metric, function, arguments in runs:
        rows = cases.setdefault(case, {})
        if provider in rows:
            continue
        rows[provider] = {"metric": metric, **isolated(function, *arguments)}
        if limit is None:
            write(name, cases)
        figures = [f"{k} {v:.4g}" for k, v in rows[provider].items() if not isinstance(v, str)]
        print(f"{case}  {provider:28} {'  '.join(figures)}", flush=True)
