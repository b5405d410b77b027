"""Scores and ranks of pairs: the numbers of sentence-transformers' CrossEncoder."""

import json

import pytest
import torch

import fastenc
from fastenc.data import train_tokenizer
from fastenc.models import CrossEncoder as CrossEncoderOfFastenc
from fastenc.models import EncoderConfig, SequenceClassifier
from tests.helpers.commands import failure, run

QUERY = "who plays chess"
DOCUMENTS = [
    "a dog runs",
    "two men play chess in the rain " * 6,
    "",
    "it rains",
    "two men play chess",
]


def cross_encoder_folder(folder, labels=1, **config):
    torch.manual_seed(0)
    model = SequenceClassifier(EncoderConfig(97, 32, 2, 2, 64, 24), labels)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.tokenizer = train_tokenizer([QUERY, *DOCUMENTS], vocab_size=97)
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def stored(activation):
    return {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{activation}"}}


@pytest.mark.parametrize(
    ("labels", "config"),
    [(1, {}), (1, stored("linear.Identity")), (1, stored("activation.Tanh")), (3, {})],
    ids=["sigmoid", "identity", "tanh", "three labels"],
)
def test_scores_are_those_of_a_cross_encoder(labels, config, tmp_path):
    from sentence_transformers import CrossEncoder

    folder = cross_encoder_folder(tmp_path, labels, **config)
    reranker, peer = (
        fastenc.Reranker.from_pretrained(folder),
        CrossEncoder(str(folder), device="cpu"),
    )
    pairs = [(QUERY, document) for document in DOCUMENTS] + [("a dog runs " * 9, "it rains")]
    expected = peer.predict(pairs, convert_to_tensor=True)
    for batch_size in (1, 4, 32):
        scores = reranker.predict(pairs, batch_size=batch_size)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    assert expected.std() > 1e-3
    if labels > 1:
        with pytest.raises(ValueError, match="one with 3: use predict"):
            reranker.rank(QUERY, DOCUMENTS)
        return
    ranked = reranker.rank(QUERY, DOCUMENTS, top_k=3, return_documents=True)
    of_peer = peer.rank(QUERY, DOCUMENTS, top_k=3, return_documents=True)
    assert [(r["corpus_id"], r["text"]) for r in ranked] == [
        (r["corpus_id"], r["text"]) for r in of_peer
    ]
    assert [r["score"] for r in ranked] == pytest.approx([r["score"] for r in of_peer], rel=1e-4)
    assert reranker.predict([]).shape == (0,)


@pytest.mark.parametrize("activation", ["Identity", "Tanh"])
def test_the_activation_that_sentence_transformers_has_saved(activation, tmp_path):
    from sentence_transformers import CrossEncoder

    folder = str(cross_encoder_folder(tmp_path / "model", **stored("activation.Sigmoid")))
    peer = CrossEncoder(folder, device="cpu", activation_fn=getattr(torch.nn, activation)())
    peer.save_pretrained(str(tmp_path / "saved"))
    pairs = [(QUERY, document) for document in DOCUMENTS]
    expected = peer.predict(pairs, convert_to_tensor=True)
    scores = fastenc.Reranker.from_pretrained(tmp_path / "saved").predict(pairs)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    assert CrossEncoderOfFastenc.from_pretrained(tmp_path / "saved").activation == activation


def test_a_stored_prompt_and_lowercasing(tmp_path):
    from sentence_transformers import CrossEncoder

    folder = cross_encoder_folder(tmp_path / "model")
    prompts = {
        "prompts": {"question": "dog: ", "other": "runs "},
        "default_prompt_name": "question",
    }
    peer = CrossEncoder(str(folder), device="cpu", **prompts)
    peer.save_pretrained(str(tmp_path / "saved"))
    pairs = [(QUERY, document) for document in DOCUMENTS]
    scores = fastenc.Reranker.from_pretrained(tmp_path / "saved").predict(pairs)
    expected = peer.predict(pairs, convert_to_tensor=True)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    other = fastenc.Reranker.from_pretrained(tmp_path / "saved", prompt="runs ").predict(pairs)
    expected = peer.predict(pairs, convert_to_tensor=True, prompt_name="other")
    torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-6)
    assert (other - scores).abs().max() > 1e-3


def test_the_command_ranks_documents_for_each_query(tmp_path, capsys):
    folder = cross_encoder_folder(tmp_path / "model")
    queries, documents = tmp_path / "queries.txt", tmp_path / "documents.jsonl"
    queries.write_text(f"{QUERY}\nit rains\n")
    documents.write_text("".join(json.dumps({"text": each}) + "\n" for each in DOCUMENTS))
    reranker = fastenc.Reranker.from_pretrained(folder)
    for suffix in (".jsonl", ".tsv"):
        output = tmp_path / f"ranked{suffix}"
        run("rerank", folder, queries, documents, "-t", "text", "--top-k", 2, "-o", output)
        lines = output.read_text().splitlines()
        assert len(lines) == (4 if suffix == ".jsonl" else 5)
    rows = [json.loads(line) for line in (tmp_path / "ranked.jsonl").read_text().splitlines()]
    for start, query in ((0, QUERY), (2, "it rains")):
        for rank, (row, each) in enumerate(
            zip(rows[start : start + 2], reranker.rank(query, DOCUMENTS, 2), strict=True), 1
        ):
            assert (row["query"], row["rank"], row["document"]) == (query, rank, each["corpus_id"])
            assert row["text"] == DOCUMENTS[each["corpus_id"]]
            assert row["score"] == pytest.approx(each["score"], rel=1e-5)
    assert lines[0] == "query\trank\tscore\tdocument\ttext"
    table, output = tmp_path / "queries.tsv", tmp_path / "by_columns.jsonl"
    table.write_text(f"question\n{QUERY}\nit rains\n")
    columns = ("-t", "question", "--document-text", "text")
    run("rerank", folder, table, documents, *columns, "--top-k", 2, "-o", output)
    assert output.read_text() == (tmp_path / "ranked.jsonl").read_text()
    queries.write_text("a\ttab\n")
    message = (
        "texts in a .tsv file must have no tabs and no line breaks, got 'a\\ttab': write .jsonl"
    )
    command = ("rerank", folder, queries, documents, "-t", "text", "-o", tmp_path / "r.tsv")
    assert message in failure(capsys, *command)


def test_ranked_texts_are_taken_by_their_place(tmp_path):
    """Not by the label of a sorted or filtered Series of pandas; and a generator gives each text once."""
    pandas = pytest.importorskip("pandas")
    reranker = fastenc.Reranker.from_pretrained(cross_encoder_folder(tmp_path))
    series = pandas.Series(DOCUMENTS, index=range(len(DOCUMENTS))[::-1])
    for documents in (series, iter(DOCUMENTS)):
        ranked = reranker.rank(QUERY, documents, return_documents=True)
        assert [each["text"] for each in ranked] == [DOCUMENTS[r["corpus_id"]] for r in ranked]


def test_errors(tmp_path):
    folder = cross_encoder_folder(tmp_path / "a", **stored("activation.GELU"))
    with pytest.raises(
        ValueError,
        match=r"must be torch.nn's Identity, Sigmoid, Tanh, got .*GELU.*: give activation",
    ):
        fastenc.Reranker.from_pretrained(folder)
    reranker = fastenc.Reranker.from_pretrained(folder, activation="Identity")
    with pytest.raises(ValueError, match="two texts, got 'a text' as pair 1"):
        reranker.predict([("a", "b"), "a text"])
    with pytest.raises(ValueError, match="half a surrogate pair in pair 0"):
        reranker.predict([("a", "\ud800")])
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        reranker.rank(QUERY, DOCUMENTS, top_k=0)
    with pytest.raises(ValueError, match="got a single text"):
        reranker.rank(QUERY, DOCUMENTS[0])
    with pytest.raises(ValueError, match="documents must be a list, got dict: give a list"):
        reranker.rank(QUERY, {"a": "a dog"})
    with pytest.raises(ValueError, match="max_length must be from 1"):
        fastenc.Reranker.from_pretrained(folder, activation="Identity", max_length=10_000)
    reranker.model.encoder.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="needs a checkpoint of a cross-encoder"):
        fastenc.Reranker.from_pretrained(tmp_path / "bare")
