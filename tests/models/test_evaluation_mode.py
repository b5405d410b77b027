"""Evaluation leaves the model in the mode in which it was, also after an error."""

from types import SimpleNamespace

import pytest
from torch import nn

from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.objectives.evaluation import evaluate_objective
from fastenc.tasks.inference import run_model


def fails(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_comes_back(training):
    model = nn.Linear(1, 1).train(training)
    with pytest.raises(ZeroDivisionError), evaluation_mode(model):
        assert not model.training
        fails()
    assert model.training == training


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_each_module_comes_back(training):
    """A frozen encoder in evaluation mode has no dropout, while its head trains."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout(), nn.Linear(1, 1)))
    model.train(training)[1].train(not training)
    before = [module.training for module in model.modules()]
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize(
    "evaluate",
    [
        lambda model, examples: run_model(model, examples, fails, fails, show_progress=False),
        lambda model, examples: evaluate_objective(model, examples, fails),
    ],
)
def test_an_error_leaves_a_model_in_training(evaluate):
    model = nn.Linear(1, 1).train()
    with pytest.raises(ZeroDivisionError):
        evaluate(model, [SimpleNamespace(input_ids=[1, 2])])
    assert model.training
