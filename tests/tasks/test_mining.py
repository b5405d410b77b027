"""Hard negatives: those of sentence-transformers' mine_hard_negatives; the searches; from files to training data."""

import json
import random
from dataclasses import replace

import pytest
import torch

import fastenc
from fastenc.data import train_tokenizer
from fastenc.data.pairs import encode_pairs, read_pairs
from fastenc.data.ranking import read_ranking
from fastenc.models import CrossEncoder, EncoderConfig, SentenceEmbedder
from fastenc.models.embedding import search
from fastenc.tasks.mining import Mining, mine_hard_negatives
from tests.helpers.commands import failure, run
from tests.helpers.versions import sentence_transformers_6

WORDS = [
    "dog",
    "cat",
    "man",
    "chess",
    "rain",
    "song",
    "tree",
    "river",
    "bank",
    "town",
    "plays",
    "sings",
]
DRAW = random.Random(0)
TEXTS = [" ".join(DRAW.sample(WORDS, DRAW.randint(2, 5))) for _ in range(40)]
PAIRS = [*zip(TEXTS[:12], TEXTS[12:24], strict=True), (TEXTS[0], TEXTS[30]), (TEXTS[3], TEXTS[12])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random models of vectors and of pairs."""
    root = tmp_path_factory.mktemp("models")
    for name, cls in (("vectors", SentenceEmbedder), ("scores", CrossEncoder)):
        torch.manual_seed(0)
        model = cls(EncoderConfig(97, 32, 2, 2, 64, 64))
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.2)
        model.tokenizer = train_tokenizer(TEXTS, vocab_size=97)
        model.save_pretrained(root / name)
    prompts = {"query": "dog: ", "document": "town bank ", "other": "rain "}
    model = SentenceEmbedder.from_pretrained(root / "vectors", prompts=prompts)
    model.save_pretrained(root / "prompts")
    main = root / "prompts" / "config_sentence_transformers.json"
    # Neither mining nor sentence-transformers' takes the default prompt.
    main.write_text(json.dumps(json.loads(main.read_text()) | {"default_prompt_name": "other"}))
    return root


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param({}, {}, id="nearest"),
        pytest.param({"model": "prompts"}, {}, id="the checkpoint's prompts"),
        pytest.param(
            {"skip": 2, "num_negatives": 4}, {"range_min": 2, "num_negatives": 4}, id="skip"
        ),
        pytest.param(
            {"skip": 9, "max_score": 0.93},
            {"range_min": 9, "max_score": 0.93},
            id="skip more than the limit leaves",
        ),
        pytest.param(
            {"candidates": 6, "max_score": 0.96},
            {"range_max": 6, "max_score": 0.96},
            id="candidates",
        ),
        pytest.param(
            {"margin": 0.005, "min_score": 0.85},
            {"absolute_margin": 0.005, "min_score": 0.85},
            id="margin",
            marks=sentence_transformers_6,
        ),
        pytest.param(
            {"relative_margin": 0.01, "search": "faiss"},
            {"relative_margin": 0.01, "use_faiss": True},
            id="relative margin, faiss",
            marks=sentence_transformers_6,
        ),
        pytest.param(
            {"max_score": 0.48, "cross": True},
            {"max_score": 0.48, "cross": True},
            id="cross-encoder",
            marks=sentence_transformers_6,
        ),
        pytest.param(
            {"relative_margin": 0.5, "cross": True, "activation": "Identity"},
            {"relative_margin": 0.5, "cross": True},
            id="relative margin of negative scores",
            marks=sentence_transformers_6,
        ),
    ],
)
def test_negatives_are_sentence_transformers(ours, theirs, folder):
    from datasets import Dataset
    from sentence_transformers import CrossEncoder as PeerOfPairs
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives as peer

    cross = ours.pop("cross", False) and theirs.pop("cross")
    activation = ours.pop("activation", "Sigmoid")
    reranker = of_pairs = None
    if cross:
        reranker = fastenc.Reranker.from_pretrained(folder / "scores", activation=activation)
        function = getattr(torch.nn, activation)()
        of_pairs = PeerOfPairs(str(folder / "scores"), device="cpu", activation_fn=function)
    checkpoint = folder / ours.pop("model", "vectors")
    encoder = fastenc.Encoder.from_pretrained(checkpoint)
    mined = mine_hard_negatives(encoder, PAIRS, TEXTS[24:], Mining(**ours), cross_encoder=reranker)
    queries, positives = zip(*PAIRS, strict=True)
    expected = peer(
        Dataset.from_dict({"query": queries, "positive": positives}),
        SentenceTransformer(str(checkpoint), device="cpu"),
        corpus=TEXTS[24:],
        cross_encoder=of_pairs,
        output_scores=True,
        verbose=False,
        **theirs,
    )
    rows = [
        (each.query, positive, negative, [high, low])
        for each in mined
        for positive, high in zip(each.positives, each.positive_scores, strict=True)
        for negative, low in zip(each.negatives, each.negative_scores, strict=True)
    ]
    of_peer = list(zip(*(expected[name] for name in expected.column_names), strict=True))
    assert len(rows) > 10 and [row[:3] for row in rows] == [tuple(row[:3]) for row in of_peer]
    for row, each in zip(rows, of_peer, strict=True):
        assert row[3] == pytest.approx(each[3], abs=1e-5)


def test_searches_find_the_largest_products(monkeypatch):
    monkeypatch.setattr(search, "QUERIES_AT_ONCE", 3)
    monkeypatch.setattr(search, "DOCUMENTS_AT_ONCE", 7)
    queries, documents = (torch.nn.functional.normalize(torch.randn(n, 16), dim=1) for n in (8, 40))
    products = queries @ documents.T
    expected = products.topk(9, dim=1).indices
    for name, find in search.SEARCHES.items():
        scores, indices = find(queries, documents, 9)
        torch.testing.assert_close(scores, products.gather(1, indices), rtol=1e-5, atol=1e-6)
        found = (indices[:, :, None] == expected[:, None]).any(1).float().mean()
        # usearch builds its graph in several threads, and its search is approximate.
        assert found > 0.9 if name == "usearch" else torch.equal(indices, expected), name


def test_what_a_graph_does_not_reach_is_marked():
    """usearch hardly ever reaches each of 2,000 random documents. It fills its arrays with keys of no meaning."""
    queries, documents = (
        torch.nn.functional.normalize(torch.randn(n, 64), dim=1) for n in (8, 2000)
    )
    products = queries @ documents.T
    for count in (8, 1):
        scores, indices = search.usearch_search(queries[:count], documents, 2000)
        assert scores.shape == indices.shape == (count, 2000)
        for row, found, places in zip(products, scores, indices, strict=False):
            reached = places >= 0
            assert reached.sum() > 1900 and (found[~reached] == float("-inf")).all()
            assert len({*places[reached].tolist()}) == reached.sum()
            torch.testing.assert_close(found[reached], row[places[reached]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cross", [False, True], ids=["vectors", "cross-encoder"])
def test_what_a_search_does_not_find_is_no_negative(cross, folder, monkeypatch):
    found = []

    def of_five(queries, documents, k, show_progress):
        scores, indices = search.exact_search(queries, documents, k)
        found.extend(indices[:, :5].tolist())
        scores[:, 5:], indices[:, 5:] = float("-inf"), -1
        return scores, indices

    monkeypatch.setitem(search.SEARCHES, "usearch", of_five)
    encoder = fastenc.Encoder.from_pretrained(folder / "vectors")
    reranker = fastenc.Reranker.from_pretrained(folder / "scores") if cross else None
    options = Mining(search="usearch", num_negatives=9)
    mined = mine_hard_negatives(encoder, PAIRS, (), options, cross_encoder=reranker)
    documents = [*dict.fromkeys(positive for each in mined for positive in each.positives)]
    for each, row in zip(mined, found, strict=True):
        near = [documents[index] for index in row]
        assert sorted(each.negatives) == sorted({*near} - {*each.positives})


def test_products_of_bfloat16_vectors_are_float32():
    documents = torch.nn.functional.normalize(torch.randn(200, 64), dim=1).bfloat16()
    exact = documents.float() @ documents.float().T
    scores, indices = search.exact_search(documents, documents, 20)
    assert torch.equal(indices, exact.topk(20, dim=1).indices)
    torch.testing.assert_close(scores, exact.gather(1, indices), rtol=1e-5, atol=1e-6)


def test_random_negatives_are_among_the_candidates(folder):
    encoder = fastenc.Encoder.from_pretrained(folder / "vectors")
    mine = lambda **options: mine_hard_negatives(encoder, PAIRS, (), Mining(**options))
    nearest = mine(num_negatives=6, candidates=6)
    drawn = [
        mine(num_negatives=2, candidates=6, sampling="random", seed=seed) for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    for one, all_six in zip(drawn[0], nearest, strict=True):
        places = [all_six.negatives.index(text) for text in one.negatives]
        assert len(places) == 2 and places == sorted(places)


def test_the_command_passes_its_options_on(folder, tmp_path):
    """Its rows are those of the function with the same options, in Python."""
    pairs, rows = tmp_path / "pairs.jsonl", tmp_path / "rows.jsonl"
    lines = [json.dumps({"sentence1": query, "sentence2": document}) for query, document in PAIRS]
    pairs.write_text("\n".join(lines) + "\n")
    chosen = {"num_negatives": 2, "skip": 1, "candidates": 6, "sampling": "random", "seed": 3}
    prompts = {"query_prompt": "song ", "document_prompt": "tree river "}
    flags = [
        word
        for name, value in (chosen | prompts).items()
        for word in (f"--{name.replace('_', '-')}", value)
    ]
    printed = run("mine", folder / "vectors", pairs, "-o", rows, *flags)
    encoder = fastenc.Encoder.from_pretrained(folder / "vectors")
    mined = mine_hard_negatives(encoder, PAIRS, (), Mining(**chosen), **prompts)
    expected = [
        {
            "sentence1": each.query,
            "sentence2": positive,
            "negative": negative,
            "positive_score": pytest.approx(high, abs=1e-6),
            "negative_score": pytest.approx(low, abs=1e-6),
        }
        for each in mined
        for positive, high in zip(each.positives, each.positive_scores, strict=True)
        for negative, low in zip(each.negatives, each.negative_scores, strict=True)
    ]
    assert [json.loads(line) for line in rows.read_text().splitlines()] == expected
    assert ": 24 of 24 negatives for 12 queries" in printed
    for left_out in (*chosen, *prompts):
        fewer, texts = (
            {name: value for name, value in each.items() if name != left_out}
            for each in (chosen, prompts)
        )
        other = mine_hard_negatives(encoder, PAIRS, (), Mining(**fewer), **texts)
        assert other != mined, f"the rows are the same without {left_out}"


def test_the_command_reads_the_corpus_as_it_is_described(folder, tmp_path, monkeypatch):
    given, real = [], mine_hard_negatives

    def mine(encoder, pairs, corpus, *arguments, **options):
        given.append((corpus, options["batch_size"]))
        return real(encoder, pairs, corpus, *arguments, **options)

    monkeypatch.setattr("fastenc.cli.mine.mine_hard_negatives", mine)
    (tmp_path / "pairs.tsv").write_text('sentence1\tsentence2\ndog\t"a ""dog"" runs"\n')
    (tmp_path / "corpus.tsv").write_text('sentence\tbody\nno\t"a ""cat"" runs"\n')
    options = ("--corpus-text", "body", "--quoting", "csv", "--batch-size", 5)
    files = (tmp_path / "pairs.tsv", "--corpus", tmp_path / "corpus.tsv")
    run("mine", folder / "vectors", *files, "-o", tmp_path / "rows.jsonl", *options)
    assert given == [(['a "cat" runs'], 5)]
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (row["sentence2"], row["negative"]) == ('a "dog" runs', 'a "cat" runs')


@pytest.mark.parametrize("prompted", ["query", "document"])
def test_a_given_prompt_is_put_before_each_text(folder, prompted):
    """The vectors are those of texts that begin with it."""
    encoder = fastenc.Encoder.from_pretrained(folder / "prompts")
    plain = {"query_prompt": "", "document_prompt": ""}
    given = plain | {f"{prompted}_prompt": "song "}
    mined = mine_hard_negatives(encoder, PAIRS, (), Mining(num_negatives=2), **given)
    before = lambda side, text: f"song {text}" if side == prompted else text
    pairs = [(before("query", query), before("document", document)) for query, document in PAIRS]
    expected = mine_hard_negatives(encoder, pairs, (), Mining(num_negatives=2), **plain)
    for one, other in zip(mined, expected, strict=True):
        assert [before("document", text) for text in one.negatives] == other.negatives
        assert one.negative_scores == pytest.approx(other.negative_scores, abs=1e-6)


def test_empty_lines_of_a_corpus_are_no_negatives(folder, tmp_path):
    """So `fastenc finetune` takes what `fastenc mine` writes."""
    pairs, corpus, rows = (tmp_path / name for name in ("pairs.tsv", "corpus.txt", "rows.tsv"))
    lines = ["sentence1\tsentence2", *("\t".join(pair) for pair in PAIRS)]
    pairs.write_text("\n".join(lines) + "\n")
    corpus.write_text("\n\n".join(TEXTS[24:]) + "\n \n")
    run("mine", folder / "vectors", pairs, "--corpus", corpus, "--num-negatives", 99, "-o", rows)
    data = read_pairs(rows, ("sentence1", "sentence2", "negative"))
    assert {negative for _, _, negative in data.texts} >= {*TEXTS[24:]}
    model = SentenceEmbedder.from_pretrained(folder / "vectors")
    assert len(encode_pairs(data, model.tokenizer, 64)) == len(data)


@pytest.mark.parametrize("limit", ["max_score", "min_score", "margin"])
def test_a_limit_of_zero_is_a_limit(folder, limit):
    """The cross-encoder's logits are on both sides of it."""
    encoder = fastenc.Encoder.from_pretrained(folder / "vectors")
    reranker = fastenc.Reranker.from_pretrained(folder / "scores", activation="Identity")
    mine = lambda options: mine_hard_negatives(
        encoder, PAIRS, TEXTS, options, cross_encoder=reranker
    )
    every = Mining(num_negatives=40, candidates=40)
    kept = {
        "max_score": lambda low, worst: low <= 0,
        "min_score": lambda low, worst: low >= 0,
        "margin": lambda low, worst: low <= worst,
    }[limit]
    limited = mine(replace(every, **{limit: 0.0}))
    for one, all_of_them in zip(limited, mine(every), strict=True):
        worst = min(all_of_them.positive_scores)
        scored = zip(all_of_them.negatives, all_of_them.negative_scores, strict=True)
        assert one.negatives == [text for text, low in scored if kept(low, worst)]
    counts = [len(each.negatives) for each in limited]
    assert 0 < sum(counts) < 38 * len(counts)


def test_a_score_on_a_limit_is_kept(folder):
    encoder = fastenc.Encoder.from_pretrained(folder / "vectors")
    mine = lambda **limit: mine_hard_negatives(
        encoder, PAIRS[:1], TEXTS, Mining(num_negatives=40, candidates=40, **limit)
    )
    ((_, _, texts, _, scores),) = mine()
    middle = scores[20]
    for limit, kept in (
        ("max_score", [score <= middle for score in scores]),
        ("min_score", [score >= middle for score in scores]),
    ):
        ((_, _, negatives, _, _),) = mine(**{limit: middle})
        assert negatives == [text for text, is_kept in zip(texts, kept, strict=True) if is_kept]


def test_from_files_to_training_data(folder, tmp_path, capsys):
    pairs, corpus = tmp_path / "pairs.jsonl", tmp_path / "corpus.txt"
    rows = [json.dumps({"q": query, "d": document}) for query, document in PAIRS]
    pairs.write_text("\n".join(rows) + "\n")
    corpus.write_text("\n".join(TEXTS[24:]) + "\n")
    command = ("mine", folder / "vectors", pairs, "-t", "q", "-t", "d", "--corpus", corpus)
    run(*command, "-o", tmp_path / "triplets.tsv")
    triplets = read_pairs(tmp_path / "triplets.tsv", ("q", "d", "negative"))
    assert len(triplets) == 14 * 3
    run(
        *command,
        "--write-as",
        "lists",
        "-o",
        tmp_path / "lists.jsonl",
        "--cross-encoder",
        folder / "scores",
    )
    lists = read_ranking(tmp_path / "lists.jsonl", teacher="score")
    assert lists.labels[0] == [1, 1, 0, 0, 0] and len(lists) == 12
    reranker = fastenc.Reranker.from_pretrained(folder / "scores", activation="Identity")
    scores = reranker.predict([(lists.queries[0], text) for text in lists.documents[0]])
    assert lists.teacher[0] == pytest.approx(scores.tolist(), abs=1e-5)
    for options, message in (
        (("--write-as", "table"), "--write-as must be one of triplets, lists, got table"),
        (("--num-negatives", 0), "--num-negatives must be at least 1, got 0"),
        (("--search", "near"), "--search must be one of exact, faiss, usearch, got near"),
        (("--skip", 3, "--candidates", 4), "--candidates must be at least"),
    ):
        assert message in failure(capsys, *command, *options, "-o", tmp_path / "x.jsonl")
    corpus.write_text("a\ttab\n")
    message = "texts in a .tsv file must have no tabs"
    assert message in failure(capsys, *command, "-o", tmp_path / "x.tsv")
