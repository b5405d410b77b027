"""Adapted checkpoints on the command line: how commands recognise them, and what their errors advise."""

import json
import random
import shlex

import pytest
from safetensors.torch import load_file

from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig
from tests.helpers.commands import failure, run
from tests.helpers.processes import python


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An encoder, a classifier and a LoRA trained from it, and data of three tasks."""
    folder = tmp_path_factory.mktemp("adapt")
    draw = random.Random(0)
    texts = [
        f"{draw.choice(['good', 'bad'])} {draw.choice(['film', 'book', 'song'])}" for _ in range(40)
    ]
    label = lambda text: "pos" if text.startswith("good") else "neg"
    table = lambda rows: "\n".join(["sentence\tlabel", *rows]) + "\n"
    (folder / "train.tsv").write_text(table(f"{text}\t{label(text)}" for text in texts))
    (folder / "scores.tsv").write_text(table(f"{text}\t{len(text)}" for text in texts))
    (folder / "train.conll").write_text("good O\nfilm B-X\n\nbad O\nbook B-X\n\n")
    encoder = Encoder(
        EncoderConfig(60, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48)
    )
    encoder.tokenizer = train_tokenizer(texts, vocab_size=60)
    encoder.save_pretrained(folder / "base")
    train = ("finetune", folder / "base", folder / "train.tsv", "--epochs", 1)
    run(*train, "-o", folder / "classifier")
    run(*train, "-o", folder / "lora", "--adapt", "lora", "--adapt-size", 2)
    return folder


def test_an_adapted_classifier_embeds(folder):
    output = folder / "vectors.safetensors"
    run("embed", folder / "lora", folder / "train.tsv", "-o", output)
    assert load_file(output)["embeddings"].shape == (40, 32)


def test_a_run_does_not_write_into_the_checkpoint_that_it_trains(folder, capsys):
    before = {path: path.read_bytes() for path in (folder / "base").iterdir()}
    output = ("-o", folder / "base")
    for command in (
        ("finetune", folder / "base", folder / "train.tsv", *output),
        ("finetune", folder / "base", folder / "train.tsv", *output, "--adapt", "lora"),
        ("finetune", folder / "base", folder / "train.tsv", *output, "--overwrite"),
        (
            "pretrain",
            folder / "train.tsv",
            "--text",
            "sentence",
            "--from",
            folder / "base",
            *output,
        ),
    ):
        text = failure(capsys, *command)
        assert "--output must not be the folder of the checkpoint that is trained" in text
    assert {path: path.read_bytes() for path in (folder / "base").iterdir()} == before


def test_an_output_is_no_input_and_no_folder_that_cannot_be_written(folder, tmp_path, capsys):
    data, ranking = tmp_path / "data.jsonl", tmp_path / "ranking.tsv"
    data.write_text('{"text": "good film", "sentence1": "good film", "sentence2": "bad film"}\n')
    ranking.write_text(data.read_text())
    commands = (
        ("embed", folder / "base", data, "--sparse", "-o", data),
        ("rerank", folder / "classifier", data, data, "-o", data),
        ("mine", folder / "base", data, "-t", "sentence1", "-t", "sentence2", "-o", data),
        ("mine", folder / "base", ranking, "--corpus", data, "-o", data),
    )
    for command in commands:
        text = failure(capsys, *command)
        assert f"the output must not be the input, got {data} for both" in text
        out = data / "under a file.jsonl"
        assert str(data) in failure(capsys, *command[:-1], out)
    assert data.read_text() == ranking.read_text()


def test_patience_needs_evaluations(folder, tmp_path, capsys):
    train = ("finetune", folder / "base", folder / "train.tsv", "-o", tmp_path / "run")
    text = failure(capsys, *train, "--patience", 2)
    assert "patience=2 counts evaluations, got no data for them: give dev data" in text


def test_the_command_line_stands_above_the_file(folder, tmp_path):
    (tmp_path / "options.toml").write_text("max-steps = 1\n")
    train = ("finetune", folder / "base", folder / "train.tsv")
    run(*train, "-o", tmp_path / "run", "--config", tmp_path / "options.toml", "--epochs", 2)
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == 4  # 40 texts, 32 a step


def test_a_report_without_classes_is_refused_before_the_model_is_loaded(folder, tmp_path, capsys):
    row = "good film\tbad film\t1\n"
    (tmp_path / "stsb.tsv").write_text(f"sentence1\tsentence2\tscore\n{row}{row}")
    task = ("--task", "sentence-embedding", "--similarity", "score")
    data = tmp_path / "stsb.tsv"
    run("finetune", folder / "base", data, *task, "-o", tmp_path / "run", "--max-steps", 1)
    (tmp_path / "run" / "model.safetensors").unlink()
    text = failure(capsys, "evaluate", tmp_path / "run", data, "--report", tmp_path / "report")
    assert "sentence-embedding has no classes to report on: leave out the report" in text


def test_an_adaptation_of_another_task_is_named_with_its_base(folder, capsys):
    text = failure(
        capsys,
        *("finetune", folder / "lora", folder / "train.conll", "--task", "token-classification"),
        *("-o", folder / "never"),
    )
    assert f"{folder / 'lora'} was fine-tuned for another task" in text
    assert f"begin from the model that it adapts, {folder / 'base'}" in text
    text = failure(
        capsys,
        "finetune",
        folder / "lora",
        folder / "scores.tsv",
        "--regression",
        "-o",
        folder / "never",
    )
    assert (
        f"{folder / 'lora'}: its head has 2 outputs, for ['neg', 'pos']; regression asks for 1"
        in text
    )
    assert not (folder / "never").exists()


def test_an_adapted_model_is_trained_further_and_not_adapted_again(folder, capsys):
    start = ("finetune", folder / "lora", folder / "train.tsv", "--epochs", 1)
    text = failure(capsys, *start, "-o", folder / "never", "--adapt", "prefix")
    assert f"{folder / 'lora'} already has an adaptation, got --adapt prefix: leave it out" in text
    assert f"or give the model that it adapts, {folder / 'base'}" in text
    assert not (folder / "never").exists()
    run(*start, "-o", folder / "further")
    before, after = (
        load_file(folder / name / "adapter_model.safetensors") for name in ("lora", "further")
    )
    assert before.keys() == after.keys()
    assert any((before[key] != after[key]).any() for key in before)


def test_a_head_of_other_outputs_is_an_error_whose_remedy_works(folder, capsys):
    regression = (folder / "scores.tsv", "--regression", "--epochs", 1)
    text = failure(capsys, "finetune", folder / "classifier", *regression, "-o", folder / "never")
    assert (
        f"{folder / 'classifier'}: its head has 2 outputs, for ['neg', 'pos']; regression" in text
    )
    words = shlex.split(text[text.index("python -c") :])
    done = python(*words[1:])
    assert done.returncode == 0, done.stderr
    run("finetune", folder / "classifier-encoder", *regression, "-o", folder / "regression")


def test_features_for_a_task_without_a_head_are_refused_before_any_work(folder, capsys):
    text = failure(
        capsys,
        *("finetune", folder / "base", folder / "missing.tsv", "-o", folder / "never"),
        *("--task", "sentence-embedding", "--adapt", "features"),
    )
    assert (
        "sentence-embedding has no head: give --adapt lora|adapters|prefix|prompt, or leave" in text
    )
    assert not (folder / "never").exists()
