"""The resources of the compiled Triton kernels, for GPUs that are not present."""

import json
import os
import re
from typing import NamedTuple

import pytest

from tests.helpers.processes import compiling

triton = pytest.importorskip("triton")

# Bytes of stack a thread, which also bound the number of loads and stores there. Most kernels have none. A few
# registers' worth is allowed in: attention's dk and dv (eight in short sequences with dropout on sm_80), above all in
# TF32; its dq with shared keys; the gradient of its relative bias; its forward with a relative bias; products without
# matrix instructions; the widest norms and that of 640 columns (five chunks of 128), whose three sums for each column
# fill the registers; and the CRF's backward.
STACK = {80: 32, 89: 32, 90: 0, 100: 16}
TIGHT, WITHOUT_MATRICES, WIDEST_NORMS, CRF_BACKWARD = 56, 48, 160, 128
SCORE_GRADIENTS = 304  # of disentangled attention: addresses that its loop reads again
# The launches were chosen with code from Triton 3.9. Code from 3.6 has up to 224 bytes more stack, mostly in gradients
# of relative biases and in the CRF's backward.
NEWER = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
OLDER_TRITON = 0 if NEWER else 224
# Bytes of stack of single variants that spill outside of their main loop only (docs/design/0006).
HALF = "attention kernel={} head_dim=64 precision=half biased={} {} warp_groups={}"
BF16 = "dtype=bfloat16 dropout=True"
OUTSIDE_OF_LOOP = {
    80: {HALF.format("backward_kv", True, BF16, "False of shared keys"): 48},
    90: {
        HALF.format("backward_kv", False, BF16, "True of shared keys"): 8,
    },
    100: {HALF.format("forward", True, BF16, "False key_bias_ptr alone"): 40},
}
# Of variants that were the fastest ones on an H200, even though they spill.
NARROW = "head_dim=32 {}dropout=False dtype=bfloat16 warp_groups=True"
NARROW_SHORT = f"attention_short max_seqlen=128 backward=True {NARROW.format('')}"
FASTEST = {
    f"attention kernel=backward_kv {NARROW.format('precision=half biased=False ')}": 40,
    NARROW_SHORT: 136,
    f"{NARROW_SHORT} without sums": 32,
}
# The most shared memory of a program in bytes; sm_86 and sm_120 have as little as sm_89.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# A multiprocessor must hold at least two programs, so that one computes while the other waits for memory. Exceptions:
# programs that hold a wide tile or row in registers, programs of eight warps, and sm_89, which has little shared
# memory.
ALONE = re.compile(
    r"attention backward_relative|attention kernel=backward_\w+ head_dim=\d+ precision=(ieee|tf32)"
    r"|attention kernel=backward_q head_dim=(32|64) precision=half biased=False .* warp_groups=True"
    r"|attention kernel=backward_kv head_dim=(96 precision=half biased=True|128)"
    r"|attention kernel=\w+ head_dim=256"
    r"|attention_short max_seqlen=128 backward=True"
    r"|disentangled_attention kernel=((?!forward)\w+ head_dim=\d+ precision=half|.* precision=ieee)"
    r"|block_sparse_attention kernel=backward_\w+ head_dim=\d+ precision=half"
    r"|linear_gelu "
    r"|(embedding_)?layer_norm width=(2560|[3-8]\d{3}) |crf 64 tags"
    r"|head statistics \d+ \w+ targets, window, bias=True"
)


class Budget(NamedTuple):
    """The budget of a kernel at the sizes of BERT-base in half precision.

    Fields:
        name: the binary's name in tests.helpers.triton_binaries.
        elements: scores or elements of a thread in the loop that takes most time, or in the whole kernel if it has no
            loop.
        loop: instructions per element, with Triton 3.6 and with 3.9 and later.
        registers: registers of a thread.
        matrix: the matrix instruction, if there is one.
    """

    name: str
    elements: int
    loop: tuple[float, float]
    registers: int
    matrix: str | None


# head_dim 64; long sequences use the kernels "attention", those of at most 128 tokens "attention_short".
LONG = "attention kernel={} head_dim=64 precision=half biased=False dropout={} dtype=float16 warp_groups={}"
SHORT = "attention_short max_seqlen=128 backward={} head_dim=64 dropout={} dtype=float16 warp_groups=True"
NORM = "{}layer_norm width=768 itemsize=2 backward={} dropout=True dtype=bfloat16"
DISENTANGLED = "disentangled_attention kernel={} head_dim=64 precision=half dropout=True dtype=float16 warp_groups={}"
BLOCK_SPARSE = "block_sparse_attention kernel={} head_dim=64 precision=half dtype=float16"
LINEAR_GELU = "linear_gelu width=3072 inner=768 backward={} dtype=bfloat16"
BUDGETS = {
    90: [
        Budget(LONG.format("forward", False, True), 32, (10.1, 10.5), 128, "wgmma"),
        Budget(LONG.format("forward", True, True), 32, (19.2, 19.8), 128, "wgmma"),
        Budget(LONG.format("backward_kv", False, True), 32, (17.5, 18.5), 255, "wgmma"),
        Budget(LONG.format("backward_kv", True, True), 32, (25.3, 26.1), 255, "wgmma"),
        Budget(LONG.format("backward_q", False, True), 32, (9.4, 10.3), 176, "wgmma"),
        Budget(LONG.format("backward_q", True, True), 32, (16.9, 18.3), 240, "wgmma"),
        # Without dropout of the whole kernel, which has no loop.
        Budget(SHORT.format(False, False), 64, (20.5, 20.5), 128, "wgmma"),
        Budget(SHORT.format(False, True), 64, (29.6, 22.7), 184, "wgmma"),
        Budget(SHORT.format(True, False), 64, (36.0, 39.2), 255, "wgmma"),
        Budget(SHORT.format(True, True), 32, (30.8, 31.9), 255, "wgmma"),
        Budget(NORM.format("", False), 24, (43.7, 44.0), 56, None),
        Budget(NORM.format("", True), 24, (31.1, 31.7), 248, None),
        Budget(NORM.format("embedding_", False), 24, (45.2, 43.5), 96, None),
        Budget(NORM.format("embedding_", True), 24, (37.0, 37.0), 168, None),
        Budget(
            "bias_gelu width=3072 backward=False dtype=bfloat16 erf", 16, (20.5, 20.5), 32, None
        ),
        Budget("bias_gelu width=3072 backward=True dtype=bfloat16 erf", 16, (31.2, 31.2), 64, None),
        Budget("bias_glu width=1536 backward=False dtype=bfloat16 erf", 8, (29.2, 29.2), 32, None),
        Budget("bias_glu width=1536 backward=True dtype=bfloat16 erf", 8, (43.5, 43.5), 72, None),
        Budget(DISENTANGLED.format("forward", True), 32, (34.6, 32.5), 216, "wgmma"),
        # Not backward, which spills.
        Budget(
            DISENTANGLED.format("backward_rows", True) + " of queries", 32, (3.9, 4.0), 128, "wgmma"
        ),
        Budget(
            DISENTANGLED.format("backward_rows", True) + " of keys", 32, (3.6, 3.6), 128, "wgmma"
        ),
        Budget(DISENTANGLED.format("backward_tables", True), 32, (4.0, 4.4), 216, "wgmma"),
        Budget("merged attention 64 bf16", 16, (13.3, 13.3), 32, None),
        Budget("shares of merged attention 64 bf16", 16, (13.0, 13.0), 32, None),
        Budget(BLOCK_SPARSE.format("forward"), 32, (16.4, 16.4), 152, "wgmma"),
        Budget(BLOCK_SPARSE.format("backward_kv"), 16, (37.0, 37.0), 184, "wgmma"),
        Budget(BLOCK_SPARSE.format("backward_q"), 16, (29.6, 29.6), 128, "wgmma"),
        Budget(LINEAR_GELU.format(False), 64, (1.2, 1.3), 144, "wgmma"),
        Budget(LINEAR_GELU.format(True), 64, (1.3, 1.4), 152, "wgmma"),
        # A block with vectors and one with a mask, of which a program takes one.
        Budget("adamw", 8, (101.3, 93.9), 80, None),
        Budget("linear bf16 ieee", 64, (1.5, 1.6), 120, "wgmma"),
        Budget("linear segment max bf16", 32, (2.7, 2.7), 168, "wgmma"),
        Budget("index sum 512 bf16", 32, (11.8, 11.8), 216, "wgmma"),
        Budget("index sum 2 bf16", 32, (11.0, 11.0), 128, "wgmma"),
    ],
    80: [
        Budget(LONG.format("forward", True, False), 32, (21.6, 20.8), 184, "mma"),
        Budget(LONG.format("backward_kv", True, False), 16, (34.6, 39.7), 255, "mma"),
        Budget(NORM.format("", True), 24, (31.2, 31.9), 248, None),
        Budget(DISENTANGLED.format("forward", False), 8, (61.8, 61.8), 216, "mma"),
        Budget(DISENTANGLED.format("backward", False), 8, (76.0, 76.0), 232, "mma"),
        Budget("linear bf16 ieee", 64, (2.5, 3.0), 168, "mma"),
    ],
}

# One of each sort; make test-all compiles every kernel.
IN_EVERY_RUN = {
    LONG.format("forward", True, True),
    SHORT.format(True, True),
    NORM.format("", True),
    "bias_gelu width=3072 backward=True dtype=bfloat16 erf",
    LINEAR_GELU.format(False),
    BLOCK_SPARSE.format("forward"),
    "adamw",
    LONG.format("backward_kv", True, False),
}

# Decoders: causal attention, T5's with its relative bias and the bias's gradient, and attention to other keys, whose
# programs are in a grid because there are no tables of blocks. Qwen3's heads share keys, Gemma 3's have 256 columns.
CAUSAL = (
    "attention kernel={} head_dim=64 precision=half biased=True dtype=bfloat16 dropout=True "
    "warp_groups={} window{} alone"
)
BIAS, CROSS = " and relative_ptr", LONG + " in a grid"
SHARED_KEYS = f"attention kernel={{}} head_dim=64 precision=half biased=False {BF16} warp_groups={{}} of shared keys"
WIDE = f"attention kernel={{}} head_dim=256 precision=half biased=False {BF16} warp_groups={{}}"
RELATIVE_GRADIENT = "attention backward_relative 64 precision=half"
DECODER_BUDGETS = {
    90: [
        Budget(CAUSAL.format("forward", True, ""), 16, (31.2, 32.5), 96, "wgmma"),
        Budget(CAUSAL.format("forward", True, BIAS), 16, (39.2, 39.7), 120, "wgmma"),
        Budget(CAUSAL.format("backward_kv", True, ""), 16, (34.8, 39.1), 216, "mma"),
        Budget(CAUSAL.format("backward_kv", True, BIAS), 16, (41.6, 46.1), 208, "mma"),
        Budget(CAUSAL.format("backward_q", True, ""), 16, (25.7, 27.4), 128, "wgmma"),
        Budget(CAUSAL.format("backward_q", True, BIAS), 16, (32.1, 34.2), 152, "wgmma"),
        Budget(RELATIVE_GRADIENT, 8, (94.7, 91.5), 255, "mma"),
        Budget(CROSS.format("forward", True, True), 32, (19.2, 19.8), 128, "wgmma"),
        Budget(CROSS.format("backward_kv", True, True), 32, (25.3, 26.1), 255, "wgmma"),
        Budget(CROSS.format("backward_q", True, True), 32, (16.9, 18.3), 248, "wgmma"),
        # Not backward_kv, which spills with Triton 3.6.
        Budget(SHARED_KEYS.format("forward", True), 32, (19.3, 19.8), 128, "wgmma"),
        Budget(SHARED_KEYS.format("backward_q", True), 32, (16.9, 18.3), 224, "wgmma"),
        Budget(WIDE.format("forward", True), 8, (65.3, 75.7), 224, "wgmma"),
        Budget(WIDE.format("backward_kv", True), 2, (222.5, 222.5), 160, "mma"),
    ],
    80: [
        Budget(CAUSAL.format("forward", False, ""), 16, (32.0, 30.9), 136, "mma"),
        Budget(CAUSAL.format("forward", False, BIAS), 16, (40.0, 38.5), 168, "mma"),
        Budget(CAUSAL.format("backward_kv", False, ""), 16, (40.2, 45.4), 255, "mma"),
        Budget(CAUSAL.format("backward_kv", False, BIAS), 16, (49.1, 54.4), 255, "mma"),
        Budget(CAUSAL.format("backward_q", False, ""), 16, (27.8, 27.8), 168, "mma"),
        Budget(CAUSAL.format("backward_q", False, BIAS), 16, (35.4, 35.4), 168, "mma"),
        Budget(RELATIVE_GRADIENT, 8, (95.4, 94.0), 248, "mma"),
        Budget(CROSS.format("backward_kv", True, False), 16, (34.4, 39.6), 255, "mma"),
        Budget(CROSS.format("backward_q", True, False), 32, (19.9, 19.7), 255, "mma"),
        Budget(SHARED_KEYS.format("forward", False), 32, (21.3, 20.4), 176, "mma"),
        Budget(SHARED_KEYS.format("backward_kv", False), 16, (34.5, 39.7), 255, "mma"),
        Budget(WIDE.format("forward", False), 8, (92.3, 96.3), 255, "mma"),
        Budget(WIDE.format("backward_kv", False), 2, (240, 283.5), 184, "mma"),
    ],
}


def compiled(capability: int, *names: str, processes: int = 1) -> dict[str, dict]:
    options = [capability, *names, "--processes", processes]
    done = compiling("-W", "ignore", "-m", "tests.helpers.triton_binaries", *options)
    return json.loads(done.stdout)


def takes_matrix_instructions(name: str) -> bool:
    if name.startswith("head statistics"):
        return "fp32" not in name
    if name.startswith(("index sum", "linear")):
        return True
    of_attention = name.startswith(("attention", "block_sparse_", "disentangled_attention"))
    return of_attention and "precision=ieee" not in name


def programs_at_a_time(binary: dict, capability: int) -> int:
    """How many programs fit into a multiprocessor's 65,536 registers (allocated 8 a thread) and its shared memory."""
    registers = -(-binary["registers"] // 8) * 8 * 32 * binary["warps"]
    return min(65536 // registers, (SHARED[capability] + 1024) // (binary["shared"] + 1024))


def misfits(binaries: dict[str, dict], capability: int) -> dict[str, dict]:
    wrong = {}
    tight = "backward_relative" + "|backward_kv .*precision=tf32" * (capability in (80, 89))
    for name, binary in binaries.items():
        stack = STACK[capability] + OLDER_TRITON
        outside = OUTSIDE_OF_LOOP.get(capability, {}).get(name)
        if outside and binary["loop spills"] == 0:
            stack = outside + OLDER_TRITON
        elif capability == 90 and name in FASTEST:
            stack = FASTEST[name] + OLDER_TRITON
        elif re.match(r"layer_norm width=(640|6144|7168|8192) itemsize=\d backward=True", name):
            stack = WIDEST_NORMS + OLDER_TRITON
        elif name.startswith("crf") and name.endswith("_bwd_kernel"):
            stack = CRF_BACKWARD + OLDER_TRITON
        elif re.match(r"disentangled_attention kernel=backward head_dim=\d+ precision=half", name):
            stack = SCORE_GRADIENTS + OLDER_TRITON
        elif "precision=ieee" in name:
            stack = WITHOUT_MATRICES + OLDER_TRITON
        elif re.search(tight, name):
            stack = TIGHT + OLDER_TRITON
        # A tuned launch was the fastest one on a device, even if it spills.
        tuned = " tuned " in name
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


def matrix_instruction(binary: dict) -> str | None:
    if binary["warp group matrix"] == binary["matrix"] > 0:
        return "wgmma"
    return "mma" if binary["matrix"] else None


@pytest.mark.parametrize("capability", BUDGETS)
def test_a_kernel_of_each_sort_keeps_its_budget(capability):
    chosen = [budget for budget in BUDGETS[capability] if budget.name in IN_EVERY_RUN]
    assert chosen
    assert_within(chosen, capability)


def assert_within(budgets: list[Budget], capability: int) -> None:
    """No kernel spills; in the loop of a norm warps wait for another only where rows are copied to shared memory."""
    binaries = compiled(capability, *(budget.name for budget in budgets))
    over = {}
    for budget in budgets:
        binary = binaries[budget.name]
        each = (binary["loop"] or binary["instructions"]) / budget.elements
        keeps = (
            each <= budget.loop[NEWER]
            and binary["registers"] <= budget.registers
            and matrix_instruction(binary) == budget.matrix
            and max(binary["stack"], binary["spills"]) == 0
            and ("layer_norm" not in budget.name or binary["loop barriers"] <= 2)
        )
        if not keeps:
            over[budget.name] = {"instructions an element": each, **binary}
    assert not over, json.dumps(over, indent=1)


FRONT_END = """
import json
from tests.helpers.triton_binaries import refused_by_front_end

kernels, refused = refused_by_front_end(90)
print(json.dumps([len(kernels), refused]))
"""


def test_tritons_front_end_accepts_every_kernel(tmp_path):
    """Only a few kernels are compiled in every run; the others run interpreted, which accepts more."""
    done = compiling("-c", FRONT_END, TRITON_CACHE_DIR=str(tmp_path))
    kernels, refused = json.loads(done.stdout)
    assert kernels > 45 and refused == {}, json.dumps(refused, indent=1)


for_minutes = pytest.mark.skipif(
    not os.environ.get("FASTENC_ALL_KERNELS"), reason="compiles for minutes: make test-all"
)


@for_minutes
@pytest.mark.parametrize("budgets", [BUDGETS, DECODER_BUDGETS], ids=["encoders", "decoders"])
@pytest.mark.parametrize("capability", BUDGETS)
def test_every_kernel_of_base_size_keeps_its_budget(capability, budgets):
    assert_within(budgets[capability], capability)


@for_minutes
@pytest.mark.parametrize("capability", SHARED)
def test_every_shipped_configuration_keeps_its_budget(capability):
    binaries = compiled(capability, processes=os.cpu_count() or 1)
    assert len(binaries) > 20
    wrong = misfits(binaries, capability)
    assert not wrong, json.dumps(wrong, indent=1)


def test_every_tunable_kernel_has_its_binaries():
    """A table may have entries for each of these kernels."""
    from fastenc.kernels import launch

    from tests.helpers.triton_binaries import module_of

    for tunable in launch.registry.values():
        key = next(module_of(tunable).compiled_keys())
        assert list(module_of(tunable).launched(key))


def test_every_budget_is_of_a_binary(tmp_path):
    from tests.helpers import triton_binaries

    for capability in BUDGETS:
        names = {name for name, *_ in triton_binaries.cases(tmp_path / "none", capability)}
        budgets = BUDGETS[capability] + DECODER_BUDGETS[capability]
        assert {budget.name for budget in budgets} <= names


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


def test_a_kernel_whose_name_has_no_parameters_is_held_to_its_budget():
    binary = {"stack": 0, "spills": 0, "shared": 0, "registers": 64, "warps": 4, "matrix": 0}
    spilling = {**binary, "stack": 4096}
    assert misfits({"adamw": binary}, 90) == {}
    assert misfits({"adamw": spilling}, 90) == {"adamw": spilling}


def test_a_variant_that_may_spill_outside_of_its_loop_may_not_inside():
    name, allowed = next(iter(OUTSIDE_OF_LOOP[90].items()))
    stack = allowed + OLDER_TRITON
    binary = {"shared": 0, "registers": 255, "warps": 4, "matrix": 1, "loop spills": 0}
    outside = {**binary, "stack": stack, "spills": 2}
    assert misfits({name: outside}, 90) == {}
    for more in ({"stack": stack + 8}, {"loop spills": 1, "stack": OLDER_TRITON + 8}):
        assert misfits({name: outside | more}, 90)
