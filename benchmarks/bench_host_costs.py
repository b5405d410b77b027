"""Runs test_host_costs.py with pytest-benchmark and writes its medians like the results of other benchmarks."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._results import write

TABLES = {"host_costs": "The host's time a call"}
ROOT = Path(__file__).parents[1]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host_costs.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(Path(__file__).with_name("test_host_costs.py")),
        ]
        command += ["--benchmark-enable", f"--benchmark-json={path}", "--benchmark-quiet"]
        command += [
            "-W",
            "default",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(ROOT),
            *sys.argv[1:],
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        measured = json.loads(path.read_text())["benchmarks"]
    rows = {
        entry["name"].removeprefix("test_"): {
            "median_ms": entry["stats"]["median"] * 1e3,
            # pytest-benchmark keeps quartiles
            "p20_ms": entry["stats"]["q1"] * 1e3,
            "p80_ms": entry["stats"]["q3"] * 1e3,
            "rounds": entry["stats"]["rounds"],
        }
        for entry in measured
    }
    write("host_costs", {"the host's time a call": rows})


if __name__ == "__main__":
    main()
