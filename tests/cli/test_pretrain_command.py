import json
import re
import warnings

import pytest
import torch

from fastenc.models import Encoder
from fastenc.objectives import OBJECTIVES
from fastenc.text import save_tokenizer
from tests.helpers.commands import failure, run
from tests.helpers.training_run import documents, word_tokenizer

SMALL = ("--layers", 2, "--hidden", 32, "--heads", 2, "--vocab-size", 300, "--block-size", 32)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(documents(60)))
    return path


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_trains_and_goes_on(objective, text, tmp_path):
    options = ("--objective", objective, *SMALL, "--batch-size", 4, "--max-steps", 4)
    if objective == "distill":
        run("pretrain", text, "-o", tmp_path / "t", *SMALL, "--layers", 4, "--max-steps", 1)
        options = (*options, "--teacher", tmp_path / "t")
    assert "perplexity" in run("pretrain", text, "-o", tmp_path / "a", *options)
    assert "perplexity" in run("pretrain", text, "-o", tmp_path / "a", *options, "--resume")
    run("pretrain", text, "-o", tmp_path / "b", *options, "--from", tmp_path / "a", "--static")
    metrics = json.loads((tmp_path / "b" / "metrics.json").read_text())
    several = objective != "mlm" and not OBJECTIVES[objective].has_decoder
    assert metrics["step"] == 4 and ("mlm" in metrics) is several
    assert Encoder.from_pretrained(tmp_path / "b").config.num_layers == 2


@pytest.mark.parametrize(
    ("objective", "family", "missing"),
    [
        ("span", "bert", r"boundary\.bias and 9 more weights of the objective span"),
        ("mlm+nsp", "bert", r"encoder\.pooler\.bias and 3 more weights of the objective mlm\+nsp"),
        ("electra", "deberta-v2", r"discriminator\.dense\.bias and 41 more weights"),
        ("electra", "deberta", r"discriminator\.dense\.bias and 47 more weights"),
    ],
)
def test_a_head_that_the_checkpoint_lacks_begins_at_random(
    objective, family, missing, text, tmp_path
):
    options = (*SMALL, "--batch-size", 4, "--max-steps", 1)
    run("pretrain", text, "-o", tmp_path / "mlm", *options, "--family", family)
    further = ("--from", tmp_path / "mlm", "--objective", objective)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        printed = run("pretrain", text, "-o", tmp_path / "further", *options, *further)
    assert re.search(rf"fastenc: warning: \S+mlm lacks {missing}", printed), printed


@pytest.mark.filterwarnings("ignore:.* their training begins with random values")
def test_the_seed_decides_the_weights_that_the_checkpoint_lacks(text, tmp_path):
    options = (*SMALL, "--batch-size", 4, "--max-steps", 1)
    run("pretrain", text, "-o", tmp_path / "mlm", *options)
    losses = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)  # what ran before in the process
        output = tmp_path / str(number)
        further = ("--from", tmp_path / "mlm", "--objective", "span", "--seed", seed)
        run("pretrain", text, "-o", output, *options, *further, "--log-every", 1)
        losses.append(json.loads((output / "log.jsonl").read_text().splitlines()[0])["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_what_an_encoder_decoder_cannot_be_is_refused_before_texts_are_read(tmp_path, capsys):
    for option, value in (("--tokenizer", "wordpiece"), ("--family", "bert")):
        command = ("missing.txt", "--objective", "span-corruption", option, value, "-o", tmp_path)
        assert f"{option} must be one of t5" in failure(capsys, "pretrain", *command)


def test_packing_is_chosen(text, tmp_path):
    options = (*SMALL, "--batch-size", 4, "--max-steps", 1, "--packing", "doc-sentences")
    run("pretrain", text, "-o", tmp_path, *options)
    state = json.loads((tmp_path / "checkpoint-00000001" / "state.json").read_text())
    assert state["settings"]["packing"] == "doc-sentences"


def test_empty_documents_are_counted(tmp_path):
    path = tmp_path / "text.jsonl"
    rows = [*documents(60), "", " \n"]
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    output = run("pretrain", path, "-o", tmp_path / "run", *SMALL, "--max-steps", 1)
    assert "2 of 62 documents were empty" in output


def test_a_run_goes_on_with_the_same_texts_only(tmp_path, capsys):
    """One word is replaced by another: the number of examples and their lengths stay the same."""
    changed = [text.replace("cat", "\0").replace("dog", "cat") for text in documents(60)]
    changed = [text.replace("\0", "dog") for text in changed]
    save_tokenizer(word_tokenizer(), tmp_path / "tokenizer")
    for name, own in (("same", documents(60)), ("changed", changed)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(own))
        prepare = ("prepare", tmp_path / f"{name}.txt", "--tokenizer", tmp_path / "tokenizer")
        run(*prepare, "-o", tmp_path / name)
    same, other, dev = (tmp_path / name for name in ("same.txt", "changed.txt", "changed.txt"))
    options = (*SMALL[:-4], "--block-size", 32, "--max-steps", 1)
    own = (*options, "--tokenizer", tmp_path / "tokenizer")
    for trained, instead, settings, name in (
        ((same, "--dev", dev), (other, "--dev", dev), own, "train texts='checksum"),
        ((same, "--dev", dev), (same, "--dev", same), own, "held-out texts='checksum"),
        ((tmp_path / "same",), (tmp_path / "changed",), options, "train texts='store"),
    ):
        output = ("-o", tmp_path / f"run-{instead[0].name}-{name[:5]}")
        run("pretrain", *trained, *output, *settings)
        message = failure(capsys, "pretrain", *instead, *output, *settings, "--resume")
        assert f"checkpoint-00000001 was written with {name}" in message
        run("pretrain", *trained, *output, *settings, "--resume")


def test_errors_are_one_line(text, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    (tmp_path / "one.txt").write_text("One sentence. Another one. A third.")
    few = ("pretrain", tmp_path / "one.txt", "--dev", text, "-o", tmp_path / "x")
    for command, message in (
        (
            ("pretrain", text, "-o", tmp_path, "--objective", "clm"),
            "--objective must be one of mlm",
        ),
        (
            ("pretrain", text, "-o", tmp_path, "--packing", "segment-pairs"),
            "--packing must be one of full-sentences, doc-sentences for mlm, got segment-pairs",
        ),
        (
            ("pretrain", text, "-o", tmp_path, "--objective", "span", "--mask-decoder"),
            "--mask-decoder is an option of the objective mlm, got True for another one: leave it out",
        ),
        (
            ("pretrain", text, "-o", tmp_path, "--dropout", 1.5),
            "--dropout must be in [0, 1), got 1.5",
        ),
        (
            ("pretrain", text, "-o", tmp_path, "--norm-eps", "inf"),
            "--norm-eps must be a finite number of at least 0, got inf",
        ),
        (
            ("pretrain", text, "-o", tmp_path, "--intermediate", 0),
            "--intermediate must be at least 1, got 0",
        ),
        (
            ("pretrain", text, "-o", tmp_path, "--objective", "distill"),
            "needs --teacher, and no other objective takes it, got None for distill: give --teacher",
        ),
        (
            ("pretrain", tmp_path / "empty.jsonl", "-o", tmp_path / "x"),
            "empty.jsonl: there must be documents with text, got 2 empty ones",
        ),
        (
            ("pretrain", text, "--dev", tmp_path / "empty.jsonl", "-o", tmp_path / "x"),
            "empty.jsonl: there must be documents with text, got 2 empty ones",
        ),
        (
            (*few, *SMALL, "--objective", "mlm+nsp"),
            "needs pairs of at least two documents, got pairs of one",
        ),
        (
            ("pretrain", text, "-o", tmp_path / "x", *SMALL[:-4], "--vocab-size", 4),
            "--vocab-size must hold the 5 special tokens and every character of the texts, got 4: give more",
        ),
    ):
        assert message in failure(capsys, *command)
