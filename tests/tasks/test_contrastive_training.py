"""Training of text vectors: sentence-transformers' losses, and batches larger than the memory for activations."""

import json
import random

import pytest
import torch

from fastenc.data import train_tokenizer
from fastenc.models import CrossEncoder, EncoderConfig, SentenceEmbedder, SequenceClassifier
from fastenc.tasks import SentenceEmbedding
from fastenc.tasks.mining import mine_hard_negatives
from fastenc.tasks.reranker import Reranker
from fastenc.testing import assert_within_budget
from tests.helpers.commands import run
from tests.helpers.versions import sentence_transformers_6

# One file serves every loss.
pytestmark = pytest.mark.filterwarnings("ignore:.* has a column '.*', which is not read")

TRIPLES = [
    ("a small dog runs", "the dog is running", "a cat sleeps"),
    ("two men play chess", "men at a game of chess", "nobody sings in the rain"),
    ("a woman sings a song", "a song in the rain and then another one", "dogs"),
    ("it rains", "rain", "a game"),
    ("cats", "a cat sleeps on the mat", "two men"),
]
SCORES = [0.9, 0.2, 0.5, 0.7, 0.0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of random models: what is trained, a guide and a teacher."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([text for row in TRIPLES for text in row], vocab_size=97)
    for seed, (name, cls) in enumerate(
        (("base", SentenceEmbedder), ("guide", SentenceEmbedder), ("teacher", CrossEncoder))
    ):
        torch.manual_seed(seed)
        model = cls(EncoderConfig(97, 32, 2, 2, 64, 64, hidden_dropout_p=0, attention_dropout_p=0))
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.2)
        model.tokenizer = tokenizer
        model.save_pretrained(root / name)
    main = root / "guide" / "config_sentence_transformers.json"
    prompts = {"prompts": {"its": "two men sing "}, "default_prompt_name": "its"}
    main.write_text(json.dumps(json.loads(main.read_text()) | prompts))  # no loss reads it
    rows = [(*row, score) for row, score in zip(TRIPLES, SCORES, strict=True)]
    lines = ["one\tother\thard\tscore", *("\t".join(map(str, row)) for row in rows)]
    (root / "triples.tsv").write_text("\n".join(lines) + "\n")
    return root


def loss_of(folders, **options):
    """(loss of the file's pairs, model after its backward, arguments)."""
    task = SentenceEmbedding(**options)
    data = task.read(folders / "triples.tsv")
    model = task.load(folders / "base", data).train()
    arguments = task.collate(task.encode(data, model))
    loss = model(**arguments).loss
    loss.backward()
    return loss, model, arguments


PAIR, TRIPLE = {"text": ("one", "other")}, {"text": ("one", "other", "hard")}


def peers(model, folders, monkeypatch):
    """name: (our options, sentence-transformers' loss)."""
    from sentence_transformers import CrossEncoder as Teacher
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    guide = SentenceTransformer(str(folders / "guide"), device="cpu")
    ranking = losses.MultipleNegativesRankingLoss(model)
    monkeypatch.setattr(
        random, "sample", lambda among, number: [1]
    )  # the only layer before the last
    of = {
        "matryoshka": (
            TRIPLE | {"matryoshka": (32, 8)},
            losses.MatryoshkaLoss(model, ranking, [32, 8]),
        ),
        "2-D": (
            PAIR | {"matryoshka": (32, 8), "matryoshka_layers": True},
            losses.Matryoshka2dLoss(model, ranking, [32, 8], n_dims_per_step=-1),
        ),
        "gist": (
            PAIR | {"guide": str(folders / "guide"), "scale": 100.0},
            losses.GISTEmbedLoss(model, guide),
        ),
        "gist with hard negatives": (
            TRIPLE | {"guide": str(folders / "guide"), "scale": 100.0},
            losses.GISTEmbedLoss(model, guide),
        ),
        "angle": (
            PAIR | {"similarity": "score", "similarity_loss": "angle"},
            losses.AnglELoss(model),
        ),
        "margin-mse": (TRIPLE | {"teacher": str(folders / "teacher")}, losses.MarginMSELoss(model)),
        "kl": (
            TRIPLE | {"teacher": str(folders / "teacher"), "teacher_loss": "kl"},
            losses.DistillKLDivLoss(model),
        ),
    }
    teacher = Teacher(str(folders / "teacher"), device="cpu", activation_fn=torch.nn.Identity())
    pairs = [(one, each) for one, *others in TRIPLES for each in others]
    scores = torch.from_numpy(teacher.predict(pairs)).view(-1, 2)
    return of, {"angle": torch.tensor(SCORES) / 0.9, "margin-mse": scores, "kl": scores}


@pytest.mark.filterwarnings("ignore:.*teacher:UserWarning")
@pytest.mark.parametrize(
    "loss",
    [
        "matryoshka",
        pytest.param("2-D", marks=sentence_transformers_6),
        *("gist", "gist with hard negatives", "angle", "margin-mse", "kl"),
    ],
)
def test_losses_and_gradients_are_sentence_transformers(loss, folders, monkeypatch):
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(folders / "base"), device="cpu").train()
    of, labels = peers(theirs, folders, monkeypatch)
    options, peer = of[loss]
    ours, model, _ = loss_of(folders, **options)
    columns = list(zip(*TRIPLES, strict=True))[: len(options["text"])]
    expected = peer([theirs.preprocess(list(column)) for column in columns], labels.get(loss))
    expected.backward()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    reference = theirs[0].model
    for name, parameter in {
        "embeddings.word.weight": reference.embeddings.word_embeddings.weight,
        "layers.0.up.weight": reference.encoder.layer[0].intermediate.dense.weight,
        "layers.1.down.bias": reference.encoder.layer[1].output.dense.bias,
    }.items():
        own = model.encoder.get_parameter(name).grad
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(own, parameter.grad, rtol=1e-3, atol=2e-5 * scale)


def test_gradient_caching_gives_the_gradient_of_one_pass(folders):
    whole, model, _ = loss_of(folders, **TRIPLE, matryoshka=(32, 8))
    cached, in_groups, arguments = loss_of(folders, **TRIPLE, matryoshka=(32, 8), tokens_at_once=20)
    assert len(arguments["groups"]) > 3
    exact = SentenceEmbedder.from_pretrained(folders / "base", matryoshka=(32, 8)).double()
    truth = exact(**arguments).loss
    truth.backward()
    assert_within_budget(cached, whole, truth)
    for name, parameter in exact.named_parameters():
        ours, one_pass = (each.get_parameter(name).grad for each in (in_groups, model))
        # The gradient of a key's bias is zero.
        assert_within_budget(
            ours, one_pass, parameter.grad, name, scale=float(one_pass.abs().max())
        )


def test_the_second_pass_drops_what_the_first_dropped_and_keeps_no_activations(
    folders, monkeypatch
):
    task = SentenceEmbedding(**PAIR, tokens_at_once=20)
    data = task.read(folders / "triples.tsv")
    model = SentenceEmbedder(
        EncoderConfig(97, 32, 2, 2, 64, 64, hidden_dropout_p=0.3, attention_dropout_p=0.3)
    )
    model.tokenizer = SentenceEmbedder.from_pretrained(folders / "base").tokenizer
    arguments = task.collate(task.encode(data, model.train()))

    def gradients():
        torch.manual_seed(5)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor
        ):
            loss = model(**arguments).loss
        model.zero_grad()
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters()], sum(kept)

    loss, cached, few = gradients()
    monkeypatch.setattr(
        "fastenc.nn.token_groups.checkpoint", lambda f, *given, use_reentrant: f(*given)
    )
    same, one_pass, many = gradients()
    assert loss == same and few < many / 10
    for ours, theirs in zip(cached, one_pass, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    monkeypatch.undo()
    torch.manual_seed(6)
    assert model(**arguments).loss.item() != loss, "there is dropout"


def test_from_files_to_a_folder_that_needs_no_guide(folders, tmp_path):
    texts = [each for name in ("one", "other", "hard") for each in ("-t", name)]
    guide = tmp_path / "guide"
    (folders / "guide").rename(guide)
    options = ("--guide", guide, "--matryoshka", 32, "--matryoshka", 8, "--tokens-at-once", 40)
    output, data = tmp_path / "run", folders / "triples.tsv"
    task = ("--task", "sentence-embedding", *texts, "--epochs", 1)
    run("finetune", folders / "base", data, *task, *options, "--dev", data, "-o", output)
    guide.rename(folders / "guide")
    kept = json.loads((output / "config.json").read_text())["task_options"]
    assert kept["matryoshka"] == [32, 8] and "guide" not in kept
    metrics = json.loads((output / "metrics.json").read_text())
    run("evaluate", output, data, "-o", tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["map"] == pytest.approx(metrics["map"])
    run(
        "finetune",
        folders / "base",
        data,
        *task,
        "--teacher",
        folders / "teacher",
        "-o",
        tmp_path / "b",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guide": "a", "teacher": "b"}, "got teacher and guide: give one"),
        ({"teacher": "a"}, "third text column with hard negatives"),
        ({"tokens_at_once": 0}, "tokens_at_once must be at least 1, got 0"),
    ],
)
def test_options_that_make_no_sense_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        SentenceEmbedding(**options)


def test_arguments_that_make_no_sense_are_errors(folders):
    for options, message in (
        ({"matryoshka": (8, 64)}, "numbers from 1 to the vectors' width 32, got 64"),
        (
            {"matryoshka_layers": True, "gather": True},
            "exclude each other, .* got both: leave out one",
        ),
        ({"teacher_loss": "mse"}, "teacher_loss must be one of .*got 'mse'"),
    ):
        with pytest.raises(ValueError, match=message):
            SentenceEmbedder.from_pretrained(folders / "base", **options)
    with pytest.raises(
        ValueError, match="needs a model of two layers or more, got 1: leave it out"
    ):
        SentenceEmbedder(EncoderConfig(97, 32, 1, 2, 64, 64), matryoshka_layers=True)


def test_a_teacher_has_one_score_for_a_pair(folders, tmp_path):
    """Of two labels' logits, the margins would be those of a pair's labels, not of two pairs."""
    two = SequenceClassifier(EncoderConfig(97, 32, 1, 2, 64, 64), num_labels=2)
    two.tokenizer = SentenceEmbedder.from_pretrained(folders / "base").tokenizer
    two.save_pretrained(tmp_path)
    task = SentenceEmbedding(**TRIPLE, teacher=str(tmp_path))
    data = task.read(folders / "triples.tsv")
    with pytest.raises(ValueError, match="teacher needs a model with one label, got one with 2"):
        task.encode(data, task.load(folders / "base", data))
    pairs, reranker = [row[:2] for row in TRIPLES], Reranker.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cross_encoder needs a model with one label, got one"):
        mine_hard_negatives(two.encoder, pairs, cross_encoder=reranker)
