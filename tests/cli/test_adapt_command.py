"""Adapted checkpoints on the command line: how commands recognise them, and what their errors advise."""

import random
import shlex

import pytest
from safetensors.torch import load_file

from fastenc.adapt import Adapters, Lora, PrefixTuning, PromptTuning
from fastenc.cli.finetune import AdaptOptions
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


def test_the_size_is_that_of_what_is_added():
    made = lambda *given: AdaptOptions(adapt=given[0], adapt_size=given[1]).adaptation()
    for rank in (2, 32):
        lora = made("lora", rank)
        assert (lora.rank, lora.alpha / lora.rank) == (rank, 2.0)
    methods = {"lora": Lora, "adapters": Adapters, "prefix": PrefixTuning, "prompt": PromptTuning}
    for name, method in methods.items():
        assert made(name, None) == method()
        if name != "lora":
            assert made(name, 5) == method(5)


def test_an_adapted_classifier_embeds(folder):
    output = folder / "vectors.safetensors"
    run("embed", folder / "lora", folder / "train.tsv", "-o", output)
    assert load_file(output)["embeddings"].shape == (40, 32)


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


def test_parameters_that_no_step_would_train_are_refused_before_any_work(folder, capsys):
    train = ("finetune", folder / "base", folder / "senses.tsv", "--task", "word-sense")
    text = failure(capsys, *train, "-o", folder / "senses", "--adapt", "lora")
    assert "--adapt lora adds parameters that training steps learn, but word-sense takes no" in text
    assert not (folder / "senses").exists()


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
