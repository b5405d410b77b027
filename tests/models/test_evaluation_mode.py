"""Evaluation leaves the model in the mode in which it was, also after an error, and encoding does not change it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig, SequenceClassifier, SparseEncoder
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.objectives.evaluation import evaluate_objective
from fastenc.tasks.inference import run_model
from fastenc.tasks.reranker import Reranker


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


CONFIG = EncoderConfig(97, 32, 2, 2, 48, 40, hidden_dropout_p=0.5, classifier_dropout_p=0.5)
TEXTS = ["a dog runs in the rain", "two men play chess"]


def reranker():
    model = SequenceClassifier(CONFIG, num_labels=1)
    return model, lambda: Reranker(model).predict([tuple(TEXTS), tuple(TEXTS[::-1])])


def sparse_encoder():
    model = SparseEncoder(CONFIG)
    return model, lambda: model.encode_sparse(TEXTS, convert_to_tensor=True).to_dense()


def encoder_of_words():
    model = Encoder(CONFIG)
    return model, lambda: model.embed_words(TEXTS).vectors


@pytest.mark.parametrize("make", [reranker, sparse_encoder, encoder_of_words])
def test_encoding_switches_dropout_off_for_its_own_thread_only(make, monkeypatch):
    """Another thread may train the model, or encode with it, at the same time."""
    torch.manual_seed(0)
    model, encode = make()
    model.tokenizer = train_tokenizer(TEXTS, vocab_size=97)
    model.eval()
    expected = encode()
    model.train()
    monkeypatch.setattr(nn.Module, "train", fails)
    torch.testing.assert_close(encode(), expected)
    assert all(module.training for module in model.modules())
