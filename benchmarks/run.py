"""Every benchmark of this folder, one after the other: python -m benchmarks.run [name ...]"""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    wanted = sys.argv[1:]
    files = sorted(Path(__file__).parent.glob("bench_*.py"))
    unknown = set(wanted) - {file.stem.removeprefix("bench_") for file in files}
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    failed = []
    for file in files:
        if wanted and file.stem.removeprefix("bench_") not in wanted:
            continue
        # A process each: none inherits another's memory or compiled state.
        if subprocess.run([sys.executable, "-m", f"benchmarks.{file.stem}"]).returncode:
            failed.append(file.stem)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
