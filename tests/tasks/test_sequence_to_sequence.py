"""The task seq2seq: from files to generated texts, beside transformers and the packages of its metrics."""

import json
import sys

import pytest
import torch

from fastenc.data import TextToTextData, read_text_to_text, train_tokenizer
from fastenc.data.text_to_text import collate_text_to_text, encode_text_to_text
from fastenc.models import Seq2Seq
from fastenc.objectives.loss_terms import labelled_items
from fastenc.ops import int8_products
from fastenc.tasks import Predictor, SequenceToSequence
from fastenc.tasks.metrics import generation_metrics
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.train import NewModel, ObjectiveOptions, TrainConfig, task_trainer
from tests.helpers.commands import failure, run

COLOURS = {"red": "warm", "blue": "cold"}
ROWS = [(f"the {colour} {thing}", COLOURS[colour]) for thing in ("car", "hat", "sky")
        for colour in COLOURS] * 6  # fmt: skip


def tokenizer_of(model_type: str) -> TokenizerLike:
    texts = [" ".join(row) for row in ROWS] + ["sentence: number: 0.0 1.2 2.4 3.6 5"]
    size = 140 if model_type == "t5" else 300
    return train_tokenizer(texts, model_type=model_type, vocab_size=size, show_progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small models with random weights, and tables."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("seq2seq")
    for model_type, objective in (("t5", "span-corruption"), ("bpe", "denoise")):
        new = NewModel(layers=1, hidden=32, dropout=0.0)
        model = new.make(ObjectiveOptions(objective, block_size=64), tokenizer_of(model_type))
        model.save_pretrained(folder / model_type)
    table = "source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in ROWS)
    (folder / "rows.tsv").write_text(table)
    return folder


@pytest.mark.parametrize("model_type", ["t5", "bpe"])
def test_from_a_table_to_predictions(model_type, folder, tmp_path):
    data, out = folder / "rows.tsv", tmp_path / "run"
    options = ("--task", "seq2seq", "--prefix", "colour: ", "--max-target-length", 8)
    steps = ("--max-steps", 150, "--batch-size", 12, "--lr", 5e-3, "--eval-every", 150)
    printed = run("finetune", folder / model_type, data, "--dev", data, "-o", out, *options, *steps)
    assert "exact_match 1" in printed, printed
    metrics = run("evaluate", out, data, "--report", tmp_path / "report")
    assert "chrf (of 100) 100" in metrics and "mistakes.jsonl in" in metrics
    assert (tmp_path / "report" / "mistakes.jsonl").read_text() == ""
    inputs = tmp_path / "inputs.txt"
    inputs.write_text("the red hat\n\nthe blue sky\n")
    run("predict", out, inputs, "-o", tmp_path / "out.tsv")
    lines = (tmp_path / "out.tsv").read_text().splitlines()
    # The empty text has an answer too, but no row of the table says which one.
    assert lines[0] == "prediction" and len(lines) == 4
    assert (lines[1], lines[3]) == ("warm", "cold")
    if int8_products.has_int8_products():
        run("predict", out, inputs, "-o", tmp_path / "int8.tsv", "--dtype", "int8")
        _, red, _, blue = (tmp_path / "int8.tsv").read_text().splitlines()
        assert (red, blue) == ("warm", "cold")
    run("predict", out, inputs, "-o", tmp_path / "out.jsonl", "--num-beams", 2)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0] == {"source": "the red hat", "prediction": "warm"}
    # Beside transformers, from the saved folder.
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    encode = transformers.AutoTokenizer.from_pretrained(out)
    ids = theirs.generate(
        **encode("colour: the red hat", return_tensors="pt").data, max_new_tokens=8
    )
    assert encode.decode(ids[0], skip_special_tokens=True).strip() == "warm"
    assert Predictor(out).predict(["the blue car"])[0]["prediction"] == "cold"


def test_the_loss_is_smoothed_in_training_only(folder):
    """As torch computes it with label_smoothing; the evaluation's loss is the plain one."""
    model = Seq2Seq.from_pretrained(folder / "t5")
    data = TextToTextData([a for a, _ in ROWS], [b for _, b in ROWS])
    task = SequenceToSequence(label_smoothing=0.1, max_target_length=8)
    examples = task.encode(data, model)
    arguments = task.collate(examples)
    labels = arguments.pop("labels")
    smoothing = arguments.pop("label_smoothing")
    with torch.no_grad():
        logits = model(**arguments).logits
        ours = model(**arguments, labels=labels, label_smoothing=smoothing).loss
    for value, share in ((ours.item(), 0.1), (task.compute(model, examples, 5)[1], 0.0)):
        expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=share)
        assert value == pytest.approx(expected.item(), rel=1e-5)
    assert labelled_items(labels) == sum(len(each.labels or ()) for each in examples)


def test_predictions_have_the_beams_that_are_asked_for(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "t5").eval()
    model = Seq2Seq.from_pretrained(folder / "t5")
    data = TextToTextData([source for source, _ in ROWS], [])
    found = {}
    for beams in (1, 4):
        task = SequenceToSequence(num_beams=beams, max_target_length=5)
        examples = task.encode(data, model)
        found[beams] = [ids.tolist() for ids in task.compute(model, examples)[0]]
        for example, ids in zip(examples, found[beams], strict=True):
            source = torch.tensor([example.input_ids])
            expected = theirs.generate(source, num_beams=beams, max_new_tokens=5)[0, 1:].tolist()
            assert expected[: len(ids)] == ids
    assert found[1] != found[4]


def test_several_columns_prefix_and_cut(folder):
    (folder / "pairs.jsonl").write_text(
        "".join(
            json.dumps({"a": a, "b": b, "score": i / 7}) + "\n" for i, (a, b) in enumerate(ROWS)
        )
    )
    data = read_text_to_text(folder / "pairs.jsonl", ("a", "b"), "score")
    assert data.sources[0] == "a: the red car b: warm" and data.targets[1] == str(1 / 7)
    model = Seq2Seq.from_pretrained(folder / "t5")
    task = SequenceToSequence(
        source=("a", "b"), prefix="colour: ", max_length=9, max_target_length=4, round_targets=0.2
    )
    tokenizer = model.own_tokenizer()
    first, second, *_ = task.encode(data, model)
    whole = tokenizer.encode(f"colour: {data.sources[0]}").ids
    assert first.input_ids == [*whole[:8], whole[-1]] and len(whole) > 9
    rounded = tokenizer.encode("0.2").ids
    assert second.labels == [*rounded[:3], rounded[-1]]
    assert task.metrics(data) == ("rouge_l", "chrf", "exact_match", "pearson", "spearman", "loss")
    packed = collate_text_to_text([first, second])
    assert packed["target"].input_ids[0] == model.decoder_start_token_id == 0


def test_metrics():
    """Words in common in order; chrF as sacrebleu's own command gives; numbers that are no numbers are -1."""
    sacrebleu = pytest.importorskip("sacrebleu")
    targets, guesses = ["the cat sat", "a dog"], ["the cat ran", "a dog"]
    metrics = generation_metrics(guesses, targets)
    assert metrics["rouge_l"] == pytest.approx((2 / 3 + 1) / 2)
    assert metrics["exact_match"] == 0.5 and metrics.keys() == {"rouge_l", "chrf", "exact_match"}
    assert metrics["chrf"] == sacrebleu.CHRF().corpus_score(guesses, [targets]).score
    metrics = generation_metrics(["1.0", "2.0", "x"], ["2.0", "3.0", "0.0"])
    assert metrics["pearson"] == pytest.approx(1.0) and metrics["spearman"] == pytest.approx(1.0)


def test_errors_are_named(folder, tmp_path, capsys, monkeypatch):
    table, out = folder / "rows.tsv", ("-o", tmp_path / "run")
    task = ("--task", "seq2seq", *out)
    (tmp_path / "empty.tsv").write_text("source\ttarget\na\t\n")
    for command, message in (
        ((folder / "t5", table, *task, "--source", "text"), "there must be a column 'text', got"),
        (
            (folder / "t5", tmp_path / "empty.tsv", *task),
            "line 2: column 'target' must hold a target",
        ),
        (
            (folder / "bpe", table, *task, "--max-target-length", 900),
            "--max-target-length must be at most 512, the model's number of positions, got 900",
        ),
        ((folder / "t5", table, *task, "--layers", "mix"), "seq2seq reads the last layer"),
        ((folder / "t5", table, *task, "--label-smoothing", 1), "must be in [0, 1), got 1"),
        (
            (folder / "t5", table, *task, "--adapt", "lora"),
            "--adapt lora adds parameters to encoders",
        ),
    ):
        assert message in failure(capsys, "finetune", *command)
    model = Seq2Seq.from_pretrained(folder / "t5")
    data = TextToTextData(["", "b"], ["a", "b"], ["rows, line 2", "rows, line 3"])
    with pytest.raises(ValueError, match="rows, line 2 has no tokens, got ''"):
        encode_text_to_text(data, model.own_tokenizer(), 16, 16, 0)
    with pytest.raises(ValueError, match="round_targets must be positive and finite, got inf"):
        SequenceToSequence(round_targets=float("inf"))
    with pytest.raises(ValueError, match="max_target_length must leave room beside 1 special"):
        encode_text_to_text(data, model.own_tokenizer(), 16, 1, 0)
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ImportError, match=r"pip install 'fastenc\[seq2seq\]'"):
        SequenceToSequence().read(table, data)


def test_a_killed_run_with_other_targets_is_not_resumed(folder, tmp_path):
    model = Seq2Seq.from_pretrained(folder / "t5")
    task, config = SequenceToSequence(max_target_length=8), TrainConfig(str(tmp_path), max_steps=1)
    one = TextToTextData([a for a, _ in ROWS], [b for _, b in ROWS])
    other = TextToTextData(one.sources, one.targets[::-1])
    task_trainer(task, model, one, config).train()
    with pytest.raises(ValueError, match="was written with train examples"):
        task_trainer(task, model, other, config).train(resume=True)
