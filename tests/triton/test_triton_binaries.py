"""What the Triton kernels compile to for GPUs that are not here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

triton = pytest.importorskip("triton")

# Bytes of stack a thread, and at most as many loads and stores there: none, but for a few registers' worth in
# attention's dk and dv (eight of short sequences with dropout on sm_80), above all in TF32, in its relative bias's
# gradient, in its forward with a relative bias, in products without matrix instructions, in the widest norms (and that
# of 640 columns, five chunks of 128), whose three sums a column fill the registers, and the CRF's backward.
STACK = {80: 32, 89: 32, 90: 0, 100: 16}
TIGHT, WITHOUT_MATRICES, WIDEST_NORMS, CRF_BACKWARD = 56, 48, 160, 128
# The launches were chosen with Triton 3.9's code. That of 3.6 has up to 224 bytes of stack more, most of it in
# gradients of relative biases and in the CRF's backward.
VERSION = ".".join(triton.__version__.split(".")[:2])
OLDER_TRITON = 0 if tuple(map(int, VERSION.split("."))) >= (3, 9) else 224
RECORDS = ROOT / "tests" / "triton" / "binaries"
# Bytes a program can have; sm_86 and sm_120 have as few as sm_89.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# A multiprocessor holds two programs at least, so that one computes while the other waits for memory, but for those
# that hold a wide tile or row in registers or have eight warps of their own, and on sm_89, which has little shared
# memory.
ALONE = re.compile(
    r"attention backward_relative|attention kernel=backward_\w+ head_dim=\d+ precision=(ieee|tf32)"
    r"|attention kernel=backward_kv head_dim=(96 precision=half biased=True|128)"
    r"|attention_short max_seqlen=128 backward=True"
    r"|(embedding_)?layer_norm width=(2560|[3-8]\d{3}) |crf 64 tags"
    r"|head statistics \d+ \w+ targets, window, bias=True"
)


# On sm_90: elements or scores that a thread has in the loop that takes the time, or in the whole kernel where it has
# none, and instructions for each of them with Triton 3.9.
ATTENTION = "attention kernel={} head_dim=64 precision=half biased=False dropout={} "
SHORT = "attention_short max_seqlen=128 backward={} head_dim=64 dropout={} dtype=float16"
NORM = "{}layer_norm width=768 itemsize=2 backward={} dropout=True dtype=bfloat16"
INNER_LOOPS = {
    ATTENTION.format("forward", False): (64, 8),
    ATTENTION.format("forward", True): (64, 18),
    ATTENTION.format("backward_kv", False): (32, 22),
    ATTENTION.format("backward_kv", True): (32, 33),
    ATTENTION.format("backward_q", False): (32, 9),
    ATTENTION.format("backward_q", True): (32, 17),
    SHORT.format(False, False): (64, 12),
    SHORT.format(False, True): (64, 22),
    SHORT.format(True, False): (32, 27),
    SHORT.format(True, True): (32, 43),
    NORM.format("", False): (24, 45),
    NORM.format("", True): (24, 33),
    NORM.format("embedding_", False): (24, 45),
    NORM.format("embedding_", True): (24, 37),
    "bias_gelu width=3072 backward=False dtype=bfloat16 erf": (16, 21),
    "bias_gelu width=3072 backward=True dtype=bfloat16 erf": (16, 32),
    "bias_glu width=1536 backward=False dtype=bfloat16 erf": (8, 30),
    "bias_glu width=1536 backward=True dtype=bfloat16 erf": (8, 45),
    "index sum 512 bf16": (32, 12),
    "index sum 2 bf16": (32, 12),
}


def compiled(capability: int) -> dict[str, dict]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.triton_record", str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)[f"sm_{capability}"]


def takes_matrix_instructions(name: str) -> bool:
    if name.startswith("head statistics"):
        return "fp32" not in name
    if name.startswith("index sum"):
        return True
    return name.startswith("attention") and "precision=ieee" not in name


def programs_at_a_time(binary: dict, capability: int) -> int:
    """That fit into a multiprocessor's 65,536 registers, given out by 8 a thread, and its shared memory."""
    registers = -(-binary["registers"] // 8) * 8 * 32 * binary["warps"]
    return min(65536 // registers, (SHARED[capability] + 1024) // (binary["shared"] + 1024))


def misfits(binaries: dict[str, dict], capability: int) -> dict[str, dict]:
    wrong = {}
    tight = "backward_relative" + "|backward_kv .*precision=tf32" * (capability in (80, 89))
    for name, binary in binaries.items():
        stack = STACK[capability] + OLDER_TRITON
        if re.match(r"layer_norm width=(640|6144|7168|8192) itemsize=\d backward=True", name):
            stack = WIDEST_NORMS + OLDER_TRITON
        elif name.startswith("crf") and name.endswith("_bwd_kernel"):
            stack = CRF_BACKWARD + OLDER_TRITON
        elif "precision=ieee" in name:
            stack = WITHOUT_MATRICES + OLDER_TRITON
        elif re.search(tight, name):
            stack = TIGHT + OLDER_TRITON
        # A tuned launch was the fastest on a device, whatever it spilled.
        tuned = name.split()[1] == "tuned"
        programs = 1 if tuned or OLDER_TRITON or ALONE.match(name) else 2
        fits = (
            (tuned or max(binary["stack"], binary["spills"]) <= stack)
            and binary["shared"] <= SHARED[capability]
            and (capability == 89 or programs_at_a_time(binary, capability) >= programs)
            and (binary["matrix"] > 0) == takes_matrix_instructions(name)
        )
        if not fits:
            wrong[name] = binary
    return wrong


def slow_loops(binaries: dict[str, dict], version: str) -> dict[str, dict]:
    """Those of sm_90 that take more instructions than INNER_LOOPS says, or another matrix instruction than wgmma."""
    wrong = {}
    slack = 1.0 if tuple(map(int, version.split("."))) >= (3, 9) else 1.3
    for beginning, (elements, each) in INNER_LOOPS.items():
        found = {name: b for name, b in binaries.items() if name.startswith(beginning)}
        for name, binary in found.items():
            grouped = binary["matrix"] == binary["warp group matrix"]
            barriers = 0 if "layer_norm" in name else binary["loop barriers"]
            if (
                (binary["loop"] or binary["instructions"]) > elements * each * slack
                or binary["loop barriers"] > barriers
                or not grouped
            ):
                wrong[name] = binary
    return wrong


@pytest.mark.parametrize("capability", SHARED)
def test_every_shipped_configuration_keeps_its_budget(capability):
    found = compiled(capability)
    assert not found["changed"], "the record says otherwise of these: make test-all writes it anew"
    binaries = found["binaries"]
    assert len(binaries) > 20
    wrong = misfits(binaries, capability)
    wrong |= slow_loops(binaries, VERSION) if capability == 90 else {}
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.parametrize("version", ["3.6", "3.9"])
def test_the_records_keep_the_loops_budgets(version):
    """Of every Triton, whichever is installed."""
    record = json.loads((RECORDS / f"triton-{version}.json").read_text())
    fields, rows = record["fields"], record["sm_90"]
    binaries = {name: dict(zip(fields, row, strict=True)) for name, row in rows.items()}
    assert not [loop for loop in INNER_LOOPS if not any(name.startswith(loop) for name in binaries)]
    assert not slow_loops(binaries, version)


def test_every_loop_with_a_budget_is_compiled():
    from tests.helpers.triton_binaries import cases

    names = [name for name, *_ in cases(Path("no table"), 90)]
    assert not [loop for loop in INNER_LOOPS if not any(name.startswith(loop) for name in names)]


def test_every_tunable_kernel_has_its_binaries():
    """A table may hold entries for each of them."""
    from fastenc.kernels import launch

    from tests.helpers.triton_binaries import module_of

    for tunable in launch.registry.values():
        key = next(module_of(tunable).compiled_keys())
        assert list(module_of(tunable).launched(key))


def test_entries_of_a_table_are_compiled(tmp_path, monkeypatch):
    from tests.helpers import triton_binaries

    key = {"width": 768, "backward": False, "dtype": "float16"}
    parameters = {"ROWS": 4, "BLOCK": 256, "num_warps": 2}
    entry = {"op": "bias_gelu", "key": key, "launch": parameters}
    table = tmp_path / "sm_90.json"
    table.write_text(json.dumps({"entries": [entry]}))
    named = lambda: [case for case in triton_binaries.cases(table) if " tuned " in case[0]]
    erf, tanh = named()
    assert erf[0].startswith("bias_gelu tuned") and erf[0].endswith("erf")
    assert erf[2:] == ("fp16", {"HAS_BIAS": True, "ACTIVATION": 0, "NARROW": True, **parameters})
    assert tanh[3]["ACTIVATION"] == 1
    table.unlink()
    assert not named()
