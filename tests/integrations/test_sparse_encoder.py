"""SPLADE: our SparseEncoder and the patched one of sentence-transformers against the unpatched one."""

import copy
import math

import pytest
import torch

import fastenc
from fastenc.data.pairs import TextPairs, collate_pairs, encode_pairs
from fastenc.models import SparseEncoder
from tests.helpers.extension import needs_cpp
from tests.helpers.hub_models import MODELS
from tests.helpers.resident_memory import bytes_at_peak

st = pytest.importorskip("sentence_transformers")
sparse = pytest.importorskip("sentence_transformers.sparse_encoder")
PAIRS = [
    ("a river", "the water that flows to the sea", "a film of a town"),
    ("songs", "music with words", "many houses stand at the river"),
    ("a long story of a town", "it was built in old times", "words"),
]
TEXTS = [text for row in PAIRS for text in row]
MODES = [(p, activation) for p in ("max", "sum") for activation in ("relu", "log1p_relu")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("splade")
    MODELS["naver/splade-v3"](path)
    return path


def theirs_of(folder, pooling="max", activation="relu"):
    model = st.SparseEncoder(str(folder), device="cpu")
    model[1].pooling_strategy, model[1].activation_function = pooling, activation
    model[0].model.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def their_loss(model, pairs=PAIRS):
    """SpladeLoss on the pairs, and the gradient of every weight by its name."""
    ranking = sparse.losses.SparseMultipleNegativesRankingLoss(model, scale=1.0)
    weights = {"query_regularizer_weight": 3e-3, "document_regularizer_weight": 2e-3}
    loss = sparse.losses.SpladeLoss(model, ranking, **weights)
    columns = [model.preprocess(list(column)) for column in zip(*pairs, strict=True)]
    model.train()  # encode() left it in evaluation
    total = sum(loss(columns, None).values())
    parameters = dict(model[0].model.named_parameters())
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return total.detach(), dict(zip(parameters, gradients, strict=True))


def assert_same(ours, theirs):
    assert ours[1].keys() == theirs[1].keys()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    # A few of 270,000 maxima have two tokens within rounding, and either may take the gradient. The gradients of keys'
    # biases are 0 but for rounding.
    largest = max(float(g.norm()) for g in theirs[1].values() if g is not None)
    for name, gradient in theirs[1].items():
        if gradient is None:
            assert ours[1][name] is None or not ours[1][name].any(), name
            continue
        error = float((ours[1][name] - gradient).norm())
        assert error <= 1e-3 * float(gradient.norm()) + 1e-6 * largest, name


@pytest.mark.parametrize("pooling,activation", MODES)
def test_a_patched_sparse_encoder_has_the_same_numbers(folder, pooling, activation):
    model = theirs_of(folder, pooling, activation)
    expected, loss = model.encode(TEXTS), their_loss(model)
    patched = copy.deepcopy(model)
    fastenc.patch(patched)
    torch.testing.assert_close(patched.encode(TEXTS).to_dense(), expected.to_dense())
    assert_same(their_loss(patched), loss)
    features = patched.preprocess(TEXTS[:2])
    rows = lambda: patched(dict(features))["token_embeddings"].shape[1]
    # One row of weights where nothing else can see the logits; the first step alone gives all logits.
    assert rows() == 1
    assert patched[0](dict(features))["token_embeddings"].shape[1] > 1
    hook = patched[1].register_forward_pre_hook(lambda *_: None)
    assert rows() > 1
    hook.remove()
    fastenc.unpatch(patched)
    assert all("forward" not in each.__dict__ for each in (patched, patched[1])) and rows() > 1


@pytest.mark.parametrize("pooling,activation", MODES)
@pytest.mark.parametrize("tokens_at_once", [None, 12])
def test_our_sparse_encoder_has_the_same_numbers_and_files(
    folder, tmp_path, pooling, activation, tokens_at_once
):
    model = theirs_of(folder, pooling, activation)
    model.save_pretrained(str(tmp_path / "theirs"))
    regularisers = {"query_flops": 3e-3, "document_flops": 2e-3}
    ours = SparseEncoder.from_pretrained(tmp_path / "theirs", **regularisers)
    expected = model.encode(TEXTS).to_dense()
    weights = ours.encode_sparse(TEXTS, convert_to_tensor=True, batch_size=4)
    torch.testing.assert_close(weights.to_dense(), expected, rtol=1e-5, atol=1e-6)
    ours.save_pretrained(tmp_path / "ours")
    again = st.SparseEncoder(str(tmp_path / "ours"), device="cpu").encode(TEXTS).to_dense()
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-6)
    data = TextPairs(PAIRS, [])
    examples = encode_pairs(data, ours.own_tokenizer(), ours.max_tokens)
    arguments = collate_pairs(examples, tokens_at_once)
    assert tokens_at_once is None or len(arguments["groups"]) > 2
    output = ours(**arguments)
    names = ours.family_names(with_prefix=True)
    parameters = dict(ours.named_parameters())
    gradients = torch.autograd.grad(output.loss, list(parameters.values()))
    by_name = {
        theirs: part
        for (ours_name, _), gradient in zip(parameters.items(), gradients, strict=True)
        for theirs, part in zip(
            names[ours_name],
            ours.parts(ours_name, gradient, len(names[ours_name])),
            strict=True,
        )
    }
    loss, theirs = their_loss(model)
    known = {name: theirs.get(name) for name in by_name}
    assert sum(each is not None for each in known.values()) == len(known)
    assert_same((output.loss.detach(), by_name), (loss, known))


@needs_cpp
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_a_training_step_takes_at_most_a_sixth_of_the_memory(folder, tmp_path, pooling):
    """With 30,522 tokens: 4 pairs of texts of 128 tokens, of which none is padded."""
    model = theirs_of(folder, pooling)
    model.save_pretrained(str(tmp_path))
    regularisers = {"query_flops": 3e-3, "document_flops": 2e-3}
    ours, patched = SparseEncoder.from_pretrained(tmp_path, **regularisers), copy.deepcopy(model)
    fastenc.patch(patched)
    text = " ".join(["river"] * 126)
    pairs = [(text, text)] * 4
    examples = encode_pairs(TextPairs(pairs, []), ours.own_tokenizer(), ours.max_tokens)
    arguments, weights = collate_pairs(examples), list(ours.train().parameters())
    assert arguments["batch"].total_tokens == 1024 and ours.config.vocab_size == 30_522
    steps = {
        "theirs": lambda: their_loss(model, pairs),
        "patched": lambda: their_loss(patched, pairs),
        "ours": lambda: torch.autograd.grad(ours(**arguments).loss, weights),
    }
    peaks = {}
    for name, step in steps.items():
        step()  # allocates what later steps reuse
        peaks[name] = min(bytes_at_peak(step) for _ in range(2))  # other memory may grow beside it
    assert peaks["theirs"] > 4 * 1024 * 30_522, "all logits"
    assert max(peaks["ours"], peaks["patched"]) < peaks["theirs"] / 6, peaks


def test_dictionaries_hold_the_heaviest_tokens_first(folder):
    model = SparseEncoder.from_pretrained(folder)
    expected = theirs_of(folder).eval()
    text = TEXTS[1]
    weights = model.encode_sparse(text)
    decoded = dict(expected.decode(expected.encode(text)))
    assert weights == pytest.approx(decoded, rel=1e-4, abs=1e-6) and len(weights) > 4
    assert [*weights.values()] == sorted(weights.values(), reverse=True)
    few = model.encode_sparse([text, TEXTS[2]], max_active=3)
    assert [*few[0].items()] == [*weights.items()][:3] and len(few) == 2
    row = model.encode_sparse(text, convert_to_tensor=True)
    assert row.shape == (model.config.vocab_size,) and row.is_sparse
    assert model.encode_sparse([], convert_to_tensor=True).shape == (0, model.config.vocab_size)


def test_bad_settings_are_named(folder, tmp_path):
    model = SparseEncoder.from_pretrained(folder)
    for call, message in (
        (lambda: SparseEncoder(model.config, pooling="mean"), "pooling must be one of"),
        (lambda: SparseEncoder(model.config, scale=0), "scale must be positive and finite, got 0"),
        (lambda: SparseEncoder(model.config, scale=math.inf), "scale must be .* finite, got inf"),
        (
            lambda: SparseEncoder(model.config, query_flops=-1),
            "query_flops must be finite and at least 0, got -1",
        ),
        (
            lambda: SparseEncoder(model.config, document_flops=math.inf),
            "document_flops must be finite and at least 0, got inf",
        ),
        (lambda: model.encode_sparse("a", max_active=0), "max_active must be at least 1, got 0"),
        (lambda: model.encode_sparse(["a", 3]), "encode takes texts, got 3 as text 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    model.save_pretrained(tmp_path)
    file = tmp_path / "modules.json"
    of_splade = file.read_text()
    for name, other, message in (
        ("MLMTransformer", "Router", "got Router, SpladePooling: use sentence-transformers"),
        ("SpladePooling", "Pooling", "got MLMTransformer, Pooling: it gives dense vectors"),
    ):
        file.write_text(of_splade.replace(f"models.{name}", f"models.{other}"))
        with pytest.raises(ValueError, match=message):
            SparseEncoder.from_pretrained(tmp_path)
