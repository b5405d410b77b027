"""The card of a saved model, and the device of a run."""

import json
import re
from importlib.metadata import version

import pytest
from huggingface_hub import ModelCard

from fastenc.train.model_card import Origin, hub_name, model_card
from fastenc.train.processes import process_state
from tests.helpers.commands import failure, run
from tests.helpers.training_run import (
    build,
    documents,
    small_model,
    tokenizer_of,
    word_tokenizer,
)


def test_a_saved_model_has_a_card(tmp_path):
    small_model("mlm", word_tokenizer()).save_pretrained(tmp_path / "base")
    data = tmp_path / "d.tsv"
    data.write_text("sentence\tlabel\nthe cat\tpos\na dog\tneg\n")
    run(
        "finetune", tmp_path / "base", data, "--dev", data, "-o", tmp_path / "run", "--max-steps", 2
    )
    card = ModelCard.load(tmp_path / "run" / "README.md")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert card.data.library_name == "fastenc"
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.base_model is None, "a folder is no name on the hub"
    results = {result.metric_type: result for result in card.data.eval_results}
    # Hugging Face's name of the coefficient.
    assert set(results) == {*metrics, "matthews_correlation"} - {"step", "mcc"}
    accuracy = results["accuracy"]
    assert accuracy.metric_value == metrics["accuracy"] and accuracy.dataset_name == "d.tsv"
    assert (
        accuracy.dataset_args == {"num_examples": 2} and accuracy.task_type == "text-classification"
    )
    assert results["f1"].metric_name == "f1 of pos"
    command = f"fastenc finetune {tmp_path / 'base'} {data} --dev {data} -o {tmp_path / 'run'}"
    for words in (
        "A bert encoder, fine-tuned for sequence-classification: 2 layers, 32 wide",
        f"Base model: `{tmp_path / 'base'}`.",
        f"- training: `{data}`",
        f"- held out: `{data}`",
        "label: pos 1, neg 1",
        f"On `{data}`, n = 2:",
        f"| accuracy | {metrics['accuracy']:.4f} |",
        f"| f1 of pos | {metrics['f1']:.4f} |",
        "| max-steps | 2 |",
        f"| command | `{command} --max-steps 2` |",
        f"fastenc {version('fastenc')}",
        f"torch {version('torch')}",
        f'fastenc.predictor("{tmp_path / "run"}")',
    ):
        assert words in card.text, words
    assert re.search(r"\| date \| \d{4}-\d\d-\d\d \|", card.text)
    assert "epochs" not in card.text  # max_steps replaces it
    shown = re.findall(r"(?m)^\| ([^|]*) \|", card.text)
    options = re.findall(r"--[\w-]+", run("finetune", "--help"))
    unknown = [name for name in shown if f"--{name}" not in options]
    first = ["metric", *(results[each].metric_name for each in results), "setting"]
    assert set(unknown) <= {*first, "date", "command", "versions"}


def test_a_base_model_of_the_hub_is_named_by_its_name(tmp_path):
    cached = "/home/x/.cache/hub/models--org--some-model/snapshots/0123abc"
    assert hub_name(cached) == "org/some-model"
    assert hub_name("org/some-model") == "org/some-model"
    assert hub_name(None) is None and hub_name(str(tmp_path)) is None
    model = small_model("mlm", word_tokenizer())
    text = model_card(tmp_path, model, {}, [], {"loss": float("nan")}, origin=Origin(cached))
    card = ModelCard(text)
    assert card.data.base_model == "org/some-model" and "Base model: `org/some-model`." in text
    assert card.data.eval_results is None, "the hub refuses what is no number"


def test_tasks_and_metrics_have_the_hubs_names(tmp_path):
    """Of https://huggingface.co/tasks and https://huggingface.co/metrics."""
    model, metrics = small_model("mlm", word_tokenizer()), {"pearson": 0.5, "spearman": 0.4}
    card = ModelCard(model_card(tmp_path, model, {"task": "sentence-embedding"}, [], metrics))
    assert card.data.pipeline_tag == "sentence-similarity"
    types = [result.metric_type for result in card.data.eval_results]
    assert types == ["pearsonr", "spearmanr"]
    for task, tag in (
        ("sequence-classification", "text-classification"),
        ("token-classification", "token-classification"),
        ("span-ner", "token-classification"),
        ("question-answering", "question-answering"),
        ("seq2seq", "text2text-generation"),
        ("word-sense", None),
    ):
        card = ModelCard(model_card(tmp_path, model, {"task": task}, [], {}))
        assert card.data.pipeline_tag == tag


def test_the_code_of_a_pretrained_models_card_runs(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(documents(40)))
    sizes = ("--layers", 1, "--hidden", 32, "--vocab-size", 60, "--block-size", 32)
    run("pretrain", tmp_path / "text.txt", "-o", tmp_path / "run", *sizes, "--max-steps", 1)
    card = (tmp_path / "run" / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card and "pretrained by mlm" in card
    assert "Base model: none, the first weights are random." in card
    assert f"- training: `{tmp_path / 'text.txt'}`" in card
    held_out = re.search(r"([\d,]+) sequences held out", card)[1]
    assert f"On held-out data, n = {held_out}:" in card
    code = card.split("```python\n")[1].split("```")[0]
    namespace: dict = {}
    exec(code, namespace)
    assert namespace["vectors"].shape == (2, 32)


@pytest.mark.parametrize("objective", ["mlm", "mlm+nsp", "span", "electra"])
def test_a_pretrained_model_that_transformers_loads_with_a_masked_lm_fills_masks(
    objective, tmp_path
):
    import transformers

    model = small_model(objective, tokenizer_of(objective))
    model.save_pretrained(tmp_path)
    settings = {"objective": objective}
    card = ModelCard(model_card(tmp_path, model, settings, [], {"loss": 1.0}))
    _, found = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    fills = not found["missing_keys"]
    assert fills == (objective != "electra")
    assert card.data.pipeline_tag == ("fill-mask" if fills else None)
    assert card.data.eval_results[0].task_type == ("fill-mask" if fills else objective)


def test_the_device_of_a_run(tmp_path, capsys):
    assert build(tmp_path / "a", device="cpu").accelerator.device.type == "cpu"
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'tpu'"):
        build(tmp_path / "b", device="tpu")
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a GPU that torch sees"):
            process_state("cuda")
        text = failure(capsys, "finetune", "m", "t", "-o", tmp_path / "x", "--device", "cuda")
        assert "device cuda needs a GPU that torch sees, got none" in text
