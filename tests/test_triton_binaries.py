"""What the Triton kernels compile to for GPUs that are not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Bytes of stack a thread: none, but for a few registers' worth on the oldest architecture and in the widest norm, whose
# three sums a column fill the registers at 16 warps.
STACK = {80: 16, 90: 0, 100: 0}
WIDE_NORM = {"layer norm backward 8192 bf16": 128}
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a program can have


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_shipped_configuration_keeps_its_budget(capability):
    script = Path(__file__).with_name("triton_binaries.py")
    command = [sys.executable, "-W", "ignore", str(script), str(capability)]
    binaries = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    assert len(binaries) > 40
    wrong = {}
    for name, binary in binaries.items():
        stack = WIDE_NORM.get(name, STACK[capability])
        fits = (
            binary["stack"] <= stack
            and (binary["spills"] == 0 or stack > 0)
            and binary["shared"] <= SHARED[capability]
            and binary["registers"] * 32 * binary["warps"] <= 65536
            and (binary["matrix"] > 0) == name.startswith("attention")
        )
        if not fits:
            wrong[name] = binary
    assert not wrong, json.dumps(wrong, indent=1)
