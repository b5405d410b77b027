"""Vectors of texts: losses, files and similarities match sentence-transformers'; the task from files to files."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from fastenc.data import train_tokenizer
from fastenc.data.pairs import TextPairs, collate_pairs, encode_pairs, read_pairs
from fastenc.models import Encoder, EncoderConfig, SentenceEmbedder, SequenceClassifier
from fastenc.models.heads.similarity_losses import (
    angle_similarity,
    cosent_loss,
    kl_distillation,
    margin_distillation,
    ranking_loss,
)
from fastenc.nn.pooling import POOLINGS, pool_layers
from fastenc.packing import pack_sequences
from fastenc.tasks import SentenceEmbedding, task_of
from fastenc.tasks.metrics import retrieval_metrics
from fastenc.train import TrainConfig, task_trainer
from tests.helpers.families import model

TEXTS = [
    "a small dog runs",
    "the dog is running",
    "a cat sleeps",
    "two men play chess",
    "men at a game of chess",
    "nobody sings",
    "a woman sings a song in the rain and then another one",
    "dogs",
    "it rains",
]
PAIRS = [tuple(TEXTS[place : place + 3]) for place in (0, 3, 6)]
SCORES = [0.9, 0.2, 0.5]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=97)


@pytest.fixture
def base(tmp_path, tokenizer):
    """A function that makes a folder with a random encoder of a family, six layers deep."""

    def make(family="bert"):
        layers = {"n_layers": 6} if family == "distilbert" else {"num_hidden_layers": 6}
        model(family, **layers).save_pretrained(tmp_path / family)
        encoder = Encoder.from_pretrained(tmp_path / family)
        encoder.tokenizer = tokenizer
        encoder.save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


def sentence_transformer(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").eval()


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("symmetric", [False, True])
def test_ranking_loss_and_gradient_are_sentence_transformers(columns, symmetric):
    from sentence_transformers.sentence_transformer import losses

    options = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    peer = losses.MultipleNegativesRankingLoss(None, 30.0, **options if symmetric else {})
    ours = torch.randn(7, columns, 24, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    ids = torch.arange(7 * columns).view(7, columns)
    loss = ranking_loss(ours, ids, scale=30.0, symmetric=symmetric)
    expected = peer.compute_loss_from_embeddings(list(theirs.unbind(1)), None)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_what_is_no_negative_is_left_out_of_the_sum():
    """Compared with the sums written out, for batches in which texts, partners and hard negatives recur."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(0, 6, (5, 3), generator=draw)
        vectors = torch.randn(6, 8, dtype=torch.float64, generator=draw)[ids]
        unit = F.normalize(vectors, dim=2)
        forward = backward = 0.0
        for i in range(5):
            term = lambda one, other: math.exp(20 * float(one @ other))
            others = [
                term(unit[i, 0], unit[j, column])
                for j in range(5)
                for column in (1, 2)
                if (j, column) != (i, 1)
                and ids[j, column] not in (ids[i, 0], ids[i, 1])
                and not (column == 1 and ids[j, 0] == ids[i, 0])
            ]
            own = term(unit[i, 0], unit[i, 1])
            forward += math.log1p(sum(others) / own) / 5
            texts = [
                term(unit[i, 1], unit[j, 0])
                for j in range(5)
                if j != i and ids[i, 1] not in (ids[j, 0], ids[j, 1]) and ids[j, 0] != ids[i, 0]
            ]
            backward += math.log1p(sum(texts) / own) / 5
        loss = ranking_loss(vectors, ids)
        assert float(loss) == pytest.approx(forward, rel=1e-5)
        both = ranking_loss(vectors, ids, symmetric=True)
        assert float(both) == pytest.approx((forward + backward) / 2, rel=1e-5)


def test_what_is_no_negative_is_left_out_of_the_sum_with_a_guide():
    """Compared with the sums written out. A text may be the text of one pair and the partner of another."""
    draw = torch.Generator().manual_seed(0)
    left_out = 0
    for _ in range(20):
        ids = torch.randint(0, 7, (5, 3), generator=draw)
        unit = F.normalize(torch.randn(7, 8, dtype=torch.float64, generator=draw), dim=1)[ids]
        given = torch.randn(7, 4, generator=draw)[ids]
        guide = F.normalize(given, dim=2)
        expected = 0.0
        for i in range(5):
            bound = float(guide[i, 0] @ guide[i, 1])
            others = 0.0
            for j in range(5):
                for one, other in ((0, 1), (0, 2), (0, 0), (1, 1)):
                    of_pair = ids[j, other] in (ids[i, 0], ids[i, 1])
                    of_equal = (one, other) == (0, 1) and ids[j, 0] == ids[i, 0]
                    near = float(guide[i, one] @ guide[j, other]) > bound
                    left_out += near and not of_pair and not of_equal
                    if not (of_pair or of_equal or near):
                        others += math.exp(20 * float(unit[i, one] @ unit[j, other]))
            expected += math.log1p(others / math.exp(20 * float(unit[i, 0] @ unit[i, 1]))) / 5
        loss = ranking_loss(unit, ids, guide=given)
        assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert left_out > 100


def test_similarities_of_bfloat16_vectors_are_in_single_precision():
    vectors, ids = torch.randn(6, 3, 32).bfloat16(), torch.arange(18).view(6, 3)
    guide = torch.randn(6, 3, 8).bfloat16()
    for options in ({"symmetric": True}, {"guide": guide}, {"normalize": False, "scale": 0.1}):
        wide = options | ({"guide": guide.double()} if "guide" in options else {})
        truth = ranking_loss(vectors.double(), ids, **wide)
        torch.testing.assert_close(ranking_loss(vectors, ids, **options), truth, check_dtype=False)
    scores = torch.randn(6)
    truth = cosent_loss(vectors[:, 0, 0].double(), scores)
    torch.testing.assert_close(cosent_loss(vectors[:, 0, 0], scores), truth, check_dtype=False)
    for loss in (margin_distillation, kl_distillation):
        teacher = torch.randn(6, 2)
        truth = loss(vectors.double(), teacher)
        torch.testing.assert_close(loss(vectors, teacher), truth, check_dtype=False)


def test_ranking_loss_compiles_whole():
    vectors, ids = torch.randn(4, 3, 8), torch.arange(12).view(4, 3)
    compiled = torch.compile(ranking_loss, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(vectors, ids), ranking_loss(vectors, ids))


def test_autocast_leaves_similarities_in_single_precision():
    vectors, ids = torch.randn(6, 2, 32), torch.arange(12).view(6, 2)
    expected = ranking_loss(vectors, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ranking_loss(vectors, ids), expected)


def test_cosent_loss_and_gradient_are_sentence_transformers():
    from sentence_transformers.sentence_transformer import losses

    peer = losses.CoSENTLoss(None, similarity_fct=lambda a, b: a.mul(b).sum(1))
    ours = torch.randn(9, 16, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    other, scores = torch.randn(9, 16), torch.tensor([0.1, 0.5, 0.5, 1, 0, 0.2, 0.5, 0.9, 0])
    loss = cosent_loss(ours.mul(other).sum(1), scores)
    expected = peer.compute_loss_from_embeddings([theirs, other], scores)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    equal = torch.ones(9)
    assert cosent_loss(ours.sum(1), equal).item() == 0, "nothing to rank"


@pytest.mark.parametrize("width", [8, 7])
def test_angle_similarity_is_sentence_transformers(width):
    from sentence_transformers.util import pairwise_angle_sim

    one, other = torch.randn(2, 20, width)
    torch.testing.assert_close(angle_similarity(one, other), pairwise_angle_sim(one, other))


@pytest.mark.parametrize("loss", ["ranking", "cosent", "cosine"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_models_loss_and_gradients_are_sentence_transformers(base, tmp_path, loss, pooling):
    from sentence_transformers.sentence_transformer import losses

    options = {} if loss == "ranking" else {"similarity_loss": loss}
    ours = SentenceEmbedder.from_pretrained(base(), pooling=pooling, **options)
    ours.save_pretrained(tmp_path / "saved")
    theirs = sentence_transformer(tmp_path / "saved")
    data = TextPairs(PAIRS if loss == "ranking" else [p[:2] for p in PAIRS], [])
    if loss != "ranking":
        data = TextPairs(data.texts, SCORES)
    arguments = collate_pairs(encode_pairs(data, ours.tokenizer, 40))
    model_loss = ours(**arguments).loss
    columns = zip(*data.texts, strict=True)
    features = [theirs.preprocess(list(column)) for column in columns]
    peer = {
        "ranking": losses.MultipleNegativesRankingLoss,
        "cosent": losses.CoSENTLoss,
        "cosine": losses.CosineSimilarityLoss,
    }[loss](theirs)
    expected = peer(features, torch.tensor(SCORES))
    torch.testing.assert_close(model_loss, expected, rtol=1e-4, atol=1e-5)
    model_loss.backward()
    expected.backward()
    reference = theirs[0].model
    pairs = {
        "embeddings.word.weight": reference.embeddings.word_embeddings.weight,
        "layers.0.up.weight": reference.encoder.layer[0].intermediate.dense.weight,
        "layers.4.down.bias": reference.encoder.layer[4].output.dense.bias,
    }
    for name, parameter in pairs.items():
        own = ours.encoder.get_parameter(name).grad
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(own, parameter.grad, rtol=1e-3, atol=1e-4 * scale)


# The files are those of sentence-transformers whatever the family; these differ in what transformers loads.
LOADED = ("bert", "mpnet", "albert", "modernbert", "deberta-v2", "nomic_bert", "longformer", "esm")


@pytest.mark.parametrize("family", LOADED)
def test_saved_folder_gives_sentence_transformers_the_same_vectors(base, tmp_path, family):
    embedder = SentenceEmbedder.from_pretrained(base(family), max_length=8)
    for pooling in POOLINGS:
        folder = tmp_path / pooling
        chosen = SentenceEmbedder.from_pretrained(base(family), pooling=pooling, max_length=8)
        chosen.save_pretrained(folder)
        vectors = embedder.encode(TEXTS, pooling=pooling)
        assert torch.equal(chosen.encode(TEXTS), vectors)
        theirs = sentence_transformer(folder)
        expected = theirs.encode(TEXTS, convert_to_tensor=True)
        torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)
        # The newer names in the files that it writes itself are read too.
        theirs.save_pretrained(str(tmp_path / "again"))
        for written in (folder, tmp_path / "again"):
            again = Encoder.from_pretrained(written)
            assert again.sentence.pooling == pooling and again.sentence.normalize
            assert again.max_tokens == 8
            torch.testing.assert_close(again.encode(TEXTS), vectors, rtol=0, atol=1e-6)
        assert task_of(folder) is SentenceEmbedding


def test_normalisation_is_what_the_folder_declares(base, tmp_path):
    embedder = SentenceEmbedder.from_pretrained(base())
    embedder.save_pretrained(tmp_path / "saved")
    modules = json.loads((tmp_path / "saved" / "modules.json").read_text())
    (tmp_path / "saved" / "modules.json").write_text(json.dumps(modules[:2]))
    plain = Encoder.from_pretrained(tmp_path / "saved")
    assert not plain.sentence.normalize
    expected = sentence_transformer(tmp_path / "saved").encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(plain.encode(TEXTS), expected, rtol=0, atol=1e-5)
    assert (plain.encode(TEXTS, normalize=True).norm(dim=1) - 1).abs().max() < 1e-5
    batch = pack_sequences([[5, 6, 7], [8, 9]])
    loaded = SentenceEmbedder.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded(batch).logits, plain.pooled_vectors(batch, "mean"))


def test_steps_that_are_not_computed_here_are_an_error(base, tmp_path):
    SentenceEmbedder.from_pretrained(base()).save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "modules.json"
    modules = json.loads(file.read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    file.write_text(json.dumps([*modules, dense]))
    with pytest.raises(ValueError, match=r"must be Transformer, Pooling, optionally Dense modules"):
        SentenceEmbedder.from_pretrained(tmp_path / "saved")
    with pytest.warns(UserWarning, match="encode.. without a pooling takes the mean"):
        assert Encoder.from_pretrained(tmp_path / "saved").sentence is None
    file.write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    file.write_text(json.dumps([modules[0], {**modules[1], "path": "../1_Pooling"}]))
    with pytest.raises(ValueError, match=r"must name files inside its folder, got '../1_Pooling'"):
        SentenceEmbedder.from_pretrained(tmp_path / "saved")
    file.write_text(json.dumps(modules))
    pooling = tmp_path / "saved" / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": "weightedmean"}))
    with pytest.raises(ValueError, match=r"must pool by one of cls, mean, max, .*got .*weighted"):
        SentenceEmbedder.from_pretrained(tmp_path / "saved")
    # A pooling that is given replaces a declared one, if the declared one can be read.
    pooling.write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": ["cls"]}))
    assert SentenceEmbedder.from_pretrained(tmp_path / "saved").settings.pooling == "cls"
    given = SentenceEmbedder.from_pretrained(tmp_path / "saved", pooling="max")
    assert given.settings.pooling == "max"
    main = tmp_path / "saved" / "config_sentence_transformers.json"
    main.write_text(json.dumps({"default_prompt_name": "text", "prompts": {"query": "query: "}}))
    with pytest.raises(ValueError, match="default_prompt_name must be the name of one of the prom"):
        SentenceEmbedder.from_pretrained(tmp_path / "saved")


def test_last_four_is_the_mean_of_layers_and_tokens(base):
    encoder = Encoder.from_pretrained(base())
    batch = pack_sequences([[5, 6, 7], [8], [9, 10]])
    states = encoder(batch, output_hidden_states=True).hidden_states
    mean = torch.stack(states[-4:]).mean(0)
    expected = torch.stack([part.mean(0) for part in mean.split([3, 1, 2])])
    torch.testing.assert_close(encoder.pooled_vectors(batch, "last-four"), expected)
    with pytest.raises(ValueError, match="last-four needs 4 layers, the model has 3: take mean"):
        pool_layers(states[:4], batch.cu_seqlens, "last-four")


def test_arguments_that_make_no_sense_are_errors(base):
    folder = base()
    for options, message in (
        ({"pooling": "sum"}, r"pooling must be one of .*got 'sum'"),
        ({"similarity_loss": "dot"}, r"similarity_loss must be one of .*got 'dot'"),
        ({"scale": 0.0}, r"scale must be positive and finite, got 0.0"),
        ({"scale": math.inf}, r"scale must be positive and finite, got inf"),
    ):
        with pytest.raises(ValueError, match=message):
            SentenceEmbedder.from_pretrained(folder, **options)
    embedder = SentenceEmbedder.from_pretrained(folder)
    with pytest.raises(ValueError, match="the loss needs text_ids"):
        embedder(pack_sequences([[5], [6]]), torch.arange(1))
    with pytest.raises(ValueError, match=r"ranking_loss needs vectors \(pairs, 2 or 3"):
        ranking_loss(torch.ones(2, 4, 8), torch.ones(2, 4))


def test_a_fine_tuned_head_is_not_lost_in_silence(tmp_path, tokenizer):
    config = EncoderConfig(tokenizer.get_vocab_size(), 32, 1, 2, 64, 64)
    model = SequenceClassifier(config, label_names=["no", "yes"])
    model.tokenizer = tokenizer
    model.save_pretrained(tmp_path)
    message = "was fine-tuned for another task: it holds BertForSequenceClassification, this is Sen"
    with pytest.raises(ValueError, match=message):
        SentenceEmbedder.from_pretrained(tmp_path)


@pytest.mark.parametrize("texts_at_once", [1024, 7])
def test_retrieval_is_scikit_learns(texts_at_once, monkeypatch):
    from sklearn.metrics import (
        label_ranking_average_precision_score,
        ndcg_score,
        top_k_accuracy_score,
    )

    monkeypatch.setattr("fastenc.tasks.metrics.TEXTS_AT_ONCE", texts_at_once)
    vectors = torch.randn(60, 3, 6)
    texts = [(f"text {i}", f"partner {i}", f"negative {i}") for i in range(60)]
    metrics = retrieval_metrics(texts, vectors)
    unit = F.normalize(vectors, dim=2)
    scores = unit[:, 0] @ torch.cat([unit[:, 1], unit[:, 2]]).T
    relevant = torch.eye(60, 120)
    recall = lambda k: top_k_accuracy_score(range(60), scores.numpy(), k=k, labels=range(120))
    ranks = 1 + (scores > scores[:, :60].diag()[:, None]).sum(1)
    expected = {
        "ndcg@10": ndcg_score(relevant.numpy(), scores.numpy(), k=10),
        "mrr@10": float(torch.where(ranks <= 10, 1 / ranks, 0).mean()),
        "map": label_ranking_average_precision_score(relevant.numpy(), scores.numpy()),
        "recall@10": recall(10),
        "recall@1": recall(1),
    }
    assert metrics == pytest.approx(expected)


def test_retrieval_counts_no_other_partner_and_no_copy_of_the_text_against_a_partner():
    angles = {"a": 0, "b": 20, "c": 10, "d": 60}
    unit = lambda angle: torch.tensor([math.cos(angle), math.sin(angle)])
    vector = {text: unit(math.radians(angle)) for text, angle in angles.items()}
    texts = [("a", "b"), ("a", "c"), ("d", "a")]
    vectors = torch.stack([torch.stack([vector[one], vector[other]]) for one, other in texts])
    # c and a are nearer to a than b is. They count only for d, whose partner is a.
    metrics = retrieval_metrics(texts, vectors)
    assert metrics["map"] == pytest.approx((1 + 1 + 1 / 3) / 3)
    assert metrics["recall@1"] == pytest.approx(2 / 3)
    # A model with the same vector for every text finds nothing.
    same = retrieval_metrics([("a", "b"), ("c", "d"), ("e", "f")], torch.ones(3, 2, 4))
    assert same["map"] == pytest.approx(1 / 3) and same["recall@1"] == 0.0


WORDS = {"dog": "hound", "car": "vehicle", "house": "home", "sea": "ocean", "road": "street"}
PLACES = ["here", "there", "above", "below", "inside", "behind"]


@pytest.fixture
def tables(tmp_path):
    """Pairs with the same meaning in other words, with a hard negative for each; and pairs with scores."""
    rows = [(one, other, place) for one, other in WORDS.items() for place in PLACES]
    opposite = dict(zip(PLACES, [*PLACES[1:], PLACES[0]], strict=True))
    lines = ["sentence1\tsentence2\tnegative"]
    lines += [f"a {a} is {p}\t{p} is the {b}\tthe {b} is not {opposite[p]}" for a, b, p in rows]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    others = [*rows[7:], *rows[:7]]
    lines = ["sentence1\tsentence2\tscore"]
    for (a, b, p), (_, far, q) in zip(rows, others, strict=True):
        lines += [f"a {a} is {p}\t{p} is the {b}\t5", f"a {a} is {p}\t{q} is the {far}\t0"]
        lines += [f"a {a} is {p}\t{q} is the {b}\t2.5"]
    (tmp_path / "scored.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def start(tables):
    from fastenc.models import EncoderConfig

    texts = [text for row in read_pairs(tables / "scored.tsv").texts for text in row]
    config = EncoderConfig(
        vocab_size=200,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        max_positions=32,
    )
    torch.manual_seed(0)
    encoder = Encoder(config)
    encoder.tokenizer = train_tokenizer(texts, vocab_size=200)
    encoder.save_pretrained(tables / "start")
    return tables / "start"


@pytest.mark.filterwarnings("ignore:.* has a column 'negative', which is not read")
@pytest.mark.parametrize(
    "options,file,metric",
    [
        ({"symmetric": True}, "pairs.tsv", "map"),
        ({"text": ("sentence1", "sentence2", "negative")}, "pairs.tsv", "ndcg@10"),
        ({"similarity": "score"}, "scored.tsv", "spearman"),
        ({"similarity": "score", "similarity_loss": "cosine"}, "scored.tsv", "spearman"),
    ],
)
def test_training_learns_its_pairs(tables, start, options, file, metric):
    task = SentenceEmbedding(**options)
    train = task.read(tables / file)
    embedder = task.load(start, train)
    before = task.evaluate(embedder, train, task.encode(train, embedder))
    config = TrainConfig(str(tables / "run"), epochs=5, batch_size=16, learning_rate=5e-3)
    metrics = task_trainer(task, embedder, train, config, dev=train).train()
    assert metrics[metric] > before[metric] + 0.2, (before, metrics)
    assert metrics["loss"] < before["loss"]
    loaded = task.load(tables / "run")
    again = task.evaluate(loaded, train, task.encode(train, loaded))
    assert again[metric] == pytest.approx(metrics[metric])


def test_from_files_to_files(tables, start):
    from tests.helpers.commands import run

    scored, output = tables / "scored.tsv", tables / "run"
    run(
        *("finetune", start, scored, "--task", "sentence-embedding", "--dev", scored, "-o", output),
        *("--similarity", "score", "--pooling", "max", "--lr", 3e-3, "--max-steps", 4),
        *("--adapt", "lora", "--adapt-size", 2),
    )
    run("predict", output, scored, "-o", tables / "similarity.tsv")
    lines = (tables / "similarity.tsv").read_text().splitlines()
    pairs = read_pairs(scored).texts
    assert lines[0] == "similarity" and len(lines) == 1 + len(pairs)
    (tables / "texts.txt").write_text("\n".join(text for pair in pairs for text in pair) + "\n")
    run("embed", output, tables / "texts.txt", "-o", tables / "vectors.npy")
    import numpy

    vectors = numpy.load(tables / "vectors.npy").reshape(len(pairs), 2, 32)
    cosines = (vectors[:, 0] * vectors[:, 1]).sum(1)
    numpy.testing.assert_allclose(cosines, [float(line) for line in lines[1:]], atol=2e-6)


def test_prompts_of_the_training_are_found_by_sentence_transformers(tables, start):
    from tests.helpers.commands import run

    pairs, output = tables / "plain.tsv", tables / "run"
    rows = ["\t".join(pair) for pair in read_pairs(tables / "pairs.tsv").texts]
    pairs.write_text("\n".join(["sentence1\tsentence2", *rows]) + "\n")
    run(
        *("finetune", start, pairs, "--task", "sentence-embedding", "-o", output, "--max-steps", 1),
        *("--query-prompt", "dog: ", "--document-prompt", "car: "),
    )
    run("predict", output, pairs, "-o", tables / "similarity.tsv")
    similarities = (tables / "similarity.tsv").read_text().splitlines()[1:]
    theirs = sentence_transformer(output)
    assert theirs.prompts["query"] == "dog: " and theirs.prompts["document"] == "car: "
    texts, partners = zip(*read_pairs(pairs).texts, strict=True)
    queries = theirs.encode_query(list(texts), convert_to_tensor=True)
    documents = theirs.encode_document(list(partners), convert_to_tensor=True)
    expected = F.cosine_similarity(queries, documents).tolist()
    assert [*map(float, similarities)] == pytest.approx(expected, abs=1e-5)
    ours = Encoder.from_pretrained(output).encode(list(texts), prompt_name="query")
    torch.testing.assert_close(ours, queries, rtol=0, atol=1e-5)
    # A further training adds its prompts to those of the checkpoint.
    again = SentenceEmbedder.from_pretrained(output, prompts={"query": "sea: "})
    assert again.settings.prompts == {"query": "sea: ", "document": "car: "}
    again.encoder.sentence = replace(again.settings, include_prompt=False)
    with pytest.raises(ValueError, match="pools a text without the tokens of its prompt"):
        SentenceEmbedding(query_prompt="dog: ").encode(read_pairs(pairs), again)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"columns": ("sentence1",)}, r"text must name the columns .*use fastenc embed"),
        (
            {"columns": ("sentence1", "sentence2", "score"), "similarity": "score"},
            r"text must name the columns",
        ),
        ({"similarity": "sentence1"}, r"line 2: .* must be a number, got 'a dog is here'"),
        (
            {"similarity": "score", "highest": 4.0},
            r"line 2: the absolute value of a score must be at most 4.0",
        ),
        ({"similarity": "score", "highest": 0.0}, r"the highest score must be positive, got 0.0"),
    ],
)
def test_bad_pairs_are_errors_with_their_place(tables, options, message):
    with pytest.raises(ValueError, match=message):
        read_pairs(tables / "scored.tsv", **options)


@pytest.mark.parametrize("empty", ["", "\u200d"])
@pytest.mark.parametrize("similarity", [None, "score"])
def test_pairs_to_learn_from_have_tokens(tmp_path, tokenizer, similarity, empty):
    path = tmp_path / "x.tsv"
    rows = ["sentence1\tsentence2\tscore", "a dog\tdogs\t1", f"a cat\t{empty}\t2"]
    path.write_text("\n".join(rows), encoding="utf-8")
    with pytest.raises(ValueError, match=r"x.tsv, line 3 has no tokens, got '.*': leave out"):
        encode_pairs(read_pairs(path, similarity=similarity), tokenizer, 16)
    inputs = SentenceEmbedding().read_inputs(path)
    assert len(encode_pairs(inputs, tokenizer, 16)) == 2
    # A prompt is no text.
    with pytest.raises(ValueError, match=r"x.tsv, line 3 has no tokens, got '.*': leave out"):
        encode_pairs(read_pairs(path, similarity=similarity), tokenizer, 16, ("a dog: ", "a cat: "))


def test_a_text_is_no_negative_of_itself_under_another_prompt(base, tokenizer):
    prompts = {"query_prompt": "dogs: ", "document_prompt": "cats: "}
    task, embedder = SentenceEmbedding(**prompts), SentenceEmbedder.from_pretrained(base())
    examples = task.encode(TextPairs([("a dog", "a cat"), ("two cats", "a dog")], []), embedder)
    assert examples[0].texts == tuple(
        tokenizer.encode(t).ids for t in ("dogs: a dog", "cats: a cat")
    )
    with torch.no_grad():
        output = embedder.eval()(**task.collate(examples))
    # "a dog" has no negative, "two cats" one.
    cat, dog = (float(output.logits[1, 0] @ each) for each in output.logits[:, 1])
    assert float(output.loss) == pytest.approx(math.log1p(math.exp(20 * (cat - dog))) / 2, rel=1e-5)


def test_texts_with_the_same_tokens_have_the_same_number(tokenizer):
    data = TextPairs([("a dog", "a cat", "dogs"), ("a  cat", "a dog", "cats")], [])
    for prompts in (("", ""), ("dogs: ", "cats: ")):
        (dog, cat, dogs), other = (e.text_ids for e in encode_pairs(data, tokenizer, 16, prompts))
        assert other[:2] == (cat, dog) and len({dog, cat, dogs, other[2]}) == 4


def test_a_prompt_is_put_before_each_text_and_cut_with_it(tokenizer):
    data = TextPairs([("a dog", "a cat", "dogs"), ("two cats", "a dog", "a cat runs")], [])
    for length in (4, 6, 64):
        examples = encode_pairs(data, tokenizer, length, ("dogs: ", "cats: "))
        for (text, *others), example in zip(data.texts, examples, strict=True):
            prompted = [f"dogs: {text}", *(f"cats: {other}" for other in others)]
            whole = [tokenizer.encode(each).ids for each in prompted]
            cut = (ids if len(ids) <= length else [*ids[: length - 1], ids[-1]] for ids in whole)
            assert example.texts == tuple(cut)


@pytest.mark.parametrize(
    "file,message",
    [
        ("pairs.tsv", "'negative', .* give -t sentence1 -t sentence2 -t negative"),
        ("scored.tsv", "'score', .* give --similarity score to learn the scores"),
    ],
)
def test_a_column_that_is_not_learnt_is_named(tables, file, message):
    with pytest.warns(UserWarning, match=message):
        train = SentenceEmbedding().read(tables / file)
    assert len(train.texts[0]) == 2 and not train.scores


@pytest.mark.parametrize(
    "options,message",
    [
        (
            {"similarity_loss": "angle"},
            "similarity_loss is for the loss with similarity, got 'angle'",
        ),
        (
            {"highest_similarity": 5.0},
            "highest_similarity is for the loss with similarity, got 5.0",
        ),
        ({"teacher_loss": "kl"}, "teacher_loss is for the loss with teacher, got 'kl'"),
        (
            {"similarity": "score", "gather": True},
            "gather is not for the loss with similarity, got both",
        ),
        (
            {"similarity": "score", "symmetric": True},
            "symmetric is not for the loss with similarity",
        ),
        (
            {"similarity": "score", "similarity_loss": "cosine", "scale": 3.0},
            "scale is not for similarity_loss cosine, got 3.0: leave it out",
        ),
        ({"guide": "a", "symmetric": True}, "symmetric is not for the loss with guide"),
    ],
)
def test_an_option_of_another_loss_is_refused_in_training(tables, options, message):
    task = SentenceEmbedding(**options)
    with pytest.raises(ValueError, match=message):
        task.read(tables / "scored.tsv")
    if "similarity" in options:  # a model of pairs is measured on scores
        assert task.read(tables / "scored.tsv", TextPairs([], [])).scores


def test_a_dev_set_of_triplets_needs_no_negatives(tables):
    task = SentenceEmbedding(text=("sentence1", "sentence2", "negative"))
    train = task.read(tables / "pairs.tsv")
    dev = task.read(tables / "scored.tsv", train)
    assert len(train.texts[0]) == 3 and len(dev.texts[0]) == 2


def test_the_first_dimensions_alone_are_measured(tables, start):
    task = SentenceEmbedding(similarity="score", truncate_dim=8)
    data = task.read(tables / "scored.tsv")
    embedder = task.load(start, data)
    vectors = task.predict(embedder, data)
    cut = F.normalize(vectors[..., :8], dim=2)
    expected = spearmanr((cut[:, 0] * cut[:, 1]).sum(1), data.scores).statistic
    assert task.score(embedder, data, vectors)["spearman"] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="truncate_dim must be at least 1, got 0"):
        SentenceEmbedding(truncate_dim=0)
    too_many = SentenceEmbedding(similarity="score", truncate_dim=33)
    with pytest.raises(ValueError, match="at most the vectors' width 32, got 33"):
        too_many.encode(data, embedder)  # before the training


def test_scores_are_shares_of_the_highest(tables):
    task = SentenceEmbedding(similarity="score")
    train = task.read(tables / "scored.tsv")
    assert set(train.scores) == {0.0, 0.5, 1.0} and train.highest == 5
    (tables / "low.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\n")
    assert task.read(tables / "low.tsv", train).scores == [0.2]
    assert SentenceEmbedding(similarity="score", highest_similarity=2.0).read(
        tables / "low.tsv"
    ).scores == [0.5]
    (tables / "low.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t-6\n")
    with pytest.raises(ValueError, match=r"line 2: the absolute value .* at most 5.0, .*got -6.0"):
        task.read(tables / "low.tsv", train)


def test_minilm_ranks_sts_pairs_as_it_is_known_to(data_dir, tmp_path):
    """all-MiniLM-L6-v2 is listed with a Spearman correlation of 82.03 on the STS benchmark's test set (MTEB)."""
    from fastenc.demo.checkpoint import minilm_folder

    task = SentenceEmbedding(similarity="score")
    data = task.read(data_dir / "stsb" / "en_test.tsv.gz")
    embedder = task.load(minilm_folder())
    metrics = task.score(embedder, data, task.predict(embedder, data))
    assert metrics["spearman"] == pytest.approx(0.8203, abs=5e-4)
