"""The same sources by several compilers: the encoder of ``benchmarks.run encoder`` with each library, by turns.

python -m benchmarks.studies.compilers NAME=LIBRARY NAME=LIBRARY...    (the first is the baseline)

LIBRARY is the libfastenc.so that setup.py built of this checkout with that compiler, for example:
CC=clang CXX=clang++ python setup.py build_ext --build-lib build/clang --build-temp build/clang/objects

A process can load one library alone, so each has a process of its own, which waits while another one has its turn.
Outputs are compared with the baseline's before anything is timed.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

# fastenc is imported where it is used: in a process of a library, after its folder stands first in sys.path.

DTYPES = ("float32", "bfloat16")
TURNS, TURN = 9, 0.05  # seconds of a turn, at least
# Hidden states are of order 1; bfloat16 keeps 8 bits through 6 layers.
ALLOWED = {"float32": 1e-4, "bfloat16": 0.1}


def package_with(library: Path, folder: Path) -> str:
    """The folder of a package that links to this checkout's files, with another library."""
    package = folder / "fastenc"
    package.mkdir(parents=True)
    (ours,) = importlib.util.find_spec("fastenc").submodule_search_locations
    for path in Path(ours).iterdir():
        if not path.name.startswith("libfastenc"):
            (package / path.name).symlink_to(path)
    (package / "libfastenc.so").symlink_to(library.resolve(strict=True))
    return str(folder)


def load(folder: str, threads: int) -> None:
    """Make the calls of a process; ``folder`` has the package to use."""
    global calls
    sys.path.insert(0, folder)
    torch.set_num_threads(threads)
    from benchmarks.bench_encoder import batches, corpora
    from fastenc import Encoder
    from fastenc.demo.checkpoint import minilm_folder
    from fastenc.packing import pack_sequences

    encoders = {
        dtype: Encoder.from_pretrained(minilm_folder(), dtype=getattr(torch, dtype)).eval()
        for dtype in DTYPES
    }
    calls = {}
    for corpus, sequences in corpora(minilm_folder()).items():
        packed = [pack_sequences(batch) for batch in batches(sequences, by_length=False)]
        for dtype, encoder in encoders.items():
            calls[corpus, dtype] = lambda encoder=encoder, packed=packed: [
                encoder(batch).last_hidden_state for batch in packed
            ]


def compiler() -> str:
    from fastenc.ops import library

    return library._C.build_info()["compiler"]


def run(case: tuple[str, str]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat(calls[case]()).float().numpy()


def seconds(case: tuple[str, str]) -> float:
    count, start = 0, time.perf_counter()
    with torch.inference_mode():
        while (spent := time.perf_counter() - start) < TURN:
            calls[case]()
            count += 1
    return spent / count


def names(_: None) -> list[tuple[str, str]]:
    return [*calls]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="+", metavar="NAME=LIBRARY")
    libraries = dict(each.split("=", 1) for each in parser.parse_args().libraries)
    baseline, *_ = libraries
    with tempfile.TemporaryDirectory() as scratch:
        processes = {
            name: ProcessPoolExecutor(
                1,
                get_context("spawn"),
                load,
                (package_with(Path(library), Path(scratch, name)), torch.get_num_threads()),
            )
            for name, library in libraries.items()
        }
        ask = lambda name, function, *arguments: (
            processes[name].submit(function, *arguments).result()
        )
        rows = {}
        for case in ask(baseline, names, None):
            wanted = ask(baseline, run, case)
            times: dict[str, list[float]] = {name: [] for name in libraries}
            for name in libraries:
                error = abs(ask(name, run, case) - wanted).max()
                if not error < ALLOWED[case[1]]:
                    raise SystemExit(f"{name}, {', '.join(case)}: differs by {error:.2g}")
            for _ in range(TURNS):
                for name in libraries:
                    times[name].append(ask(name, seconds, case))
            medians = {name: statistics.median(each) for name, each in times.items()}
            rows[", ".join(case)] = {
                name: {
                    "median_ms": 1e3 * medians[name],
                    "p20_ms": 1e3 * sorted(each)[TURNS // 5],
                    "p80_ms": 1e3 * sorted(each)[-1 - TURNS // 5],
                    "speedup": medians[baseline] / medians[name],
                }
                for name, each in times.items()
            }
            print(
                ", ".join(case),
                {name: f"{1e3 * s:.1f} ms" for name, s in medians.items()},
                flush=True,
            )
        compilers = {name: ask(name, compiler) for name in libraries}
        for process in processes.values():
            process.shutdown()
    from benchmarks._results import write

    print(compilers)
    write("compilers", rows)


if __name__ == "__main__":
    main()
