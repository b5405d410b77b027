"""--dtype int8 of the commands that compute with a model."""

import json

import numpy
import pytest

from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import SequenceClassifier
from fastenc.ops import int8_products
from tests.helpers.commands import failure, run

pytestmark = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
TEXTS = ("A river bank was muddy.", "The bank lends money.", "A dull film.", "A very fine film!")
INT8 = ("--dtype", "int8")


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    return tmp_path / "texts.txt"


def test_embed(texts, tmp_path, capsys):
    paths = [tmp_path / "float32.npy", tmp_path / "int8.npy"]
    run("embed", minilm_folder(), texts, "-o", paths[0])
    run("embed", minilm_folder(), texts, "-o", paths[1], *INT8)
    exact, quantized = map(numpy.load, paths)
    assert not numpy.array_equal(exact, quantized)
    assert (exact * quantized).sum(1).min() > 0.99
    run("embed", minilm_folder(), texts, "-o", tmp_path / "words.npy", "--words", *INT8)
    text = failure(capsys, "embed", "model", texts, "-o", paths[0], "--dtype", "int4")
    assert "--dtype must be float32 or int8, got 'int4'" in text
    text = failure(capsys, "embed", "model", texts, "-o", paths[0], *INT8, "--device", "cuda")
    assert "--dtype int8 runs on a CPU" in text


def test_predict_and_evaluate(texts, tmp_path):
    model = SequenceClassifier.from_pretrained(minilm_folder(), label_names=("neg", "pos"))
    model.save_pretrained(tmp_path / "model")
    for name, dtype in (("float32", ()), ("int8", INT8)):
        run("predict", tmp_path / "model", texts, "-o", tmp_path / f"{name}.jsonl", *dtype)
    labelled = "".join(f"{text}\tpos\n" for text in TEXTS)
    (tmp_path / "test.tsv").write_text(f"sentence\tlabel\n{labelled}")
    run("evaluate", tmp_path / "model", tmp_path / "test.tsv", "-o", tmp_path / "m.json", *INT8)
    assert "accuracy" in json.loads((tmp_path / "m.json").read_text())
    exact, quantized = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("float32", "int8")
    )
    assert exact != quantized and len(quantized) == len(TEXTS)
    for a, b in zip(exact, quantized, strict=True):
        assert a["p(pos)"] == pytest.approx(b["p(pos)"], abs=0.02)


def test_neighbours(texts):
    output = run("neighbours", minilm_folder(), texts, "--word", "bank", "--count", 2, *INT8)
    assert output.count("in the sentence") == 2
