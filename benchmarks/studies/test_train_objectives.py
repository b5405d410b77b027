"""The study of objectives at tiny sizes: its peers compute the same losses, and no constant guess is better than
ours."""

import gzip
import json
import math

import pytest
import torch

from benchmarks import _results
from benchmarks.studies import fine_tune_objectives, train_objectives
from benchmarks.studies._constant_guesses import constant_guesses, entropy
from benchmarks.studies._objective_peers import NAMES_OF_PEERS, PEERS
from benchmarks.studies.train_objectives import GUESS, OURS, RESULT, STUDIES
from benchmarks.studies.train_tasks import THEIRS
from fastenc.data.samples import write_samples
from fastenc.models import Encoder
from fastenc.objectives import OBJECTIVES
from fastenc.objectives.distill import TEMPERATURE
from fastenc.objectives.loss_terms import loss_terms
from fastenc.ops.labelled import IGNORED
from fastenc.train import NewModel, ObjectiveOptions

pytest.importorskip("transformers")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Folders of data and results of the test's own, and narrow models."""
    write_samples(tmp_path)
    data = tmp_path / "wikipedia_en"
    data.mkdir()
    with gzip.open(tmp_path / "wiki.txt.gz", "rt") as file:
        documents = file.read().split("\n\n")
    for name, some in (("train", documents[4:]), ("valid", documents[:4])):
        with gzip.open(data / f"{name}.txt.gz", "wt") as file:
            file.write("\n\n".join(some))
    monkeypatch.setenv("FASTENC_DATA", str(tmp_path))
    monkeypatch.setattr(_results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(train_objectives, "WIDTH", 64)
    new = NewModel(vocab_size=200, layers=1, hidden=64)
    options = ObjectiveOptions("mlm+nsp")
    new.make(options, new.make_tokenizer(documents)).save_pretrained(tmp_path / "minilm")
    monkeypatch.setattr(train_objectives, "minilm_folder", lambda: tmp_path / "minilm")
    return tmp_path


def make_run(name, folder):
    if name != "mlm" and not (folder / "mlm").exists():  # the other objectives start from it
        make_run("mlm", folder).trainer.model.save_pretrained(folder / "mlm")
    return train_objectives.Run(name, STUDIES[name], folder)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_peer_has_the_same_loss(name, tiny):
    run = make_run(name, tiny / "runs")
    peer = PEERS[name](str(run.folder / "first"), run.teacher_folder)
    example = run.held_out[0]
    ours = loss_terms(run.trainer.model(**example))
    theirs = peer.terms(example)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        assert mine.weight == other.weight
        torch.testing.assert_close(mine.mean, other.mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mlm+nsp", "mlm+sop", "electra"])
def test_it_begins_with_the_encoder_of_another_model_and_without_dropout(name, tiny):
    model = make_run(name, tiny / "runs").trainer.model
    start = tiny / ("minilm" if STUDIES[name].start == "MiniLM" else "runs/mlm")
    assert model.config.hidden_dropout_p == model.config.attention_dropout_p == 0
    encoder = getattr(model, "discriminator", model).encoder.state_dict()
    stored = Encoder.from_pretrained(start)
    first = {n: w for n, w in stored.state_dict().items() if n not in stored.first_weights}
    assert all(torch.equal(first[n], encoder[n]) for n in first.keys() & encoder.keys())
    pooler = {"pooler.weight", "pooler.bias"}
    assert first.keys() ^ encoder.keys() == (set() if name == "mlm+nsp" else pooler)


def test_the_guess_of_tokens_is_their_frequency(tiny):
    run = make_run("span", tiny / "runs")
    guesses = constant_guesses(run.trainer.model, None, run.held_out, run.counts)
    total = int((run.counts + (run.counts > 0)).sum())
    for name, targets in (
        ("mlm", [e["labels"][e["labels"] != IGNORED] for e in run.held_out]),
        ("sbo", [e["labels"][e["spans"][:, 0]] for e in run.held_out]),
    ):
        losses = [-math.log((run.counts[t] + 1) / total) for t in torch.cat(targets).tolist()]
        assert guesses[name] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_the_guess_of_two_classes_is_their_share(tiny):
    assert entropy(torch.tensor([0, 1, 1, 0])) == pytest.approx(math.log(2))
    assert entropy(torch.tensor([0, 0])) == 0
    run = make_run("electra", tiny / "runs")
    read = []
    keep = lambda _, inputs: read.append(inputs[0].input_ids)
    run.trainer.model.discriminator.register_forward_pre_hook(keep)
    for example in run.held_out:
        run.trainer.model(**example)
    texts = [
        torch.where(e["labels"] == IGNORED, e["batch"].input_ids, e["labels"]) for e in run.held_out
    ]
    texts = torch.cat(texts)
    replaced, known = torch.cat(read) != texts, run.counts[texts] > 0
    guesses = constant_guesses(run.trainer.model, None, run.held_out, run.counts)
    loss = torch.nn.functional.binary_cross_entropy(
        torch.where(known, replaced[known].float().mean(), 0.0), replaced.float()
    )
    assert 0 < guesses["rtd"] == pytest.approx(loss.item(), rel=1e-5)
    assert guesses["rtd"] < entropy(replaced)


def test_no_other_guess_is_nearer_to_the_teacher(tiny):
    run = make_run("distill", tiny / "runs")
    guesses = constant_guesses(run.trainer.model, run.teacher, run.held_out, run.counts)
    goals, states = [], []
    with torch.no_grad():
        for example in run.held_out:
            encoded, table = run.teacher.encode(example["batch"])
            states.append(encoded.last_hidden_state)
            labelled = example["labels"] != IGNORED
            logits = run.teacher.logits(states[-1][labelled], table)
            goals.append((logits / TEMPERATURE).softmax(1).double())
    goals, states = torch.cat(goals), torch.cat(states).double()
    distance = lambda guess: TEMPERATURE**2 * (goals * (goals / guess).log()).sum(1).mean().item()
    assert guesses["kl"] == pytest.approx(distance(goals.mean(0)), rel=1e-3)
    other = goals.mean(0) * torch.linspace(0.9, 1.1, goals.shape[1])
    assert guesses["kl"] < distance(other / other.sum())
    best = torch.nn.functional.normalize(states).mean(0)
    apart = lambda guess: (1 - torch.cosine_similarity(states, guess[None])).mean().item()
    assert guesses["cosine"] == pytest.approx(apart(best), rel=1e-4)
    assert guesses["cosine"] < apart(best + 0.1 * torch.randn_like(best))


def test_both_sides_are_written_and_a_finished_run_is_not_repeated(tiny, monkeypatch):
    command = ["", "mlm+nsp", "--steps", "4", "--peer-steps", "2", "--folder", str(tiny / "runs")]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(train_objectives, "EVALUATIONS", 4)
    make_run("mlm+nsp", tiny / "runs")
    train_objectives.main()
    (result,) = (tiny / "results").rglob(f"{RESULT}.json")
    assert result.with_suffix(".png").exists()
    rows = json.loads(result.read_text())["cases"]["mlm+nsp"]
    for term in ("mlm", "pair"):
        ours, theirs, guess = (
            rows[name]["curves"][term] for name in (OURS, NAMES_OF_PEERS["mlm+nsp"], GUESS)
        )
        assert [step for step, _ in ours] == [step for step, _ in guess] == [0, 1, 2, 3, 4]
        assert [step for step, _ in theirs] == [0, 1, 2]
        torch.testing.assert_close(torch.tensor(ours[:3]), torch.tensor(theirs), rtol=1e-3, atol=0)
    monkeypatch.setattr(train_objectives, "Run", None)
    train_objectives.main()


def test_a_checkpoint_is_fine_tuned_by_both(tiny):
    (tiny / "sst2").mkdir()
    for name in ("train", "dev"):
        with gzip.open(tiny / "sst2" / f"{name}.tsv.gz", "wt") as file:
            file.write((tiny / f"{name}.tsv").read_text())
    first = make_run("electra", tiny / "runs").folder / "first"
    rows = [fine_tune_objectives.one_run(str(first), provider, 0) for provider in (OURS, THEIRS)]
    assert all(0 <= row["dev"] <= 1 for row in rows)
    assert 0 < rows[0]["spread"] == rows[1]["spread"]
