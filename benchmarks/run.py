"""Every benchmark of the repository, one after the other.

fastenc bench [NAME ...]              run all, or these
fastenc bench --list                  print their names
fastenc bench --tune [--help]         fill this GPU's table of launch parameters

Results are written to benchmarks/results/<device>/ as JSON, or below $FASTENC_RESULTS. From them python -m
benchmarks.tables writes docs/benchmarks.md, and python -m benchmarks.plots draws pictures.
"""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    wanted = sys.argv[1:]
    if "--tune" in wanted:
        from benchmarks import tune

        return tune.main([argument for argument in wanted if argument != "--tune"])
    files = sorted(Path(__file__).parent.glob("bench_*.py"))
    names = [file.stem.removeprefix("bench_") for file in files]
    if {"-h", "--help", "--list"} & set(wanted):
        print("\n".join(names) if "--list" in wanted else f"{__doc__}\nNames: {', '.join(names)}")
        return 0
    unknown = set(wanted) - set(names)
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    failed = []
    for file, name in zip(files, names, strict=True):
        if wanted and name not in wanted:
            continue
        # Each in its own process: none inherits another's memory or compiled state.
        if subprocess.run([sys.executable, "-m", f"benchmarks.{file.stem}"]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
