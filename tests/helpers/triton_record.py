"""The record of what the Triton kernels compile to, and the command that brings it up to date.

    python -m tests.helpers.triton_record [--all] [--write] [--processes N] [80 89 90 100]

Prints {architecture: {"binaries": {name: usage}, "changed": [names], "missing": [names]}} as JSON. A binary comes from
the record if it is there with the hash of what it would be made from. It is compiled if it is there with another hash,
and a sample is compiled always: ``changed`` names those of which the record says otherwise. Binaries that the record
lacks are ``missing``, but for those of a tuned table, unless ``--write`` or ``--all`` is given: ``--write`` compiles
them too and writes the record, also that of an interrupted run; ``--all`` compiles everything.

A version of Triton has a record of its own: another compiler makes other code of the same source.

Runs in a process of its own: the tests' process has chosen Triton's interpreter.
"""

import argparse
import json
import os
from functools import partial
from multiprocessing import Pool

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import triton
from fastenc.kernels import launch

from fastenc._files import write_atomically
from tests.helpers import ROOT
from tests.helpers.triton_binaries import cases, compile_case, forget_line_numbers, made_from

ARCHITECTURES = (80, 89, 90, 100)
VERSION = ".".join(triton.__version__.split(".")[:2])
RECORDS = ROOT / "tests" / "triton" / "binaries"
SAMPLE = 6  # binaries of an architecture
SAMPLE_WITHOUT_RECORD = 24
# The columns of the record.
FIELDS = ("hash", "registers", "stack", "spills", "shared", "matrix", "warp group matrix")
FIELDS += ("instructions", "loop", "loop barriers", "warps")


def wanted(capability: int) -> dict[str, tuple]:
    # Less shared memory is what tells sm_89 from sm_80, and attention alone takes much of it.
    start = "attention" if capability == 89 else ""
    table = launch.TABLES / f"sm_{capability}.json"
    return {name: case for name, *case in cases(table, capability) if name.startswith(start)}


def compiled(capability: int, name: str) -> tuple[str, dict]:
    return name, compile_case(*wanted(capability)[name], capability)


def read_record(version: str = VERSION) -> dict[str, dict[str, dict]]:
    """{architecture: {name: usage with its hash}}"""
    path = RECORDS / f"triton-{version}.json"
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    fields = record.pop("fields")
    return {
        architecture: {name: dict(zip(fields, row, strict=True)) for name, row in rows.items()}
        for architecture, rows in record.items()
    }


def write_record(record: dict[str, dict[str, dict]]) -> None:
    """A line a binary, so that a change shows as what it is."""
    sections = [f'"fields": {json.dumps(FIELDS)}']
    for architecture, binaries in sorted(record.items()):
        lines = [
            f"{json.dumps(name)}: {json.dumps([usage[field] for field in FIELDS])}"
            for name, usage in binaries.items()
        ]
        sections.append(f"{json.dumps(architecture)}: {{\n" + ",\n".join(lines) + "\n}")
    text = "{\n" + ",\n".join(sections) + "\n}\n"
    RECORDS.mkdir(exist_ok=True)
    write_atomically(RECORDS / f"triton-{VERSION}.json", lambda to: to.write_text(text))


def evenly(names: list[str], count: int) -> list[str]:
    return names[:: max(1, len(names) // count)][:count]


def bring_up_to_date(
    capability: int, known: dict[str, dict], missing_too: bool, again: bool, pool
) -> dict:
    """{"binaries", "changed", "missing"}; ``known``, the architecture's record, takes each binary as it is compiled.

    missing_too: compile also what the record is to have and lacks; again: everything.
    """
    found = wanted(capability)
    hashes = {name: made_from(*case, capability) for name, case in found.items()}
    recorded = [name for name in found if name in known]
    valid = {name: known[name] for name in recorded if known[name]["hash"] == hashes[name]}
    kept = [*found] if missing_too else recorded
    sample = evenly(recorded, SAMPLE) or evenly(kept or [*found], SAMPLE_WITHOUT_RECORD)
    tuned = [name for name in found if " tuned " in name]
    due = {*kept, *tuned} - valid.keys() | set(sample)
    names = [name for name in found if again or name in due]
    known.clear()
    known.update(valid)
    # By name: kernels cannot be sent to another process.
    for name, usage in pool.imap_unordered(partial(compiled, capability), names):
        known[name] = {"hash": hashes[name], **usage}
    binaries = {name: known[name] for name in found if name in known}
    known.clear()
    known.update(binaries)  # in the order of the cases
    changed = [name for name, usage in valid.items() if known[name] != usage]
    missing = [name for name in found if name not in binaries]
    return {"binaries": binaries, "changed": changed, "missing": missing}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("architectures", nargs="*", type=int, default=ARCHITECTURES)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    record, results = read_record(), {}
    forget_line_numbers()
    try:
        with Pool(options.processes) as pool:
            for capability in options.architectures:
                known = record.setdefault(f"sm_{capability}", {})
                missing_too = options.write or options.all
                found = bring_up_to_date(capability, known, missing_too, options.all, pool)
                results[f"sm_{capability}"] = found
    finally:
        if options.write:
            write_record(record)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
