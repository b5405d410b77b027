"""--dtype int8 of the commands that compute with a model: the numbers of the same model in Python."""

import json
import re

import numpy
import pytest

import fastenc
from fastenc.adapt import Lora, add_adaptation, merge_adaptation
from fastenc.analysis.neighbours import (
    compare_neighbours,
    find_occurrences,
    isolated_vectors,
    listed,
)
from fastenc.cli.info import layers_in_8_bits
from fastenc.data import train_tokenizer
from fastenc.data.columns import read_words
from fastenc.data.samples import write_samples
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder, SparseEncoder
from fastenc.ops import int8_products
from tests.helpers.checkpoints import save
from tests.helpers.commands import failure, run
from tests.helpers.families import model, whole
from tests.helpers.hub_models import MODELS
from tests.helpers.training_run import small_model

pytestmark = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
TEXTS = ("A river bank was muddy.", "The bank lends money.", "A dull film.", "A very fine film!")
INT8 = ("--dtype", "int8")


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    return tmp_path / "texts.txt"


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_embed_writes_vectors_of_texts(texts, tmp_path):
    paths = [tmp_path / "float32.npy", tmp_path / "int8.npy"]
    run("embed", minilm_folder(), texts, "-o", paths[0])
    run("embed", minilm_folder(), texts, "-o", paths[1], *INT8)
    exact, quantized = map(numpy.load, paths)
    assert not numpy.array_equal(exact, quantized)
    assert (exact * quantized).sum(1).min() > 0.99
    encoder = Encoder.from_pretrained(minilm_folder(), dtype="int8")
    assert numpy.array_equal(quantized, encoder.encode(TEXTS, convert_to_numpy=True))


def test_embed_writes_vectors_of_words(texts, tmp_path):
    run("embed", minilm_folder(), texts, "-o", tmp_path / "words.npy", "--words", *INT8)
    sentences = [each.words for each in read_words(texts).sentences]
    exact, quantized = (
        Encoder.from_pretrained(minilm_folder(), dtype=dtype).embed_words(sentences)
        for dtype in ("float32", "int8")
    )
    written = numpy.load(tmp_path / "words.npy")
    assert numpy.array_equal(written, quantized.vectors.numpy())
    assert not numpy.array_equal(written, exact.vectors.numpy())


def test_embed_writes_sparse_weights(texts, tmp_path):
    folder, out = tmp_path / "splade", tmp_path / "weights.jsonl"
    MODELS["naver/splade-v3"](folder)
    run("embed", folder, texts, "-o", out, "--sparse", *INT8)
    exact, quantized = (
        SparseEncoder.from_pretrained(folder, dtype=dtype) for dtype in ("float32", "int8")
    )
    assert json_lines(out) == quantized.encode_sparse(TEXTS) != exact.encode_sparse(TEXTS)
    dense = [m.encode_sparse(TEXTS, convert_to_tensor=True).to_dense() for m in (exact, quantized)]
    assert (dense[0] - dense[1]).norm() < 0.02 * dense[0].norm()


def test_neighbours(texts):
    output = run("neighbours", minilm_folder(), texts, "--word", "bank", "--count", 2, *INT8)
    encoder = Encoder.from_pretrained(minilm_folder(), dtype="int8")
    sentences = [each.words for each in read_words(texts).sentences]
    static = isolated_vectors(encoder, sentences, (-1,))
    uses = compare_neighbours(
        encoder, find_occurrences(sentences, "bank", 10), sentences, static, 2, (-1,)
    )
    assert len(uses) == 2
    for contextual, alone in map(listed, uses):
        assert f"in the sentence: {contextual}\n  static: {alone}\n" in output


# A task's options in the training, and its files of training and of test.
TASKS = {
    "sequence-classification": ((), "train.tsv", "test.tsv"),
    "chunks": (
        ("--chunks", "transformer", "--max-length", 8, "--stride", 2),
        "train.tsv",
        "test.tsv",
    ),
    "token-classification": ((), "train.conll", "dev.conll"),
    "a CRF": (("--crf",), "train.conll", "dev.conll"),
    "span-ner": ((), "train.conll", "dev.conll"),
    "question-answering": (("--stride", 8), "questions.jsonl", "questions.jsonl"),
    "sentence-embedding": (("--similarity", "score"), "stsb.tsv", "stsb.tsv"),
    "sparse-embedding": ((), "pairs.tsv", "pairs.tsv"),
    "rerank": ((), "ranking.jsonl", "ranking.jsonl"),
    "word-sense": ((), "senses.tsv", "senses.tsv"),
}
NAMED = {"chunks": "sequence-classification", "a CRF": "token-classification"}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """A folder with each task's files, and an encoder that knows their words in "base"."""
    folder = tmp_path_factory.mktemp("samples")
    write_samples(folder)
    lines = (folder / "texts.txt").read_text().splitlines()
    questions = [
        {"id": str(number), "question": "Who?", "context": line}
        | {"answers": {"text": [line.split()[0]], "answer_start": [0]}}
        for number, line in enumerate(lines[:6])
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    small_model("mlm", train_tokenizer(lines, vocab_size=200)).save_pretrained(folder / "base")
    return folder


@pytest.mark.parametrize("name", TASKS)
def test_predict_and_evaluate(name, samples, tmp_path):
    options, train, test = TASKS[name]
    folder, inputs = tmp_path / "model", samples / test
    run(
        *("finetune", samples / "base", samples / train, "-o", folder, "--max-steps", 1),
        *("--task", NAMED.get(name, name), *options),
    )
    found = {}
    for dtype in ("float32", "int8"):
        lines, metrics = tmp_path / f"{dtype}.jsonl", tmp_path / f"{dtype}.json"
        run("predict", folder, inputs, "-o", lines, "--dtype", dtype)
        run("evaluate", folder, inputs, "-o", metrics, "--dtype", dtype)
        found[dtype] = json_lines(lines), json.loads(metrics.read_text())
    assert found["int8"] != found["float32"]

    predictor = fastenc.predictor(folder)
    task, ours = predictor.task, fastenc.freeze(predictor.model, dtype="int8")
    data, labelled = task.read_inputs(inputs), task.read(inputs, ours)
    predicted = task.lines(ours, data, task.predict(ours, data), ".jsonl")
    metrics = task.evaluate(ours, labelled, task.encode(labelled, ours))
    assert found["int8"] == ([*map(json.loads, predicted)], metrics)


# A family, other values of its configuration, and why its layers do not run in 8 bits.
LAYERS = {
    "bert": ({}, None),
    "albert": ({}, None),  # layers that share weights
    "roberta": (
        {"intermediate_size": 40},
        "widths must be multiples of 16, they are 32 (hidden), 40 (inner) and 16 (a head)",
    ),
    "distilbert": ({"dim": 272, "n_heads": 1}, "head_dim must be at most 256, it is 272"),
    "deberta-v2": (
        {"hidden_size": 144, "num_attention_heads": 1},
        "head_dim must be at most 128, it is 144",
    ),
    "big_bird-sparse": (
        {"hidden_size": 144, "num_attention_heads": 1},
        "head_dim must be at most 128, it is 144",
    ),
}


def rows_of_info(folder):
    """The lines under the last title."""
    return (
        run("info", "--model", folder)
        .split("Layers with --dtype int8\n")[1]
        .strip("\n")
        .splitlines()
    )


@pytest.mark.parametrize("family", LAYERS)
def test_info_says_which_layers_can_run_in_8_bits(family, tmp_path):
    values, reason = LAYERS[family]
    folder = save(model(family, **values), tmp_path)
    encoder = Encoder.from_pretrained(folder)
    last = encoder.config.num_layers - 1
    assert rows_of_info(folder) == [f"  0 to {last}  {f'not: {reason}' if reason else 'in 8 bits'}"]
    if reason is None:
        fastenc.freeze(encoder, dtype="int8")
    else:
        with pytest.raises(ValueError, match=re.escape(f"cannot run in int8: {reason}: leave out")):
            fastenc.freeze(encoder, dtype="int8")


def test_info_names_layers_with_lora(tmp_path):
    encoder = Encoder.from_pretrained(save(model("bert"), tmp_path / "base"))
    add_adaptation(encoder, Lora(rank=2))
    encoder.save_pretrained(tmp_path / "lora")
    reason = "not: it has LoRA or another adaptation, which must be merged into its weights first"
    assert rows_of_info(tmp_path / "lora") == [f"  0 to 1  {reason}"]
    encoder.layers[0].adaptation = None
    assert layers_in_8_bits(encoder) == {"0": "in 8 bits", "1": reason}
    merged = Encoder.from_pretrained(tmp_path / "lora")
    merge_adaptation(merged)
    assert layers_in_8_bits(merged) == {"0 to 1": "in 8 bits"}


def test_what_the_commands_refuse(texts, tmp_path, capsys):
    out = ("-o", tmp_path / "out.npy")
    text = failure(capsys, "embed", "model", texts, *out, "--dtype", "int4")
    assert "--dtype must be float32 or int8, got 'int4': give one of them" in text
    text = failure(capsys, "embed", "model", texts, *out, *INT8, "--device", "cuda")
    assert "--dtype int8 runs on a CPU, got --device cuda: leave out one of them" in text
    folder = save(whole("bart"), tmp_path / "bart")
    text = failure(capsys, "predict", folder, texts, "-o", tmp_path / "out.tsv", *INT8)
    assert "int8 is for models with one encoder, got Seq2Seq: leave out dtype" in text
    assert not [*tmp_path.glob("out.*")]
