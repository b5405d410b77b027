"""The card of a saved model, and the device of a run."""

import json

import pytest
import yaml

from fastenc.train.processes import process_state
from tests.helpers.commands import failure, run
from tests.helpers.training_run import build, documents, small_model, word_tokenizer


def test_a_saved_model_has_a_card(tmp_path):
    small_model("mlm", word_tokenizer()).save_pretrained(tmp_path / "base")
    data = tmp_path / "d.tsv"
    data.write_text("sentence\tlabel\nthe cat\tpos\na dog\tneg\n")
    run(
        "finetune", tmp_path / "base", data, "--dev", data, "-o", tmp_path / "run", "--max-steps", 2
    )
    card = (tmp_path / "run" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "fastenc",
        "pipeline_tag": "text-classification",
    }
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    for words in (
        "SequenceClassifier of the family bert",
        "2 layers, 32 wide",
        "label: pos 1, neg 1",
        f"| accuracy | {metrics['accuracy']:.4f} |",
        f"| f1 of pos | {metrics['f1']:.4f} |",
        "| max_steps | 2 |",
        f'fastenc.predictor("{tmp_path / "run"}")',
    ):
        assert words in body, words
    assert "epochs" not in body  # which max_steps replaces


def test_the_code_of_a_pretrained_models_card_runs(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(documents(40)))
    sizes = ("--layers", 1, "--hidden", 32, "--vocab-size", 60, "--block-size", 32)
    run("pretrain", tmp_path / "text.txt", "-o", tmp_path / "run", *sizes, "--max-steps", 1)
    card = (tmp_path / "run" / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card and "pretrained by mlm" in card
    code = card.split("```python\n")[1].split("```")[0]
    found: dict = {}
    exec(code, found)
    assert found["vectors"].shape == (2, 32)


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
