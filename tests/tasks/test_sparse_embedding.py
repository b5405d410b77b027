"""Sparse embeddings: metrics, warm-up, and the task from files to files."""

import json
import math

import pytest
import torch
from sklearn.metrics import ndcg_score

from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig, SentenceEmbedder, SparseEncoder
from fastenc.models.heads.similarity_losses import flops_loss
from fastenc.tasks import SparseEmbedding, embed_file, task_of
from fastenc.tasks.metrics import sparse_retrieval_metrics
from tests.helpers.commands import failure, run

WORDS = [f"word{letter}" for letter in "abcdefghijklmnop"]


@pytest.fixture
def base(tmp_path):
    """A folder with a small masked-LM model."""
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}
    tokenizer = train_tokenizer(WORDS * 3, vocab_size=80)
    config = EncoderConfig(vocab_size=tokenizer.get_vocab_size(), max_positions=32, **sizes)
    model = SparseEncoder(config)
    model.tokenizer = tokenizer
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "modules.json").unlink()  # a masked-LM model
    return tmp_path / "base"


def test_metrics_are_those_of_ranks():
    texts = [(f"q{i}", f"d{i}") for i in range(12)]
    weights = torch.rand(24, 9).sub(0.4).relu()
    scores = weights[::2] @ weights[1::2].T
    relevant = torch.eye(12)
    metrics = sparse_retrieval_metrics(texts, weights.to_sparse())
    assert metrics["ndcg@10"] == pytest.approx(ndcg_score(relevant, scores, k=10), abs=1e-6)
    ranks = (scores >= scores.diag()[:, None]).sum(1)
    assert metrics["recall@10"] == pytest.approx(float((ranks <= 10).float().mean()))
    mrr = sum(1 / rank for rank in ranks.tolist() if rank <= 10) / 12
    assert metrics["mrr@10"] == pytest.approx(mrr)
    assert metrics["map"] == pytest.approx(float((1 / ranks.double()).mean()))


def test_the_regularisers_grow_with_the_square_of_the_steps(base):
    model = SparseEncoder.from_pretrained(base, query_flops=2.0, document_flops=3.0)
    task = SparseEmbedding(flops_warmup=4)
    data = task.data_of([(WORDS[0], WORDS[1]), (WORDS[2], WORDS[3])])
    examples = task.encode(data, model)
    losses = [float(model(**task.collate_step(examples, step)).loss.detach()) for step in range(6)]
    weights = model(**task.collate(examples)).logits.detach()
    whole = float(2 * flops_loss(weights[:, 0]) + 3 * flops_loss(weights[:, 1]))
    for step, loss in enumerate(losses):
        share = min(1, step / 4) ** 2
        assert math.isclose(loss - losses[0], share * whole, rel_tol=1e-4, abs_tol=1e-5)
    with pytest.raises(ValueError, match="flops_warmup must be at least 0, got -1"):
        SparseEmbedding(flops_warmup=-1)
    with pytest.raises(ValueError, match="tokens_at_once must be at least 1, got 0"):
        SparseEmbedding(tokens_at_once=0)


def test_from_files_to_files(base, tmp_path, capsys):
    rows = [f"{a} {b}\t{b} {a} {a}" for a, b in zip(WORDS, WORDS[1:], strict=False)]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("\n".join(["sentence1\tsentence2", *rows]) + "\n")
    out = tmp_path / "out"
    options = ["--task", "sparse-embedding", "--dev", pairs, "-o", out, "--lr", "3e-3"]
    options += ["--tokens-at-once", "40"]
    run("finetune", base, pairs, *options, "--epochs", "6", "--batch-size", "8")
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["ndcg@10"] > 0.8 and metrics["active_tokens"] > 0
    assert task_of(out) is SparseEmbedding
    assert not SentenceEmbedder.stored_in(out, {})
    run("predict", out, pairs, "-o", tmp_path / "scores.jsonl")
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    run("embed", out, pairs, "-t", "sentence1", "-o", tmp_path / "weights.jsonl", "--sparse")
    lines = [json.loads(line) for line in (tmp_path / "weights.jsonl").read_text().splitlines()]
    model = SparseEncoder.from_pretrained(out)
    first, second = rows[0].split("\t")
    assert len(lines) == len(rows) and lines[0] == pytest.approx(model.encode_sparse(first))
    heavy = (*("-o", tmp_path / "heavy.jsonl"), "--sparse", "--max-active", 2)
    run("embed", out, pairs, "-t", "sentence1", *heavy)
    kept = [json.loads(line) for line in (tmp_path / "heavy.jsonl").read_text().splitlines()]
    assert [[*row.items()] for row in kept] == [[*row.items()][:2] for row in lines]
    one, other = model.encode_sparse([first, second], convert_to_tensor=True).to_dense()
    assert scores[0]["similarity"] == pytest.approx(float(one @ other), rel=1e-4)
    for words, message in (
        (("--sparse", "--pooling", "cls"), "--pooling is not for the weights of --sparse"),
        (("--max-active", "3"), "--max-active is for --sparse"),
    ):
        assert message in failure(capsys, "embed", out, pairs, "-o", tmp_path / "x.jsonl", *words)
    refused = "gives weights of tokens (SPLADE), not vectors: use fastenc embed --sparse"
    given = ("-t", "sentence1", "-o", tmp_path / "x.npy")
    assert refused in failure(capsys, "embed", out, pairs, *given)
    assert refused in failure(capsys, "mine", out, pairs, "-o", tmp_path / "x.tsv")
    assert not (tmp_path / "x.npy").exists() and not (tmp_path / "x.tsv").exists()


def test_metrics_need_no_hard_negatives(base, tmp_path):
    """A model that was trained with a third column is measured on files with it and without."""
    triplets, pairs, out = tmp_path / "triplets.tsv", tmp_path / "pairs.tsv", tmp_path / "out"
    rows = [
        ("sentence1", "sentence2", "negative"),
        *zip(WORDS[:6], WORDS[1:7], WORDS[8:14], strict=True),
    ]
    triplets.write_text("".join("\t".join(row) + "\n" for row in rows))
    pairs.write_text("".join("\t".join(row[:2]) + "\n" for row in rows))
    columns = [f"-t{name}" for name in rows[0]]
    options = ("--task", "sparse-embedding", *columns, "--max-steps", 1, "-o", out)
    run("finetune", base, triplets, *options, "--dev", pairs)
    trained = json.loads((out / "metrics.json").read_text())
    run("evaluate", out, pairs, "-o", tmp_path / "metrics.json")
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["map"] == pytest.approx(trained["map"])
    task, model = SparseEmbedding(text=rows[0]), SparseEncoder.from_pretrained(out)
    for path, count in ((triplets, 3), (pairs, 2)):
        assert {*map(len, task.read(path, model).texts)} == {count}
    with pytest.raises(ValueError, match="there must be a column 'negative'"):
        task.read(pairs)


def test_an_encoder_of_a_sparse_folder_has_states_and_no_vectors(base, tmp_path):
    folder = tmp_path / "sparse"
    SparseEncoder.from_pretrained(base).save_pretrained(folder)
    encoder, plain = Encoder.from_pretrained(folder), Encoder.from_pretrained(base)
    texts = [" ".join(WORDS[:3]), WORDS[3]]
    refused = (
        r"weights of tokens \(SPLADE\): use SparseEncoder.from_pretrained\(...\).encode_sparse"
    )
    with pytest.raises(ValueError, match=refused):
        encoder.encode(texts)
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    with pytest.raises(ValueError, match=refused):
        embed_file(encoder, tmp_path / "texts.txt", tmp_path / "v.npy")
    assert torch.equal(encoder.encode(texts, pooling="mean"), plain.encode(texts))
    # Words' vectors are states of layers.
    words = [text.split() for text in texts]
    assert torch.equal(encoder.embed_words(words).vectors, plain.embed_words(words).vectors)
    printed = run("neighbours", folder, tmp_path / "texts.txt", "--word", WORDS[0])
    assert printed == run("neighbours", base, tmp_path / "texts.txt", "--word", WORDS[0])
    assert WORDS[1] in printed
