"""The peers of the task studies compute the same scores and losses as our models."""

import pytest
import torch

from benchmarks.studies._trainer import Entities, TagsWithCrf
from fastenc.data import EntityData, TaggedData
from fastenc.demo.checkpoint import minilm_folder
from fastenc.tasks import SpanNer, TokenClassification
from fastenc.text.tags import Span
from tests.helpers.training_run import sentence


def test_the_peer_of_spans_is_trained_on_the_same_scores():
    words = [["Ada", "met", "Bo"], ["nobody"], ["the", "cat", "of", "Ada", "sleeps"]]
    entities = [[Span("P", 0, 1), Span("P", 2, 3)], [], [Span("X", 0, 4), Span("P", 3, 4)]]
    data = EntityData([sentence(row) for row in words], entities, ["P", "X"])
    task = SpanNer(max_length=16)
    peer = Entities(task, data, None)
    theirs, ours = peer.model().eval(), peer.ours.eval()
    batch = peer.collator()(peer.rows(data))
    real = batch["labels"] != -100
    with torch.no_grad():
        result = theirs(**batch)
        expected = ours(**task.collate(task.encode(data, ours)))
    torch.testing.assert_close(result["logits"][real], expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result["loss"], expected.loss, rtol=1e-4, atol=1e-5)


def test_the_peer_of_tag_sequences_is_trained_on_the_same_scores():
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("torchcrf")
    rows = [(["Ada", "unbelievably", "slept"], "NAV"), (["hm"], "X"), (["cats", "sleep"], "NV")]
    data = TaggedData([sentence(words, list(tags)) for words, tags in rows], sorted("NAVX"))
    task = TokenClassification(crf=True)
    ours = task.load(minilm_folder(), data).eval()
    peer = TagsWithCrf(task, data, transformers.AutoTokenizer.from_pretrained(minilm_folder()))
    theirs = peer.model().eval()
    theirs.tagger.classifier.load_state_dict(ours.head["out"].state_dict())
    theirs.crf.load_state_dict(ours.crf.state_dict())
    batch = peer.collator()(peer.rows(data))
    examples = task.encode(data, ours)
    with torch.no_grad():
        result = theirs(batch["input_ids"], batch["attention_mask"], batch["labels"])
        loss = ours(**task.collate(examples)).loss
    torch.testing.assert_close(result["loss"], loss, rtol=1e-4, atol=1e-5)
    prediction = transformers.trainer_utils.PredictionOutput(
        result["logits"], batch["labels"], None
    )
    scores = peer.score(data, prediction)
    expected = task.evaluate(ours, data, examples)
    assert scores and scores == {name: pytest.approx(expected[name]) for name in scores}
