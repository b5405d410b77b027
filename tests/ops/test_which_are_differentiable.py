"""The documents name the ops without a gradient; all other ops have one."""

import re
from random import Random

import pytest
import torch

from fastenc import ops
from tests.fuzz.op_calls import random_call
from tests.helpers import ROOT


def differentiable(op):
    """Whether a result of a random call of the op requires a gradient, if every floating-point input does."""
    for seed in range(6):
        torch.manual_seed(seed)
        valid_call = random_call(op, Random(seed))
        exact = valid_call.draw.in_float64(valid_call.arguments)
        for name, value in valid_call.arguments.items():
            if exact[name] is not value:
                value.requires_grad_()
        if valid_call.case.run(valid_call.arguments).requires_grad:
            return True
    return False


@pytest.mark.parametrize("page", ["ops.md", "reference/ops.md"])
def test_the_pages_name_the_ops_without_a_gradient(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    sentence = re.search(r"All are differentiable but ([^.]*)\.", text)[1]
    named = set(re.findall(r"`(\w+)`", sentence))
    assert named == {op for op in ops.__all__ if not differentiable(op)}
