import pytest
import torch

from fastenc import ops
from fastenc.cli.info import numerics_table
from fastenc.testing import (
    CASES,
    Case,
    Draw,
    Size,
    assert_within_budget,
    numerics_report,
    ops_without_case,
)

# The command's lengths with smaller widths and a smaller vocabulary, which only make products longer.
SIZE = Size((5, 64, 33, 128), width=192, inner=320, heads=3, head_dim=64, vocabulary=1000)


def case(ours, op="bias_gelu"):
    inputs = lambda size, draw: {"x": draw.normal(40, 8), "count": 3}
    plain = lambda x, count: count * x.exp()
    return Case(op, inputs, ours, plain)


@pytest.fixture(scope="module")
def rows():
    return numerics_report("cpu", size=SIZE)


def test_every_op_of_this_version_keeps_its_budget_in_every_dtype(rows):
    assert [row for row in rows if not row.holds] == []
    measured = [case for case in CASES if case.plain is not None]
    assert {row.op for row in rows} == {case.op for case in measured}
    of_integers = set(ops.__all__) - {row.op for row in rows}
    assert of_integers <= {"mlm_corruption", *(op for op in of_integers if "decode" in op)}
    for case in measured:
        mine = [row for row in rows if (row.op, row.detail) == (case.op, case.detail)]
        assert {row.dtype for row in mine} == {torch.float32, torch.bfloat16, torch.float16}
        assert sum(row.quantity == "forward" for row in mine) == 3
        inputs = case.inputs(SIZE, Draw(torch.Generator())).items()
        leaves = {name for name, v in inputs if torch.is_tensor(v) and v.requires_grad}
        assert bool(leaves) != (case.op in ("crf_marginals", "head_statistics"))
        assert {row.quantity for row in mine} == {"forward", *leaves}


def test_errors_are_those_of_the_definition():
    (forward, gradient) = numerics_report(
        "cpu", dtypes=[torch.bfloat16], cases=[case(lambda x, count: count * x.exp() * 1.25)]
    )
    # Wrong by a quarter everywhere, except for the rounding.
    for row in (forward, gradient):
        assert row.error == pytest.approx(0.25, abs=0.02) and not row.holds
        assert 0 < row.plain_error < 0.02 and row.plain_error < row.allowed < 0.05
    assert (forward.quantity, gradient.quantity) == ("forward", "x")


def test_wrong_gradients_nan_and_another_dtype_break_the_budget():
    def holds(ours):
        rows = numerics_report("cpu", dtypes=[torch.bfloat16], cases=[case(ours)])
        return [row.holds for row in rows]

    right = lambda x, count: count * x.exp()
    assert holds(right) == [True, True]
    assert holds(lambda x, count: right(x, count).detach() + 0 * x) == [True, False]
    assert holds(lambda x, count: right(x, count) + float("nan")) == [False, True]
    assert holds(lambda x, count: right(x, count).float()) == [False, True]
    assert holds(lambda x, count: right(x, count).detach()) == [True]


def test_the_generators_state_is_left_alone_and_runs_repeat():
    before = torch.get_rng_state()
    one = case(lambda x, count: count * x.exp())
    assert numerics_report("cpu", cases=[one]) == numerics_report("cpu", cases=[one])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_inputs_have_the_size_that_is_given():
    small, drawn = Size((2, 3), width=8, inner=8, heads=1, head_dim=8, vocabulary=5), []
    inputs = lambda size, draw: drawn.append(size) or {"x": draw.normal(size.tokens, size.width)}
    one = Case("bias_gelu", inputs, torch.exp, torch.exp)
    numerics_report("cpu", dtypes=[torch.float32], cases=[one], size=small)
    assert drawn == [small]


def test_an_op_without_a_case_is_named(monkeypatch):
    monkeypatch.setattr(ops, "__all__", [*ops.__all__, "new_op"])
    assert "new_op" in ops_without_case()
    assert "new_op" not in ops_without_case([*CASES, case(None, "new_op")])


def test_table_names_what_is_broken():
    rich_console = pytest.importorskip("rich.console")
    rows = numerics_report(
        "cpu",
        dtypes=[torch.float32],
        cases=[
            case(lambda x, count: count * x.exp()),
            case(lambda x, count: count * x.exp().detach() + 0 * x, "layer_norm"),
        ],
    )
    console = rich_console.Console(width=160, record=True)
    console.print(numerics_table(rows))
    right, wrong = (line for line in console.export_text().splitlines() if "float32" in line)
    assert "bias_gelu" in right and "kept" in right and "(x)" in right
    assert "layer_norm" in wrong and "exceeded: x" in wrong


def test_a_sum_that_is_zero_by_symmetry_is_measured_against_its_terms():
    zero = torch.zeros(4)
    noise = zero + 1e-8
    with pytest.raises(AssertionError, match="error max 1e-08"):
        assert_within_budget(noise, zero, zero.double())
    assert_within_budget(noise, zero, zero.double(), scale=1.0)
    with pytest.raises(AssertionError, match="error max 1e-06"):
        assert_within_budget(100 * noise, zero, zero.double(), scale=1.0)
