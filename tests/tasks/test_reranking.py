"""Reranking: losses and gradients are sentence-transformers', metrics are their definitions; files to files."""

import json
import math
import re
from itertools import permutations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fastenc
from fastenc.adapt import freeze_encoder
from fastenc.data import train_tokenizer
from fastenc.data.ranking import read_ranking
from fastenc.models import CrossEncoder, EncoderConfig
from fastenc.models.heads.relevance_losses import LIST_LOSSES
from fastenc.tasks import Reranking, SparseEmbedding, task_of
from fastenc.tasks.ranking_metrics import ranking_metrics
from fastenc.train import TrainConfig, task_trainer
from fastenc.train.log import read_log
from tests.helpers.commands import run

TEXTS = {
    "who plays chess": (
        ["two men play chess", "a dog runs in the rain " * 3, "it rains"],
        [2, 0, 1],
        [7.5, -3.0, 0.5],
    ),
    "where is rain": (
        ["it rains", "a dog", "men at chess", "in the rain"],
        [1, 0, 0, 0],
        [4, 1, 2, 3],
    ),
    "dogs": (["a dog runs", "two men"], [1, 0], [2.0, -1.0]),
}
BATCH = list(TEXTS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a random encoder that drops nothing."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    words = [*TEXTS, *(text for texts, _, _ in TEXTS.values() for text in texts)]
    model = CrossEncoder(
        EncoderConfig(97, 32, 2, 2, 64, 64, hidden_dropout_p=0, attention_dropout_p=0)
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.15)
    model.tokenizer = train_tokenizer(words, vocab_size=97)
    model.save_pretrained(folder)
    return folder


def write(folder, *, lists):
    """The texts as a file with a row for each pair, or for each query."""
    rows = []
    for query, (documents, labels, teacher) in TEXTS.items():
        if lists:
            rows.append(
                {"query": query, "document": documents, "label": labels, "teacher": teacher}
            )
        else:
            rows += [
                {"query": query, "document": d, "label": y, "teacher": t}
                for d, y, t in zip(documents, labels, teacher, strict=True)
            ]
    path = folder / f"{'lists' if lists else 'pairs'}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def peer_loss(model, loss):
    """sentence-transformers' loss of the texts, as a mean that weighs its calls as a batch weighs its items."""
    from sentence_transformers.cross_encoder import losses

    queries, lists = BATCH, [TEXTS[query] for query in BATCH]
    pairs = [
        (q, d, y)
        for q, (texts, labels, _) in TEXTS.items()
        for d, y in zip(texts, labels, strict=True)
    ]
    if loss == "binary-cross-entropy":
        columns = [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]
        labels = torch.tensor([min(pair[2], 1.0) for pair in pairs])
        return losses.BinaryCrossEntropyLoss(model)(columns, labels)
    if loss in ("listnet", "lambda"):
        peer = {"listnet": losses.ListNetLoss, "lambda": losses.LambdaLoss}[loss](model)
        return peer(
            [queries, [texts for texts, _, _ in lists]], [torch.tensor(y) for _, y, _ in lists]
        )
    if loss == "margin-mse":
        peer = losses.MarginMSELoss(model)
        total, count = 0.0, 0
        for query, (texts, labels, teacher) in TEXTS.items():
            for i, high in enumerate(labels):
                lower = [j for j, low in enumerate(labels) if low < high]
                if lower:
                    scores = torch.tensor([[teacher[k] for k in (i, *lower)]], dtype=torch.float32)
                    columns = [[query], [texts[i]], *([texts[j]] for j in lower)]
                    total, count = total + peer(columns, scores) * len(lower), count + len(lower)
        return total / count
    peer = losses.MultipleNegativesRankingLoss(model, scale=1.0, activation_fn=nn.Identity())
    total = 0.0
    for query, (texts, labels, _) in TEXTS.items():
        for i, label in enumerate(labels):
            if label:
                order = [i, *(j for j in range(len(texts)) if j != i)]
                logits = [peer.call_model_with_columns([query], [texts[j]]) for j in order]
                total += label / sum(labels) * peer.calculate_loss(logits, 1)
    return total / len(TEXTS)


@pytest.mark.parametrize("lists", [False, True], ids=["pairs", "lists"])
@pytest.mark.parametrize(
    "loss", ["binary-cross-entropy", "cross-entropy", "listnet", "lambda", "margin-mse"]
)
def test_loss_and_gradients_are_sentence_transformers(loss, lists, base, tmp_path):
    from sentence_transformers import CrossEncoder as Peer

    options = {"teacher": "teacher"} if loss == "margin-mse" else {}
    path = write(tmp_path, lists=lists)
    if loss == "binary-cross-entropy":
        path.write_text(
            path.read_text().replace('"label": 2', '"label": 1').replace("[2, 0", "[1, 0")
        )
    task = Reranking(loss=loss, tokens_at_once=40, **options)
    data = task.read(path)
    model = task.load(base, data).train()
    arguments = task.collate(task.encode(data, model))
    assert len(arguments["groups"]) > 2, "computed in groups"
    ours = model(**arguments).loss
    ours.backward()
    theirs = Peer(str(base), device="cpu").train()
    expected = peer_loss(theirs, loss)
    expected.backward()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    reference = theirs.model
    for name, parameter in {
        "encoder.embeddings.word.weight": reference.bert.embeddings.word_embeddings.weight,
        "encoder.layers.0.up.weight": reference.bert.encoder.layer[0].intermediate.dense.weight,
        "head.out.weight": reference.classifier.weight,
    }.items():
        scale = float(parameter.grad.abs().max())
        own = model.get_parameter(name).grad
        torch.testing.assert_close(own, parameter.grad, rtol=1e-3, atol=1e-5 * scale)


def test_the_loss_of_batches_is_that_of_all(base, tmp_path):
    """Weighted by what each loss is a mean over."""
    path = write(tmp_path, lists=True)
    for loss in ("cross-entropy", "listnet", "lambda"):
        task = Reranking(loss=loss)
        data = task.read(path)
        model = task.load(base, data).eval()
        examples = task.encode(data, model)
        means = [task.evaluate(model, data, examples, size)["loss"] for size in (1, 3)]
        assert means[0] == pytest.approx(means[1], rel=1e-5)


def terms_of(loss, scores, labels, teacher):
    """What a loss is the mean of, one query and one pair of candidates at a time."""
    terms = []
    discount = lambda rank: math.log2(1 + rank)
    for s, y, t in zip(scores, labels, teacher, strict=True):
        s, y, t = s[y.isfinite()], y[y.isfinite()], t[y.isfinite()]
        gain = y.clamp(min=0)
        if loss == "listnet":
            terms.append(-(y.softmax(0) * s.log_softmax(0)).sum())
        if loss == "cross-entropy" and gain.any():
            terms.append(-(gain / gain.sum() * s.log_softmax(0)).sum())
        ranks = 1 + s.argsort(descending=True).argsort()
        dcg = lambda labels: sum((2**g - 1) / discount(rank) for rank, g in enumerate(labels, 1))
        best = dcg(sorted(gain.tolist(), reverse=True))
        for i, j in permutations(range(len(s)), 2):
            if y[i] > y[j] and loss == "margin-mse":
                terms.append(((s[i] - s[j]) - (t[i] - t[j])) ** 2)
            if y[i] > y[j] and loss == "lambda":
                distance = abs(int(ranks[i] - ranks[j]))
                weight = 10 * abs(1 / discount(distance) - 1 / discount(distance + 1))
                weight += abs(1 / discount(int(ranks[i])) - 1 / discount(int(ranks[j])))
                weight *= abs(2 ** float(gain[i]) - 2 ** float(gain[j])) / max(best, 1e-10)
                terms.append(-weight * (s[i] - s[j]).sigmoid().log2())
    return terms


@pytest.mark.parametrize("loss", LIST_LOSSES)
def test_losses_of_queries_are_their_formulas(loss):
    """Also with negative labels, with equal ones, for a single candidate, and without a relevant one."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(-1, 4, (12, 6), generator=draw).double()
    labels[0], labels[1], labels[2] = 0, 2, labels[2].clamp(max=0)
    for row in range(3, 12):
        labels[row, 1 + row % 6 :] = float("-inf")
    scores, teacher = torch.randn(2, 12, 6, dtype=torch.float64, generator=draw)
    given = [teacher.float()] if loss == "margin-mse" else []
    function, count = LIST_LOSSES[loss]
    ours, theirs = scores.float().requires_grad_(), scores.clone().requires_grad_()
    value, terms = function(ours, labels.float(), *given), terms_of(loss, theirs, labels, teacher)
    assert count(labels) == len(terms) > 7
    expected = torch.stack(terms).mean()
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    value.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)
    if loss != "listnet":  # nothing to learn
        nothing = function(ours, torch.zeros(12, 6), *given)
        assert nothing.item() == count(torch.zeros(12, 6)) == 0


@pytest.mark.parametrize("loss", LIST_LOSSES)
def test_a_score_that_is_no_number_shows_in_the_loss(loss):
    """A training that diverged must not look like one that is done. Where there is no candidate, nothing is read."""
    labels = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, float("-inf")]])
    teacher = [torch.randn(2, 3)] if loss == "margin-mse" else []
    for place, shown in (((0, 1), True), ((1, 0), True), ((1, 2), False)):
        scores = torch.randn(2, 3)
        scores[place] = float("nan")
        scores.requires_grad_()
        value = LIST_LOSSES[loss][0](scores, labels, *teacher)
        assert bool(value.isnan()) is shown
        value.backward()
        assert shown or scores.grad.isfinite().all()


def test_metrics_are_their_definitions():
    """On random rankings, with ties, against the sums written out."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (30, 14), generator=draw).tolist()
    labels = (torch.randint(-6, 4, (30, 14), generator=draw).clamp(min=0)).tolist()
    labels[3] = [0] * 14  # left out
    sums, count = dict.fromkeys(("ndcg@10", "mrr@10", "map", "recall@10"), 0.0), 0
    for row, relevance in zip(scores, labels, strict=True):
        if max(relevance) == 0:
            continue
        count += 1
        ranked = [relevance[i] for i in sorted(range(14), key=lambda i: (-row[i], relevance[i]))]
        relevant = sum(label > 0 for label in relevance)
        dcg = lambda gains: sum(
            g / torch.tensor(i + 2.0).log2().item() for i, g in enumerate(gains[:10])
        )
        hits = [place for place, label in enumerate(ranked, 1) if label > 0]
        sums["ndcg@10"] += dcg(ranked) / dcg(sorted(relevance, reverse=True))
        sums["mrr@10"] += 1 / hits[0] if hits[0] <= 10 else 0
        sums["map"] += sum(number / place for number, place in enumerate(hits, 1)) / relevant
        sums["recall@10"] += sum(place <= 10 for place in hits) / relevant
    expected = {name: total / count for name, total in sums.items()}
    assert ranking_metrics(scores, labels) == pytest.approx(expected, rel=1e-5)


def test_from_files_to_files(base, tmp_path):
    from sentence_transformers import CrossEncoder as Peer

    train, lists = write(tmp_path, lists=False), write(tmp_path, lists=True)
    output = tmp_path / "run"
    options = [
        "--task",
        "rerank",
        "--loss",
        "margin-mse",
        "--teacher",
        "teacher",
        "--max-length",
        24,
    ]
    printed = run(
        "finetune",
        base,
        train,
        *options,
        "--dev",
        lists,
        "-o",
        output,
        "--epochs",
        1,
        "--batch-size",
        2,
    )
    assert re.search(r"train: 3 items, 9 sequences of \d+ to \d\d tokens", printed)
    assert task_of(output) is Reranking
    metrics = json.loads((output / "metrics.json").read_text())
    assert {"ndcg@10", "mrr@10", "map", "recall@10", "loss"} <= {*metrics}
    run("evaluate", output, lists, "-o", tmp_path / "metrics.json")
    again = json.loads((tmp_path / "metrics.json").read_text())
    assert again == pytest.approx({name: metrics[name] for name in again}, rel=1e-5)
    # Labels alone measure the order; without the teacher's scores there is no loss.
    rows = [json.loads(line) for line in lists.read_text().splitlines()]
    labelled = [{name: row[name] for name in ("query", "document", "label")} for row in rows]
    alone = tmp_path / "labelled.jsonl"
    alone.write_text("".join(json.dumps(row) + "\n" for row in labelled))
    run("evaluate", output, alone, "-o", tmp_path / "metrics.json")
    del again["loss"]
    measured = json.loads((tmp_path / "metrics.json").read_text())
    assert measured == pytest.approx(again, rel=1e-5)
    small = ("-o", tmp_path / "small", "--epochs", 1, "--batch-size", 2)
    run("finetune", base, train, *options, "--dev", alone, *small)
    chosen = json.loads((tmp_path / "small" / "metrics.json").read_text())
    del chosen["step"]
    assert chosen == pytest.approx(measured, rel=1e-5)  # the same training, so the same ranks
    with pytest.raises(ValueError, match="one of ndcg@10, mrr@10, map, recall@10, got loss"):
        task = Reranking(loss="margin-mse", teacher="teacher")
        data = task.read(train)
        model, config = task.load(base, data), TrainConfig(tmp_path / "none")
        task_trainer(task, model, data, config, dev=task.read(alone, data), metric="loss")
    for path, count in ((train, 9), (lists, 3)):
        run("predict", output, path, "-o", tmp_path / "scores.jsonl")
        rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
        assert len(rows) == count
        scores = [s for row in rows for s in (row["scores"] if count == 3 else [row["score"]])]
        pairs = [(query, text) for query, (texts, _, _) in TEXTS.items() for text in texts]
        reranker = fastenc.Reranker.from_pretrained(output)
        assert reranker.max_length == 24 and reranker.activation == "Identity"
        torch.testing.assert_close(
            torch.tensor(scores), reranker.predict(pairs), rtol=1e-4, atol=1e-5
        )
        peer = Peer(str(output), device="cpu", max_length=24)
        expected = torch.from_numpy(peer.predict(pairs))
        torch.testing.assert_close(torch.tensor(scores), expected, rtol=1e-4, atol=1e-5)
    predicted = fastenc.predictor(output).predict(
        [("dogs", "a dog runs"), ("dogs", ["a dog", "men"])]
    )
    assert [len(row["scores"]) for row in predicted] == [1, 2]


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity", "Tanh"])
def test_scores_have_the_activation_of_the_folder(activation, base, tmp_path):
    from sentence_transformers import CrossEncoder as Peer

    model = CrossEncoder.from_pretrained(base, activation=activation)
    model.save_pretrained(tmp_path)
    pairs = [(query, text) for query, (texts, _, _) in TEXTS.items() for text in texts]
    found = fastenc.predictor(tmp_path).predict(pairs)
    expected = Peer(str(tmp_path), device="cpu").predict(pairs)
    assert [row["score"] for row in found] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("loss", ["binary-cross-entropy", "listnet"])
def test_cached_features_are_the_first_vector_of_each_pair(loss, base, tmp_path):
    from transformers import BertModel

    path = write(tmp_path, lists=False)
    path.write_text(path.read_text().replace('"label": 2', '"label": 1'))
    task = Reranking(loss=loss, tokens_at_once=40)
    data = task.read(path)
    model = task.load(base, data)
    freeze_encoder(model)
    config = TrainConfig(tmp_path / "run", max_steps=1, learning_rate=1e-9)
    trainer = task_trainer(task, model, data, config, dev=data, features=tmp_path / "kept")
    (file,) = tmp_path.glob("kept/*/*.safetensors")
    theirs = BertModel.from_pretrained(base).eval()
    examples = task.encode(data, model)
    with torch.no_grad():
        first = [
            theirs(torch.tensor([ids]), token_type_ids=torch.tensor([types])).last_hidden_state[
                0, 0
            ]
            for each in examples
            for ids, types in zip(each.pairs, each.token_type_ids, strict=True)
        ]
    torch.testing.assert_close(load_file(file)["vectors"], torch.stack(first), rtol=0, atol=1e-5)
    whole = task.evaluate(model, data, examples)["loss"]
    assert trainer.train()["loss"] == pytest.approx(whole, rel=1e-5)
    assert read_log(tmp_path / "run" / "log.jsonl")[0]["loss"] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(("quoting", "text"), [("csv", 'a "b" c'), ("none", '"a ""b"" c"')])
def test_quotes_of_a_table_are_read_as_asked_for(quoting, text, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text('query\tdocument\tlabel\nq\t"a ""b"" c"\t1\n')
    task = Reranking(quoting=quoting)
    inputs, (part,) = task.read_inputs(path), task.input_parts(path, 5)
    for data in (task.read(path), inputs, part):
        assert data.documents == [[text]]


def test_errors(base, tmp_path, monkeypatch):
    for options, message in (
        ({"loss": "hinge"}, "loss must be one of binary-cross-entropy"),
        ({"loss": "margin-mse"}, "needs the column of a teacher's scores"),
        ({"teacher": "score"}, "the other losses read none"),
    ):
        with pytest.raises(ValueError, match=message):
            Reranking(**options)
    path = tmp_path / "data.jsonl"

    def fails(message, *rows, train=None, **options):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(ValueError, match=message):
            Reranking(**options).read(path, train)

    row = {"query": "a", "document": "b", "label": 1}
    fails("line 1: labels of binary-cross-entropy must be from 0 to 1, got 3", {**row, "label": 3})
    fails("must be from 0 to 1, got -0.5", {**row, "label": -0.5})
    fails("no query has two documents with different labels", row, loss="listnet")
    fails("must hold a list with a number for each of the 2", {**row, "document": ["b", "c"]})
    several = {**row, "document": ["b", "c"]}
    fails(r"a number for each of the 2 documents, got \[1, 0, 0\]", several | {"label": [1, 0, 0]})
    for wrong in (3, [], ["b", 3]):
        message = f"line 2: .* must hold a text or a list of texts, got {re.escape(str(wrong))}:"
        fails(message, row, {**row, "document": wrong})
    model = CrossEncoder.from_pretrained(base)
    path.write_text("".join(json.dumps(row | {"query": text}) + "\n" for text in ("a", "\u200d")))
    with pytest.raises(ValueError, match="line 2 has no tokens"):
        Reranking().encode(read_ranking(path, document="query"), model)
    fails("must be whole numbers.*got 0.5", row, {**row, "label": 0.5}, train=model)
    fails("no label above 0", {**row, "label": 0}, train=model)
    monkeypatch.setitem(__import__("sys").modules, "pytrec_eval", None)
    for task in (Reranking(), SparseEmbedding(text=("query", "document"))):
        with pytest.raises(ImportError, match=r"fastenc\[retrieval\]"):
            task.read(path, model)
