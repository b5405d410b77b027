"""Random calls of every op with its Triton kernels give the results and gradients of the definition in float64."""

from random import Random

import pytest
import torch

from fastenc.ops.dispatch import DECLARED
from tests.fuzz.op_calls import CASES, random_call
from tests.fuzz.valid_calls import check


# Squares of the lowest numbers overflow, and numpy warns of it in the interpreter.
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("op", [op for op in CASES if "triton" in DECLARED[op].implementations])
def test_random_calls_give_the_definition(op, triton_target):
    if triton_target.device.type == "cuda":
        pytest.skip("the calls make CPU tensors")
    rng = Random(3)
    for _ in range(4):
        torch.manual_seed(rng.getrandbits(60))
        valid_call = random_call(op, rng, torch.float32)  # see triton_target
        check(valid_call, rng)
