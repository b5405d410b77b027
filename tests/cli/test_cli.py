import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from fastenc.cli import info, main
from fastenc.cli.commands import COMMANDS, command_named
from fastenc.cli.finetune import Finetune
from fastenc.cli.options import options_of, parse
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder
from fastenc.tasks import SequenceClassification
from fastenc.testing import CASES
from fastenc.train import TrainConfig
from tests.helpers import ROOT
from tests.helpers.commands import failure, run
from tests.helpers.families import model

WORDS = ["good", "fine", "nice", "happy"], ["bad", "poor", "sad", "awful"]


def test_warnings_about_the_users_data_are_a_line(capsys):
    from fastenc import cli

    failure(capsys, "predict", "no model", "no data", "-o", "out.tsv")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn_explicit("line 2: no token", UserWarning, cli.__file__, 7)
        warnings.warn_explicit("theirs", UserWarning, "elsewhere.py", 7)
    ours, theirs = capsys.readouterr().err.split("\n", 1)
    assert ours == "fastenc: warning: line 2: no token" and "elsewhere.py:7: UserWarning" in theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    draw = torch.Generator().manual_seed(0)
    pick = lambda words: words[int(torch.randint(len(words), (1,), generator=draw))]
    rows = []
    for index in range(120):
        label = index % 2
        words = [pick(WORDS[label]), "the", pick(["film", "book", "song"]), pick(WORDS[label])]
        rows.append((" ".join(words), "pos" if label == 0 else "neg"))
    table = lambda part: "sentence\tlabel\n" + "".join(f"{s}\t{y}\n" for s, y in part)
    (folder / "train.tsv").write_text(table(rows[:100]))
    (folder / "dev.tsv").write_text(table(rows[100:]))
    (folder / "text.txt").write_text("\n\n".join(s for s, _ in rows))
    return folder


SMALL = ("--layers", 1, "--hidden", 32, "--heads", 2, "--vocab-size", 60)


@pytest.fixture(scope="module")
def pretrained(folder):
    output = folder / "pretrained"
    text = run(
        "pretrain", folder / "text.txt", "-o", output, *SMALL, "--block-size", 32, "--max-steps", 6
    )
    assert "perplexity" in text
    return output


@pytest.fixture(scope="module")
def finetuned(folder, pretrained):
    output = folder / "finetuned"
    command = (
        "finetune",
        pretrained,
        folder / "train.tsv",
        "--dev",
        folder / "dev.tsv",
        "-o",
        output,
    )
    text = run(*command, "--lr", 3e-3, "--epochs", 10, "--batch-size", 8)
    assert "accuracy" in text
    return output


def test_pretrain_finetune_predict(folder, finetuned):
    run("predict", finetuned, folder / "dev.tsv", "-o", folder / "labels.tsv")
    lines = [line.split("\t") for line in (folder / "labels.tsv").read_text().splitlines()]
    assert lines[0] == ["label", "p(neg)", "p(pos)"] and len(lines) == 21
    truth = [line.split("\t")[1] for line in (folder / "dev.tsv").read_text().splitlines()[1:]]
    right = sum(line[0] == label for line, label in zip(lines[1:], truth, strict=True))
    assert right >= 18, "the words tell the label"
    run("predict", finetuned, folder / "dev.tsv", "-o", folder / "labels.jsonl")
    rows = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == [line[0] for line in lines[1:]]
    assert all(abs(row["p(neg)"] + row["p(pos)"] - 1) < 1e-5 for row in rows)
    texts = [line.split("\t")[0] for line in (folder / "dev.tsv").read_text().splitlines()[1:]]
    assert [row["sentence"] for row in rows] == texts
    for name in ("model.safetensors", "config.json", "tokenizer.json", "log.jsonl"):
        assert (finetuned / name).is_file()


def test_evaluate_gives_the_metrics_of_training(folder, finetuned):
    output = folder / "evaluated.json"
    text = run("evaluate", finetuned, folder / "dev.tsv", "-o", output)
    best = json.loads((finetuned / "metrics.json").read_text())
    evaluated = json.loads(output.read_text())
    assert evaluated == pytest.approx({name: best[name] for name in evaluated}, abs=1e-6)
    assert "accuracy" in evaluated and f"accuracy {evaluated['accuracy']:.4f}" in text


def test_a_model_goes_by_the_options_of_its_training(folder, pretrained, capsys):
    rows = [line.split("\t") for line in (folder / "train.tsv").read_text().splitlines()[1:41]]
    pairs = folder / "pairs.tsv"
    lines = ["one\ttwo\tclass", *(f"{text}\t{text}\t{label}" for text, label in rows)]
    pairs.write_text("\n".join(lines))
    output = folder / "of pairs"
    columns = ("-t", "one", "-t", "two")
    options = ("--label", "class", "--dev", pairs, "--epochs", 1)
    run("finetune", pretrained, pairs, *columns, *options, "-o", output)
    run("predict", output, pairs, "-o", folder / "kept.tsv")
    run("predict", output, pairs, *columns, "-o", folder / "given.tsv")
    assert (folder / "kept.tsv").read_text() == (folder / "given.tsv").read_text()
    assert "accuracy" in run("evaluate", output, pairs)
    predict = ("predict", output, pairs, "-o", folder / "wrong.tsv")
    text = failure(capsys, *predict, "-t", "one")
    assert "the model was trained on pairs of texts (of one and two), got single texts" in text
    text = failure(capsys, *predict, *columns, "-t", "one")
    assert "text must name one column, or two of pairs, got one, two, one" in text


def test_options_of_a_newer_version_and_of_transformers(folder, finetuned, tmp_path):
    shutil.copytree(finetuned, tmp_path / "model")
    config = json.loads((finetuned / "config.json").read_text())
    for options in ({"unheard_of": 1, **config["task_options"]}, None):
        (tmp_path / "model" / "config.json").write_text(
            json.dumps({**config, "task_options": options})
        )
        assert "accuracy" in run("evaluate", tmp_path / "model", folder / "dev.tsv")
    assert SequenceClassification.options_kept({"problem_type": "regression"})["regression"]
    several = {"problem_type": "multi_label_classification"}
    assert SequenceClassification.options_kept(several) == {
        "regression": False,
        "multi_label": True,
    }


def test_a_text_file_gives_a_line_for_each_of_its_lines(folder, finetuned):
    (folder / "lines.txt").write_text("a good film\n\na bad film\n")
    run("predict", finetuned, folder / "lines.txt", "-o", folder / "lines.tsv")
    assert len((folder / "lines.tsv").read_text().splitlines()) == 1 + 3


def test_regression_predicts_numbers(folder, pretrained):
    lines = (folder / "train.tsv").read_text().replace("pos", "1.5").replace("neg", "-2.5")
    (folder / "numbers.tsv").write_text(lines)
    output, data = folder / "regression", folder / "numbers.tsv"
    text = run(
        *("finetune", pretrained, data, "--dev", data, "--regression", "-o", output),
        *("--lr", 5e-3, "--batch-size", 8, "--epochs", 6, "--metric", "spearman"),
        # The last weights only: the epoch that ranks best may predict numbers that are far off.
        *("--eval-every", 78),
    )
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["spearman"] > 0.8 and "pearson" in text
    run("predict", output, data, "-o", folder / "numbers.jsonl")
    rows = [json.loads(line) for line in (folder / "numbers.jsonl").read_text().splitlines()]
    targets = [float(line.split("\t")[1]) for line in lines.splitlines()[1:]]
    errors = [(r["prediction"] - y) ** 2 for r, y in zip(rows, targets, strict=True)]
    assert sum(errors) / len(errors) == pytest.approx(metrics["loss"], rel=1e-3)
    assert metrics["loss"] < 2, "the variance of the targets is 4"
    # transformers takes a head with one label for a regression, and need not say so in config.json.
    config = json.loads((output / "config.json").read_text())
    dropped = ("problem_type", "task_options")
    (output / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name not in dropped})
    )
    run("evaluate", output, data, "-o", folder / "again.json")
    again = json.loads((folder / "again.json").read_text())
    assert again == pytest.approx({name: metrics[name] for name in again}, rel=1e-4)


def test_several_labels_a_text(folder, pretrained):
    table = (folder / "dev.tsv").read_text().replace("\tpos", "\twarm,pos").replace("\tneg", "\t")
    data, output = folder / "several.tsv", folder / "several"
    data.write_text(table)
    text = run(
        *("finetune", pretrained, data, "--dev", data, "--multi-label", "-o", output),
        *("--lr", 5e-3, "--batch-size", 4, "--epochs", 10, "--eval-every", 50),
    )
    assert "micro_f1" in text and "macro_f1" in text
    config = json.loads((output / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    run("predict", output, data, "-o", folder / "several.jsonl")
    predicted = [json.loads(line) for line in (folder / "several.jsonl").read_text().splitlines()]
    truth = [line.split("\t")[1] for line in table.splitlines()[1:]]
    right = [
        ",".join(r["labels"]) == ",".join(reversed(y.split(",")))
        for r, y in zip(predicted, truth, strict=True)
    ]
    metrics = json.loads((output / "metrics.json").read_text())
    assert sum(right) / len(right) == pytest.approx(metrics["accuracy"]) and sum(right) > 16
    assert {tuple(row["labels"]) for row in predicted} >= {(), ("pos", "warm")}
    assert all((row["p(pos)"] >= 0.5) == ("pos" in row["labels"]) for row in predicted)


def test_a_run_is_resumed_with_its_own_settings_only(folder, pretrained, capsys):
    command = ("pretrain", folder / "text.txt", "-o", pretrained, *SMALL, "--block-size", 32)
    before = load_file(pretrained / "model.safetensors")
    assert "perplexity" in run(*command, "--max-steps", 6, "--resume")
    after = load_file(pretrained / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    for options, message in (
        (("--probability", 0.3), "written with probability=0.15, this run has 0.3"),
        (("--layers", 2), "written with layers=1, this run has 2"),
        (("--seed", 1), "written with seed=0, this run has 1"),
    ):
        assert message in failure(capsys, *command, "--max-steps", 6, "--resume", *options)


def test_pretraining_goes_on_from_a_checkpoint(folder, pretrained):
    output = folder / "adapted"
    command = (
        "pretrain",
        folder / "text.txt",
        "--from",
        pretrained,
        "-o",
        output,
        "--block-size",
        32,
    )
    run(*command, "--max-steps", 2, "--whole-word", "--replacement", "unigram", "--epochs", 1)
    assert (
        load_file(output / "model.safetensors").keys()
        == load_file(pretrained / "model.safetensors").keys()
    )


def test_embed_writes_the_encoders_vectors(folder):
    texts = ["first text", "a second text"]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n")
    run("embed", minilm_folder(), folder / "texts.txt", "-o", folder / "vectors.safetensors")
    vectors = load_file(folder / "vectors.safetensors")["embeddings"]
    torch.testing.assert_close(vectors, Encoder.from_pretrained(minilm_folder()).encode(texts))
    import numpy

    run(
        "embed",
        minilm_folder(),
        folder / "texts.txt",
        "-o",
        folder / "vectors.npy",
        "--pooling",
        "cls",
    )
    assert numpy.load(folder / "vectors.npy").shape == (2, 384)


def test_info_names_every_op_and_library():
    text = run("info")
    for word in ("masked_cross_entropy", "attention", "cpu float32", "transformers", "torch"):
        assert word in text


def test_info_measures_errors_against_float64(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    few = partial(info.numerics_report, cases=[case for case in CASES if "pool" in case.op])
    monkeypatch.setattr(info, "numerics_report", few)
    text = run("info", "--numerics")
    for words in ("Largest error against float64", "segment_pool", "segment_pool max", "kept"):
        assert words in text
    assert "broken" not in text


def test_a_broken_budget_is_an_error_after_everything_is_shown(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    first, *others = (case for case in CASES if case.op == "segment_pool")
    off = replace(first, ours=lambda **inputs: 1.1 * first.ours(**inputs))
    monkeypatch.setattr(
        info, "numerics_report", partial(info.numerics_report, cases=[off, *others])
    )
    with pytest.raises(SystemExit) as exit_:
        main(["info", "--numerics"])
    assert exit_.value.code == 1
    output = capsys.readouterr().out
    for words in ("exceeded: forward", "segment_pool max", "kept"):
        assert words in output


# Those of bench are in benchmarks/run.py.
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"bench"}))
def test_help_names_every_option_in_full_with_its_default(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = command_named(name)
    assert command.__doc__.startswith(COMMANDS[name][2])
    text = run(name, "--help")
    assert text.startswith(f"usage: fastenc {name}") and "<bool>" not in text
    words = " ".join(text.replace("-\n", "-").split())
    assert "Default: ." not in words, "an empty default is none"
    for option in options_of(command):
        shown = option.name.upper() if option.positional else f"--{option.key}"
        assert re.search(rf"^ +{re.escape(shown)}\b", text, re.M), shown
        switched_off = re.search(rf"--no-{option.key}(?![\w-])", text)
        assert bool(switched_off) == (option.type is bool), shown
        start = option.full_help.split("-")[0].split("/")[0]
        assert " ".join(start.split()) in words


def test_the_documents_have_the_options_of_the_help():
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    for name in COMMANDS.keys() - {"bench"}:
        section = page.split(f"## fastenc {name}\n")[1].split("\n## ")[0]
        for option in options_of(command_named(name)):
            shown = option.name.upper() if option.positional else f"--{option.key}"
            assert f"`{shown}`" in section and option.full_help.replace("|", "\\|") in section


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom fastenc.cli import main\nmain({arguments})\n"
        "assert not {{'torch', 'transformers', 'datasets'}} & sys.modules.keys()"
    )
    for arguments, shown in ((["--help"], "pretrain"), (["--version"], "fastenc 0.")):
        command = [sys.executable, "-c", code.format(arguments=arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and shown in done.stdout, done.stderr


def test_a_reader_that_leaves_ends_the_command(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as exit_:
            main(["--help"])
    assert exit_.value.code == 141 and not capsys.readouterr().err


def test_closed_streams_do_not_end_a_command(folder, finetuned, tmp_path, monkeypatch):
    """Python has None for a stream that the shell has closed by >&-."""
    command = ["predict", str(finetuned), str(folder / "dev.tsv"), "-o", str(tmp_path / "o.tsv")]
    for stream in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, stream, None)
    main(command)
    assert (tmp_path / "o.tsv").exists()
    with pytest.raises(SystemExit) as exit_:
        main([*command[:2], "-", "-o", "-"])
    assert "stdin must hold text" in str(exit_.value.__cause__)


def test_stdout_is_utf_8_in_every_locale(folder, finetuned, tmp_path, monkeypatch):
    text = "a héllo 中"
    (tmp_path / "new.txt").write_text(f"{text}\n", encoding="utf-8")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    main(["predict", str(finetuned), str(tmp_path / "new.txt"), "-o", "-"])
    assert json.loads(written.getvalue().decode("utf-8"))["sentence"] == text


@pytest.mark.parametrize(
    "task, option, text, value",
    [
        ("word-sense", "word-layers", "-4,-3,-2,-1", "-4,-3,-2,-1"),
        ("span-ner", "null-offset", "-1e-3", -1e-3),
        ("span-ner", "null-offset", "-.5", -0.5),
    ],
)
def test_values_may_begin_with_a_minus(task, option, text, value):
    command = ["model", "data", "-o", "run", "--task", task]
    spaced = Finetune.from_arguments("finetune", [*command, f"--{option}", text])
    joined = Finetune.from_arguments("finetune", [*command, f"--{option}={text}"])
    assert spaced == joined
    assert spaced.task_options[option.replace("-", "_")] == value


def test_unknown_commands_and_options_are_one_line(capsys):
    assert "is it predict?" in failure(capsys, "predikt")
    text = failure(capsys, "finetune", "a", "b", "--epoch", 3)
    assert "unrecognized arguments: --epoch 3 (is it --epochs?); fastenc finetune --help" in text
    text = failure(capsys, "finetune", "a", "b", "--xyzzy", 3)
    assert "unrecognized arguments: --xyzzy 3; fastenc finetune --help" in text
    assert "needs TRAIN and --output" in failure(capsys, "finetune", "a")
    text = failure(capsys, "finetune", "a", "b", "-o", "c", "--epochs", "many")
    assert "--epochs: invalid int value: 'many'" in text
    text = failure(capsys, "finetune", "a", "b", "-o", "c", "--max-steps", 0)
    assert "--max-steps must be at least 1, got 0" in text
    text = failure(capsys, "finetune", "a", "b", "-o", "c", "--task", "span-ner", "--crf")
    assert "--crf is an option of token-classification, not of span-ner" in text


@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_a_file_of_options_is_overridden_by_the_command_line(suffix, tmp_path, capsys):
    colon = " = " if suffix == ".toml" else ": "
    path = tmp_path / f"options{suffix}"
    write = lambda **values: path.write_text(
        "".join(f"{k.replace('_', '-')}{colon}{json.dumps(v)}\n" for k, v in values.items())
    )
    write(train="train.tsv", output="runs/a", lr_of="x")
    assert "there is no option lr-of" in failure(capsys, "finetune", "m", "--config", path)
    write(
        **dict(model="m", train="train.tsv", output="runs/a", lr=3e-3),
        **dict(text=["one", "two"], epochs=7, crf=True),
    )
    given = ["--config", str(path), "--epochs", "2", "--betas", "0.8", "0.9", "--no-crf"]
    command = parse("finetune", command_named("finetune"), given)
    assert (command.model, command.train) == ("m", "train.tsv")
    assert command.training == TrainConfig("runs/a", learning_rate=3e-3, epochs=2, betas=(0.8, 0.9))
    assert command.task_options == {"text": ("one", "two"), "crf": False}
    for values, message in (
        (dict(epochs="many"), "epochs takes a whole number, got 'many'"),
        (dict(betas=[0.9]), "betas takes a list of 2 values, got [0.9]"),
        (dict(text="one"), "text takes a list of values, got 'one'"),
        (dict(crf=1), "crf takes true or false, got 1"),
        (dict(resume=True), "there is no option resume"),
        (dict(lr=1e-3, learning_rate=1e-4), "learning-rate and lr are one option: give it once"),
    ):
        write(model="m", train="t", output="o", **values)
        assert message in failure(capsys, "finetune", "--config", path)
    path.write_text("[[" if suffix == ".toml" else "a: [")
    assert f"is not {suffix[1:].upper()}" in failure(capsys, "finetune", "--config", path)


def test_errors_are_one_line(folder, pretrained, finetuned, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    text = failure(
        capsys, "predict", folder / "nowhere", folder / "dev.tsv", "-o", folder / "x.tsv"
    )
    assert "is not a folder here" in text
    text = failure(capsys, "predict", finetuned, folder / "dev.tsv", "-o", folder / "x.csv")
    assert "--output must end in .tsv or .jsonl" in text
    text = failure(
        capsys, "finetune", pretrained, folder / "train.tsv", "-t", "text", "-o", folder / "x"
    )
    assert "train.tsv, line 2: there must be a column 'text'" in text
    train, dev = folder / "train.tsv", folder / "dev.tsv"
    text = failure(capsys, "finetune", pretrained, train, "-o", finetuned)
    assert "holds a run" in text
    for metric, option in (("bleu", ("--dev", dev)), ("f1", ()), ("pearson", ("--dev", dev))):
        text = failure(
            capsys, "finetune", pretrained, train, *option, "--metric", metric, "-o", folder / "x"
        )
        assert f"--metric needs --dev and one of accuracy, f1, mcc, loss, got {metric}" in text
        assert ("without data to evaluate on" in text) == (not option)
    text = failure(capsys, "finetune", pretrained, train, "--lr", 1e30, "-o", folder / "diverged")
    assert "at step 3: lower learning_rate" in text
    text = failure(
        capsys, "finetune", pretrained, train, "--regression", "--multi-label", "-o", folder / "x"
    )
    assert "--multi-label excludes regression" in text
    text = failure(capsys, "finetune", pretrained, train, "--task", "ner", "-o", folder / "x")
    assert "--task must be one of rerank, sequence-classification" in text
    text = failure(capsys, "predict", pretrained, dev, "-o", folder / "x.tsv")
    assert "must have the head of a task, got BertForMaskedLM: fine-tune it first" in text
    (folder / "other.tsv").write_text(dev.read_text().replace("pos", "good"))
    text = failure(capsys, "finetune", finetuned, folder / "other.tsv", "-o", folder / "x")
    assert (
        "head has the labels ['neg', 'pos'], the data has ['good', 'neg'] (look at 'good')" in text
    )
    text = failure(capsys, "predict", finetuned, folder / "none.txt", "-o", folder / "x.tsv")
    assert "none.txt" in text and not (folder / "x.tsv").exists()
    text = failure(
        capsys,
        "pretrain",
        folder / "text.txt",
        "--block-size",
        900,
        "--from",
        pretrained,
        "-o",
        folder / "x",
    )
    assert "--block-size must be at most 512, the model's number of positions" in text


def test_info_needs_torch_alone_and_another_command_names_its_extra(tmp_path):
    code = (
        "import sys\n"
        "for name in ('accelerate', 'datasets', 'huggingface_hub', 'numpy', 'rich', 'safetensors', 'sklearn',\n"
        "    'tokenizers', 'tqdm', 'transformers', 'triton', 'yaml'):\n"
        "    assert name not in sys.modules, name\n"
        "    sys.modules[name] = None\n"
        "from fastenc.cli import main\n"
        "main(['info'])\nmain(['tokenizer', 'text.txt', '-o', 'vocabulary'])"
    )
    (tmp_path / "text.txt").write_text("A text.")
    # Not by the server, which has imported such libraries.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert re.search(r"^  attention +cpu float32", done.stdout, re.MULTILINE), done.stderr
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "pip install 'fastenc[models]'" in done.stderr


@pytest.mark.parametrize("way", ["lora", "adapters", "prefix", "prompt"])
def test_adapted_model_is_saved_alone_and_predicts(folder, pretrained, way):
    output = folder / way
    text = run(
        *("finetune", pretrained, folder / "train.tsv", "--dev", folder / "dev.tsv"),
        *("-o", output, "--epochs", 1, "--adapt", way, "--adapt-size", 2),
    )
    assert "training " in text and " parameters" in text
    assert (output / "adapter_model.safetensors").is_file()
    assert not (output / "model.safetensors").exists()
    run("predict", output, folder / "dev.tsv", "-o", output / "labels.tsv")
    assert len((output / "labels.tsv").read_text().splitlines()) == 21


def test_lora_is_added_to_the_layers_that_are_named(folder, pretrained):
    output = folder / "lora of two"
    targets = ("--lora-target", "key", "--lora-target", "down")
    run(
        *("finetune", pretrained, folder / "train.tsv", "-o", output, "--epochs", 1),
        *("--adapt", "lora", *targets),
    )
    held = load_file(output / "adapter_model.safetensors")
    layers = {name.split(".lora_")[0].split("layer.0.")[1] for name in held if ".lora_" in name}
    assert layers == {"attention.self.key", "output.dense"}


def test_lower_layers_can_be_frozen(folder, pretrained):
    output = folder / "frozen"
    run(
        *("finetune", pretrained, folder / "train.tsv", "-o", output, "--epochs", 1),
        *("--freeze-layers", 1, "--layer-decay", 0.9),
    )
    before, after = (load_file(path / "model.safetensors") for path in (pretrained, output))
    for name, value in after.items():
        if "embeddings" in name or "encoder.layer.0" in name:
            assert torch.equal(value, before[name]), name


def test_ways_that_exclude_each_other_are_errors(folder, pretrained, capsys):
    train = ("finetune", pretrained, folder / "train.tsv", "-o", folder / "never")
    for options, message in (
        (("--adapt", "ia3"), "must be one of lora, adapters, prefix, prompt, features, got ia3"),
        (("--adapt-size", 3), "--adapt-size needs --adapt"),
        (("--adapt", "lora", "--freeze-layers", 1), "leave out --freeze-layers"),
        (("--adapt", "lora", "--adapt-size", 0), "--adapt-size must be at least 1, got 0"),
        (("--adapt", "lora", "--lora-target", "keys"), "--lora-target must be of query, key,"),
        (("--adapt", "prefix", "--lora-target", "key"), "--lora-target needs --adapt lora"),
        (
            ("--freeze-layers", 9),
            "from 0 to 1 layers can be frozen, because the model has 1, got 9",
        ),
    ):
        assert message in failure(capsys, *train, *options)
    assert not (folder / "never").exists()


@pytest.fixture(scope="module")
def reviews(folder):
    """Texts of up to six chunks of 12 tokens; the words that decide the label are in one place."""
    draw = torch.Generator().manual_seed(1)
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=draw))
    rows = []
    for index in range(80):
        filler = ["the", "film", "book", "song"]
        words = [filler[number(0, 4)] for _ in range(number(5, 50))]
        told = [WORDS[index % 2][number(0, 4)] for _ in range(6)]
        at = number(0, len(words))
        words[at:at] = told
        rows.append(f"{' '.join(words)}\t{'neg' if index % 2 else 'pos'}\n")
    (folder / "reviews.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    return folder / "reviews.tsv"


@pytest.mark.parametrize(
    "options",
    [
        ("--chunks", "mean", "--stride", 2),
        ("--chunks", "max", "--stride", 2, "--adapt", "lora"),
        ("--chunks", "attention", "--stride", 2, "--freeze-layers", 1),
        ("--chunks", "transformer", "--stride", 2, "--max-chunks", 4, "--truncation", "tail"),
        ("--truncation", "head+tail"),
    ],
    ids=lambda options: options[1],
)
def test_long_documents_from_files_to_files(options, finetuned, reviews, tmp_path):
    # A checkpoint with a pooler, which an adaptation does not save.
    text = run(
        *("finetune", finetuned, reviews, "--dev", reviews, "-o", tmp_path / "model"),
        *("--max-length", 12, *options, "--lr", 5e-3, "--epochs", 4, "--batch-tokens", 400),
    )
    metrics = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert "accuracy" in text and 0 <= metrics["accuracy"] <= 1
    stored = json.loads((tmp_path / "model" / "config.json").read_text())["long_texts"]
    given = {
        k.strip("-").replace("-", "_"): v for k, v in zip(options[::2], options[1::2], strict=True)
    }
    of_texts = {name: given[name] for name in given if name not in ("adapt", "freeze_layers")}
    assert of_texts.items() <= stored.items()
    assert stored["max_length"] == 12
    # Prediction reads texts as training did, so it gives the same metrics.
    output = tmp_path / "labels.jsonl"
    run("predict", tmp_path / "model", reviews, "-o", output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    truth = [line.split("\t")[1] for line in reviews.read_text().splitlines()[1:]]
    pairs = list(zip(rows, truth, strict=True))
    assert sum(row["label"] == y for row, y in pairs) / 80 == pytest.approx(metrics["accuracy"])
    loss = -sum(math.log(row[f"p({y})"]) for row, y in pairs) / 80
    assert loss == pytest.approx(metrics["loss"], rel=1e-3)
    # With other lengths the model reads other texts.
    run("predict", tmp_path / "model", reviews, "-o", tmp_path / "short.jsonl", "--max-length", 5)
    short = [json.loads(line) for line in (tmp_path / "short.jsonl").read_text().splitlines()]
    assert short != rows


def test_long_document_errors(folder, pretrained, reviews, tmp_path, capsys):
    train = ("finetune", pretrained, reviews, "-o", tmp_path / "never", "--max-length", 12)
    for options, message in (
        (("--chunks", "sum"), "chunks must be one of mean, max, attention, transformer, got 'sum'"),
        (("--truncation", "none"), "truncation must be one of head, tail, head+tail, got 'none'"),
        (("--chunks", "mean", "--stride", 10), "stride must be less than the 10 tokens"),
        (("--stride", 4), "stride is an option of chunks, got 4 without chunks"),
        (("--batch-tokens", 0), "--batch-tokens must be at least 1, got 0"),
    ):
        assert message in failure(capsys, *train, *options)
    (tmp_path / "empty.tsv").write_text("sentence\tlabel\na film\tpos\n \tneg\n")
    text = failure(
        capsys, *train[:2], tmp_path / "empty.tsv", *train[3:], "--chunks", "mean", "--stride", 2
    )
    assert "empty.tsv, line 3 has no tokens, got ' ': leave out the row" in text
    assert not (tmp_path / "never").exists()
    run(
        *train[:4],
        tmp_path / "model",
        *train[5:],
        *("--chunks", "transformer", "--stride", 2),
        "--max-chunks",
        3,
    )
    text = failure(
        capsys, "predict", tmp_path / "model", reviews, "-o", tmp_path / "x.tsv", "--max-chunks", 9
    )
    assert "a text must have at most 3 chunks" in text and "text " in text


def test_info_says_how_each_layer_of_a_model_runs(tmp_path):
    model("bert").save_pretrained(tmp_path / "bert")
    encoder = Encoder.from_pretrained(tmp_path / "bert")
    ways = info.ways_of_layers(encoder)
    assert set(ways) == {"inference", "training"}
    (inference,), (training,) = (rows.values() for rows in ways.values())
    assert "not fused sublayers: gradients are off" in inference
    assert training.split(";")[0] in ("fused sublayers", "single ops")
    assert list(ways["inference"]) == ["0 to 1"]
    ((numbers, line),) = info.layers_in_8_bits(encoder).items()
    assert numbers == "0 to 1"
    assert line == "in 8 bits" or "int8 needs AVX2" in line
