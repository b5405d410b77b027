"""A patched DeBERTa inside zero-shot classification and inside GLiNER: the same scores, by the fused layers."""

import pytest
import torch
import transformers

import fastenc
from fastenc.integrations.transformers import live_layer
from tests.helpers.extension import needs_cpp
from tests.helpers.hub_models import MODELS

pytestmark = [needs_cpp, pytest.mark.filterwarnings("error:fastenc:UserWarning")]


@pytest.fixture
def fused(monkeypatch):
    """The calls of fused layers."""
    calls, run = [], live_layer.run_layer
    monkeypatch.setattr(
        live_layer, "run_layer", lambda layer_call: calls.append(layer_call) or run(layer_call)
    )
    return calls


def same(scores, expected):
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), rtol=0, atol=1e-5)


def test_zero_shot_classification(tmp_path, fused):
    MODELS["MoritzLaurer/deberta-v3-base-zeroshot-v2.0"](tmp_path)
    sort = transformers.pipeline("zero-shot-classification", str(tmp_path))
    assert type(sort.model) is transformers.DebertaV2ForSequenceClassification
    with torch.no_grad():
        for parameter in sort.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    texts, labels = ["The match ended two to one.", "Rain, rain."], ["sport", "politics", "music"]
    expected = sort(texts, labels, batch_size=3)
    fastenc.patch(sort.model)
    for ours, theirs in zip(sort(texts, labels, batch_size=3), expected, strict=True):
        assert ours["labels"] == theirs["labels"]
        same(ours["scores"], theirs["scores"])
    assert fused


def test_gliner(tmp_path, fused):
    gliner = pytest.importorskip("gliner")
    MODELS["urchade/gliner_medium-v2.1"](tmp_path)
    model = gliner.GLiNER.from_pretrained(str(tmp_path)).eval()
    encoder = model.model.token_rep_layer.bert_layer.model
    assert type(encoder) is transformers.DebertaV2Model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    texts, names = ["Ada Lovelace lived in London.", "A dog."], ["person", "place"]
    find = lambda: [model.predict_entities(text, names, threshold=0.0) for text in texts]
    expected = find()
    fastenc.patch(encoder)
    for ours, theirs in zip(find(), expected, strict=True):
        assert [each["text"] for each in ours] == [each["text"] for each in theirs]
        same([each["score"] for each in ours], [each["score"] for each in theirs])
    assert fused
