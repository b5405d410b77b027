"""Whether attention beside products of 8 bits multiplies bfloat16: by what the processor has."""

from types import SimpleNamespace

import pytest
import torch

from fastenc.ops import library
from fastenc.ops.int8_products import attends_in_bfloat16

# Multiplies bfloat16 by AMX, by AVX512-BF16; is Intel's → multiplies bfloat16 in attention.
PROCESSORS = {
    "Intel with AMX": (True, True, True, True),
    "Intel with AVX512-BF16, without AMX": (False, True, True, False),
    "AMD with AVX512-BF16": (False, True, False, True),
    "Intel with AVX512-VNNI alone": (False, False, True, False),
    "Intel with AVX-VNNI": (False, False, True, False),
    "AMD without AVX512-BF16": (False, False, False, False),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_processor_decides(name, monkeypatch):
    tiles, panels, intel, expected = PROCESSORS[name]
    told = {"bfloat16_tiles": tiles, "bfloat16_panels": panels, "intel_processor": intel}
    monkeypatch.setattr(library, "_C", SimpleNamespace(build_info=lambda: told))
    assert attends_in_bfloat16() is expected


def test_the_instruction_set_in_use_decides(instruction_set):
    has_bfloat16 = instruction_set == "avx512" and torch.cpu._is_avx512_bf16_supported()
    assert has_bfloat16 or not attends_in_bfloat16()
