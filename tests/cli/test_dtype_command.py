"""--dtype bfloat16 and int8 of the commands that compute with a model: the numbers of the same model in Python."""

import json
import re

import numpy
import pytest
import torch

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
from tests.helpers.families import model
from tests.helpers.hub_models import MODELS
from tests.helpers.training_run import small_model

needs_int8 = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
TEXTS = ("A river bank was muddy.", "The bank lends money.", "A dull film.", "A very fine film!")
INT8 = ("--dtype", "int8")
DTYPES = {"bfloat16": torch.bfloat16, "int8": "int8"}
EVERY_DTYPE = pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("int8", marks=needs_int8)])


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    return tmp_path / "texts.txt"


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@EVERY_DTYPE
def test_embed_writes_vectors_of_texts(dtype, texts, tmp_path):
    paths = [tmp_path / "float32.npy", tmp_path / "reduced.npy"]
    run("embed", minilm_folder(), texts, "-o", paths[0])
    run("embed", minilm_folder(), texts, "-o", paths[1], "--dtype", dtype)
    exact, reduced = map(numpy.load, paths)
    assert reduced.dtype == numpy.float32 and not numpy.array_equal(exact, reduced)
    assert (exact * reduced).sum(1).min() > 0.99
    encoder = Encoder.from_pretrained(minilm_folder(), dtype=DTYPES[dtype])
    assert numpy.array_equal(reduced, encoder.encode(TEXTS, convert_to_numpy=True))


@EVERY_DTYPE
def test_embed_writes_vectors_of_words(dtype, texts, tmp_path):
    run("embed", minilm_folder(), texts, "-o", tmp_path / "words.npy", "--words", "--dtype", dtype)
    sentences = [each.words for each in read_words(texts).sentences]
    exact, reduced = (
        Encoder.from_pretrained(minilm_folder(), dtype=each).embed_words(sentences)
        for each in (torch.float32, DTYPES[dtype])
    )
    written = numpy.load(tmp_path / "words.npy")
    assert numpy.array_equal(written, reduced.vectors.float().numpy())
    assert not numpy.array_equal(written, exact.vectors.numpy())


@EVERY_DTYPE
def test_embed_writes_sparse_weights(dtype, texts, tmp_path):
    folder, out = tmp_path / "splade", tmp_path / "weights.jsonl"
    MODELS["naver/splade-v3"](folder)
    (tmp_path / "options.toml").write_text(f'dtype = "{dtype}"')
    run("embed", folder, texts, "-o", out, "--sparse", "--config", tmp_path / "options.toml")
    exact, reduced = (
        SparseEncoder.from_pretrained(folder, dtype=each) for each in (torch.float32, DTYPES[dtype])
    )
    assert json_lines(out) == reduced.encode_sparse(TEXTS) != exact.encode_sparse(TEXTS)
    dense = [m.encode_sparse(TEXTS, convert_to_tensor=True).to_dense() for m in (exact, reduced)]
    assert (dense[0] - dense[1]).norm() < 0.02 * dense[0].norm()


@EVERY_DTYPE
def test_neighbours(dtype, texts):
    options = ("--word", "bank", "--count", 2, "--dtype", dtype)
    output = run("neighbours", minilm_folder(), texts, *options)
    encoder = Encoder.from_pretrained(minilm_folder(), dtype=DTYPES[dtype])
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
    small_model("mlm", train_tokenizer(lines, vocab_size=200)).save_pretrained(folder / "base")
    return folder


@EVERY_DTYPE
@pytest.mark.parametrize("name", TASKS)
def test_predict_and_evaluate(name, dtype, samples, tmp_path):
    options, train, test = TASKS[name]
    folder, inputs = tmp_path / "model", samples / test
    steps = () if name == "word-sense" else ("--max-steps", 1)
    run(
        *("finetune", samples / "base", samples / train, "-o", folder, *steps),
        *("--task", NAMED.get(name, name), *options),
    )
    found = {}
    for each in ("float32", dtype):
        lines, metrics = tmp_path / f"{each}.jsonl", tmp_path / f"{each}.json"
        run("predict", folder, inputs, "-o", lines, "--dtype", each)
        run("evaluate", folder, inputs, "-o", metrics, "--dtype", each)
        found[each] = json_lines(lines), json.loads(metrics.read_text())
    assert found[dtype] != found["float32"]

    predictor = fastenc.predictor(folder)
    task, ours = predictor.task, predictor.model
    ours = fastenc.freeze(ours, dtype="int8") if dtype == "int8" else ours.to(DTYPES[dtype])
    data, labelled = task.read_inputs(inputs), task.read(inputs, ours)
    predicted = task.lines(ours, data, task.predict(ours, data), ".jsonl")
    metrics = task.evaluate(ours, labelled, task.encode(labelled, ours))
    assert found[dtype] == ([*map(json.loads, predicted)], metrics)


# A family, other values of its configuration, and why its layers do not run in 8 bits.
LAYERS = {
    "bert": ({}, None),
    "albert": ({}, None),  # layers that share weights
    "roberta": (
        {"intermediate_size": 40},
        "widths must be multiples of 16, they are 32 (hidden), 40 (inner) and 16 (a head)",
    ),
    "distilbert": ({"dim": 528, "n_heads": 1}, "head_dim must be at most 512, it is 528"),
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


@needs_int8
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


@needs_int8
def test_info_names_layers_with_nan(tmp_path):
    theirs = model("bert")
    theirs.encoder.layer[1].output.dense.weight.data[3, 4] = torch.nan
    reason = "a weight of shape (32, 48) has NaN, infinity or a number beyond 1e+35 (is the checkpoint damaged?)"
    assert rows_of_info(save(theirs, tmp_path)) == ["  0  in 8 bits", f"  1  not: {reason}"]


@needs_int8
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
    assert "--dtype must be float32, bfloat16 or int8, got 'int4': give one of them" in text
    text = failure(capsys, "embed", "model", texts, *out, *INT8, "--device", "cuda")
    assert "--dtype int8 runs on a CPU, got --device cuda: leave out one of them" in text
    text = failure(capsys, "embed", "model", texts, *out, *INT8, "--device", "cuda:0")
    assert "--device must be cpu or cuda, got 'cuda:0': give one of them" in text
    assert not [*tmp_path.glob("out.*")]
