"""The computation behind docs/benchmarks-predicted.md, and when the page disappears."""

import json

import pytest

from tests.helpers import ROOT
from tests.helpers.processes import python

pytest.importorskip("triton")

# A masked loop, the main loop inside another loop, and code after them, as cuobjdump prints them.
CODE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   MUFU.EX2 R2, R2 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4] ;
        /*0030*/                   FSEL R3, R3, -INF , !P0 ;
        /*0040*/                   FMUL R3, R3, R3 ;
        /*0050*/              @!P0 BRA 0x20 ;
        /*0060*/                   IADD3 R9, R9, 0x1, RZ ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4] ;
        /*0080*/                   MUFU.EX2 R2, R2 ;
        /*0090*/               @P1 BRA 0x70 ;
        /*00a0*/              @!P2 BRA 0x60 ;
        /*00b0*/                   EXIT ;
"""


def test_the_main_loop_is_told_from_the_masked_one_and_from_what_runs_once():
    from tests.helpers.triton_binaries import INSTRUCTION, inner_loops, main_loop

    places, instructions, targets = zip(*INSTRUCTION.findall(CODE), strict=True)
    loops = inner_loops(places, targets, instructions)
    assert loops == [range(2, 6), range(7, 10)]
    assert main_loop(loops, instructions) == ["HGMMA", "MUFU", "BRA"]


COUNTED = """
import json
from benchmarks.predicted_kernels import GPUS, Kernel, Row, Work
import torch

usage = {"registers": 128, "shared": 0, "warps": 4, "straight": 10, "loop": 50, "instructions": 90}
usage |= {"special functions": 3, "straight special functions": 1, "loop special functions": 2}
kernel = Kernel("_bias_gelu_bwd_kernel", usage, {"ROWS": 2, "BLOCK": 1024}, 264)
elements = 264 * 4 * 2048.0
row = Row("a row", [kernel], elements, Work(1e9, 0.0, torch.bfloat16))
beside = Kernel("another", usage, {}, 264)
found = [kernel.resident, kernel.executed(elements), kernel.executed(elements, "special functions")]
found += [beside.executed(0.0), row.seconds(GPUS[0])[0], row._replace(launches=[kernel, beside]).seconds(GPUS[0])[0]]
print(json.dumps(found))
"""


def test_executed_instructions_and_times_by_hand():
    done = python("-W", "ignore", "-c", COUNTED)
    assert done.returncode == 0, done.stderr[-2000:]
    resident, executed, special, beside, alone, both = json.loads(done.stdout)
    # 65,536 registers hold four such programs, and 132 multiprocessors get two each.
    assert resident == 2
    assert executed == 264 * 4 * (10 + 4 * 50) and special == 264 * 4 * (1 + 4 * 2)
    assert beside == 264 * 4 * 10
    rate = 132 * 4 * 1.755e9
    memory, others = 1e9 / (0.9 * 3.0e12), (executed + 8 * special) / rate
    assert alone == pytest.approx(memory + others / 2 + 2e-6)
    assert both - alone == pytest.approx(2e-6 + beside / rate)


def test_the_page_goes_when_a_gpu_has_its_results():
    page = ROOT / "docs" / "benchmarks-predicted.md"
    files = (ROOT / "benchmarks" / "results").glob("*/*.json")
    devices = {json.loads(path.read_text()).get("machine", {}).get("device", "") for path in files}
    measured = [device for device in devices if device.startswith("NVIDIA")]
    assert not (page.exists() and measured), (
        "a GPU is measured: delete the page, benchmarks/predicted_kernels.py, its line in mkdocs.yml and this file"
    )
