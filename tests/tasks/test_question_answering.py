"""Question answering: the model of each family, and the task from files to files."""

import json

import pytest
import torch
import torch.nn.functional as F

from fastenc.data.questions import read_questions
from fastenc.models import Encoder, EncoderConfig, QuestionAnswerer
from fastenc.packing import pack
from fastenc.tasks import QuestionAnswering, task_of
from fastenc.tasks.squad import squad_metrics
from fastenc.train import TrainConfig, task_trainer
from tests.helpers.commands import run
from tests.helpers.families import ANSWERERS, model, padded_batch


@pytest.mark.parametrize("family", ANSWERERS)
def test_logits_loss_and_gradients_are_transformers(family, tmp_path):
    theirs = model(family, "ForQuestionAnswering")
    theirs.save_pretrained(tmp_path)
    ours = QuestionAnswerer.from_pretrained(tmp_path)
    padded = padded_batch(family)
    batch = pack(**padded)
    real = padded["attention_mask"].bool()
    labels = torch.tensor([[0, 3], [4, 16], [0, 0], [2, 29]])
    expected = theirs(**padded, start_positions=labels[:, 0], end_positions=labels[:, 1])
    output = ours(batch, labels)
    stacked = torch.stack([expected.start_logits, expected.end_logits], -1)[real]
    torch.testing.assert_close(output.logits, stacked, rtol=0, atol=1e-5)
    # transformers' softmax includes the padding; ours covers the real tokens only.
    masked = [
        logits.masked_fill(~real, float("-inf"))
        for logits in (expected.start_logits, expected.end_logits)
    ]
    loss = sum(F.cross_entropy(m, labels[:, i]) for i, m in enumerate(masked)) / 2
    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=1e-6)
    output.loss.backward()
    loss.backward()
    out = theirs.get_submodule(ours.head.spec.names["out"])
    torch.testing.assert_close(ours.head["out"].weight.grad, out.weight.grad, rtol=1e-4, atol=1e-6)
    ours.save_pretrained(tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again(**padded).start_logits, expected.start_logits)


def test_labels_of_another_shape_are_an_error():
    config = EncoderConfig(vocab_size=20, hidden_size=8, num_layers=1, num_heads=1)
    with pytest.raises(ValueError, match=r"labels must be \(batch, 2\) = \(1, 2\)"):
        QuestionAnswerer(config)(pack(torch.tensor([[1, 2]])), torch.tensor([1]))


@pytest.fixture
def squad(tmp_path, data_dir):
    """Forty questions of SQuAD v1.1 in a file of their own."""
    questions = read_questions(data_dir / "squad_v1.1_dev" / "eval_articles.json.gz")[:40]
    rows = [
        {
            "id": q.id,
            "question": q.question,
            "context": q.context,
            "answers": {
                "text": [a.text for a in q.answers],
                "answer_start": [a.start for a in q.answers],
            },
        }
        for q in questions
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def checkpoint(tmp_path, squad):
    """A small encoder whose tokenizer knows the words of the questions."""
    from fastenc.data import train_tokenizer

    questions = read_questions(squad)
    texts = [text for q in questions for text in (q.question, q.context)]
    tokenizer = train_tokenizer(texts, vocab_size=2000)
    torch.manual_seed(0)
    encoder = Encoder(
        EncoderConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            num_layers=2,
            num_heads=2,
            intermediate_size=128,
            max_positions=128,
        )
    )
    encoder.tokenizer = tokenizer
    encoder.save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def test_training_learns_its_questions_and_predictions_score_as_evaluated(
    squad, checkpoint, tmp_path
):
    task = QuestionAnswering(max_length=128, stride=32)
    train = task.read(squad)
    answerer = task.load(checkpoint, train)
    config = TrainConfig(str(tmp_path / "run"), epochs=12, batch_size=16, learning_rate=3e-3)
    untrained = task.evaluate(answerer, train, task.encode(train, answerer))
    metrics = task_trainer(task, answerer, train, config, dev=train).train()
    assert metrics["f1"] > untrained["f1"] + 30
    assert task_of(tmp_path / "run") is QuestionAnswering
    loaded = task.load(tmp_path / "run")
    predictions = task.predict(loaded, task.read_inputs(squad))
    (text,) = task.lines(loaded, train, predictions, ".json")
    assert squad_metrics(train, json.loads(text))["f1"] == pytest.approx(metrics["f1"])
    for line in task.lines(loaded, train, predictions, ".jsonl"):
        row = json.loads(line)
        question = next(q for q in train if q.id == row["id"])
        assert question.context[row["start"] : row["end"]] == row["answer"]
        assert 0 < row["probability"] <= 1
        assert row["question"] == question.question
        spans = [c for c in row["candidates"] if c["text"]]
        assert spans[0]["text"] == row["answer"] and len(row["candidates"]) == len(spans) + 1
        assert [c["score"] for c in spans] == sorted((c["score"] for c in spans), reverse=True)
        assert sum(c["probability"] for c in row["candidates"]) == pytest.approx(1)


def test_unanswerable_questions_are_scored_at_their_best_threshold(squad, checkpoint):
    task = QuestionAnswering(max_length=128, stride=32)
    data = [q._replace(answers=[]) if i % 2 else q for i, q in enumerate(task.read(squad))]
    answerer = task.load(checkpoint)
    predictions = task.predict(answerer, data)
    free = task.score(answerer, data, predictions)
    given = QuestionAnswering(no_answer_threshold=free["no_answer_threshold"])
    assert given.score(answerer, data, predictions)["f1"] == pytest.approx(free["f1"])
    assert free["f1"] >= 50  # answering nothing gives 50
    assert given.calibrate(answerer, data, task.encode(data, answerer)) == {}


def test_the_threshold_of_the_dev_set_is_kept_for_prediction(squad, checkpoint, tmp_path):
    task = QuestionAnswering(max_length=100, stride=32)
    data = [q._replace(answers=[]) if i % 2 else q for i, q in enumerate(task.read(squad))]
    answerer = task.load(checkpoint, data)
    config = TrainConfig(str(tmp_path / "run"), epochs=1, batch_size=16)
    metrics = task_trainer(task, answerer, data, config, dev=data).train()
    threshold = metrics["no_answer_threshold"]
    kept = task.load(tmp_path / "run").task_options
    assert kept == {
        "max_length": 100,
        "stride": 32,
        "max_answer_tokens": 30,
        "no_answer_threshold": threshold,
    }
    path = tmp_path / "questions.jsonl"
    rows = [{"id": q.id, "question": q.question, "context": q.context} for q in data]
    path.write_text("\n".join(map(json.dumps, rows)))
    predict = ["predict", str(tmp_path / "run"), str(path), "-o", str(tmp_path / "a.jsonl")]
    for given, limit in ((), threshold), (("--no-answer-threshold", "1e9"), 1e9):
        run(*predict, *given)
        answers = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
        assert all((row["answer"] == "") == (row["no_answer_score"] > limit) for row in answers)


@pytest.mark.parametrize("name, value", [("max_answer_tokens", 0), ("stride", -1)])
def test_numbers_that_no_answer_or_window_can_have_are_errors(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least {value + 1}, got {value}"):
        QuestionAnswering(**{name: value})


@pytest.mark.parametrize(
    "wrong", ["a question", {"question": "Who ?"}, {"question": "Who ?", "context": None}]
)
def test_a_question_in_python_has_two_texts(wrong):
    with pytest.raises(
        ValueError, match="input 0 must be a dictionary with the texts question and context, got"
    ):
        QuestionAnswering().data_of([wrong])
