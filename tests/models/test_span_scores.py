"""Scores of spans against the reference, which computes one span at a time."""

import pytest
import torch

from fastenc.models.heads.span_scores import BiaffineScores, BoundaryScores
from fastenc.testing import assert_within_budget
from tests.helpers.compiled import compiled_once
from tests.helpers.references import span_scores as reference

WIDTH, SIZE, LABELS, LONGEST = 24, 10, 5, 4
SENTENCES = (5, 1, 13, 3)
MODULES = {
    "boundary": lambda: BoundaryScores(WIDTH, LABELS, SIZE, LONGEST),
    "boundary, lengths": lambda: BoundaryScores(WIDTH, LABELS, SIZE, LONGEST, lengths=True),
    "attention": lambda: BoundaryScores(WIDTH, LABELS, SIZE, LONGEST, attention=True),
    "attention, lengths": lambda: BoundaryScores(WIDTH, LABELS, SIZE, LONGEST, True, True),
    "biaffine": lambda: BiaffineScores(WIDTH, LABELS, SIZE),
}
every_module = pytest.mark.parametrize("name", MODULES)


def all_spans(sentences=SENTENCES, longest=LONGEST):
    """(first, last) of each span, and the window of each word."""
    spans, windows, begin = [], [], 0
    for length in sentences:
        stop = begin + length
        for i in range(begin, stop):
            spans += [(i, j) for j in range(i, min(stop, i + longest))]
            windows.append([min(i + k, stop - 1) for k in range(longest)])
        begin = stop
    return spans, torch.tensor(windows)


def made(name, dtype=torch.float32):
    module = MODULES[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module.to(dtype)


def run(module, words, spans, windows):
    starts, ends = torch.tensor(spans).unbind(1)
    return module(words, windows, starts, ends)


def plain(module, words, spans, dtype):
    """(scores of the reference, the parameters and words that it used) in a dtype."""
    values = {n: p.detach().to(dtype).requires_grad_() for n, p in module.named_parameters()}
    words = words.detach().to(dtype).requires_grad_()
    if isinstance(module, BiaffineScores):
        start, end = values["project.weight"].chunk(2)
        biases = values["bias"].chunk(2)
        bilinear = values["bilinear.weight"].unflatten(0, (LABELS, SIZE + 1))
        scores = reference.biaffine_scores(words, spans, start, end, *biases, bilinear)
    else:
        attention = values.get("attend.weight")
        scores = reference.boundary_scores(
            words,
            spans,
            *values["project.weight"].chunk(3),
            values["bias"],
            values["out.weight"],
            values["out.bias"],
            None if attention is None else attention[0],
            values.get("lengths.weight"),
        )
    return scores, {"words": words, **values}


@every_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_scores_and_gradients_agree_with_the_reference(name, dtype):
    spans, windows = all_spans()
    module = made(name, dtype)
    words = torch.randn(sum(SENTENCES), WIDTH).to(dtype).requires_grad_()
    scores = run(module, words, spans, windows)
    same, values = plain(module, words, spans, dtype)
    truth, exact = plain(module, words, spans, torch.float64)
    assert_within_budget(scores, same, truth)
    dscores = torch.randn(scores.shape).to(dtype)
    scores.backward(dscores)
    same.backward(dscores)
    truth.backward(dscores.double())
    gradients = {"words": words.grad, **{n: p.grad for n, p in module.named_parameters()}}
    assert gradients.keys() == exact.keys()
    for key, gradient in gradients.items():
        assert_within_budget(gradient, values[key].grad, exact[key].grad, key)


def test_first_weights_keep_the_size_of_the_words_vectors():
    """1 / sqrt(width) before each layer; the bilinear form sums over both of its sides."""
    boundary, biaffine = BoundaryScores(400, 3, 225, 30, True, True), BiaffineScores(400, 3, 99)
    for weight, std in (
        (boundary.project.weight, 1 / 20),
        (boundary.attend.weight, 1 / 20),
        (boundary.lengths.weight, 1 / 15),
        (boundary.out.weight, 1 / 15),
        (biaffine.project.weight, 1 / 20),
        (biaffine.bilinear.weight.unflatten(0, (3, 100))[1:], 1 / 100),
    ):
        error = (2 * weight.numel()) ** -0.5  # of an estimated standard deviation
        assert weight.std().item() == pytest.approx(std, rel=4 * error)


@every_module
def test_a_subset_of_spans_in_any_order(name):
    spans, windows = all_spans()
    module, words = made(name), torch.randn(sum(SENTENCES), WIDTH)
    whole = run(module, words, spans, windows)
    chosen = torch.randperm(len(spans))[:7]
    part = run(module, words, [spans[i] for i in chosen.tolist()], windows)
    torch.testing.assert_close(part, whole[chosen])


@every_module
@pytest.mark.parametrize("value", [1e6, float("nan")])
def test_a_sentence_does_not_show_in_the_next(name, value):
    """Prefix sums over the whole batch would lose six digits through the first sentence."""
    spans, windows = all_spans()
    module, words = made(name), torch.randn(sum(SENTENCES), WIDTH)
    words[: SENTENCES[0]] = value
    later = [i for i, (first, _) in enumerate(spans) if first >= SENTENCES[0]]
    scores = run(module, words, spans, windows)[later]
    words[: SENTENCES[0]] = 0
    same, _ = plain(module, words, spans, torch.float32)
    truth, _ = plain(module, words, spans, torch.float64)
    assert_within_budget(scores, same[later], truth[later])


@pytest.mark.parametrize("factor", [1e2, 1e4])
def test_attention_to_words_of_very_different_weight(factor):
    spans, windows = all_spans()
    module, words = made("attention"), torch.randn(sum(SENTENCES), WIDTH)
    with torch.no_grad():
        module.attend.weight.mul_(factor)
    scores = run(module, words, spans, windows)
    same, _ = plain(module, words, spans, torch.float32)
    assert_within_budget(scores, same, plain(module, words, spans, torch.float64)[0])


@every_module
def test_no_spans_and_single_words(name):
    module = made(name)
    none = torch.empty(0, dtype=torch.int64)
    scores = module(torch.empty(0, WIDTH), torch.empty(0, 1, dtype=torch.int64), none, none)
    assert scores.shape == (0, LABELS)
    scores.sum().backward()
    words = torch.randn(3, WIDTH)
    spans, windows = all_spans((1, 2), 1)
    assert windows.shape == (3, 1)
    same, _ = plain(module, words, spans, torch.float32)
    truth, _ = plain(module, words, spans, torch.float64)
    assert_within_budget(run(module, words, spans, windows), same, truth)


@pytest.mark.parametrize("name", ["attention, lengths", "biaffine"])
def test_compiles_as_one_graph(name):
    module = made(name)
    compiled = compiled_once(module)
    for sentences in ((5, 2, 9), (3, 11)):
        spans, windows = all_spans(sentences)
        words = torch.randn(sum(sentences), WIDTH)
        torch.testing.assert_close(
            run(compiled, words, spans, windows), run(module, words, spans, windows)
        )


@every_module
def test_autocast(name):
    spans, windows = all_spans()
    module, words = made(name), torch.randn(sum(SENTENCES), WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        scores = run(module, words, spans, windows)
    assert scores.dtype == torch.bfloat16
    truth, _ = plain(module, words, spans, torch.float64)
    assert (scores - truth).norm() / truth.norm() < 0.02
