"""The Triton kernels behind the CRF's ops: on a GPU, or interpreted."""

import pytest
import torch

from fastenc import nn as fnn
from fastenc.ops import crf_decode, crf_decode_nbest, crf_log_likelihood, crf_marginals
from fastenc.reference import crf as reference
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import offsets_of
from tests.helpers.crf import LENGTHS, NAMES, forbid, inputs, likelihood


def on(target, values, tags, cu_seqlens):
    leaves = [value.detach().to(target.device).requires_grad_() for value in values]
    return leaves, tags.to(target.device), cu_seqlens.to(target.device)


def check_against_float64(target, values, tags, cu_seqlens, **options):
    values, tags, cu_seqlens = on(target, values, tags, cu_seqlens)
    weights = torch.randn(cu_seqlens.shape[0] - 1, device=target.device)
    wide = [value.detach().double().requires_grad_() for value in values]
    results = (
        (likelihood(values, tags, cu_seqlens, **{"impl": target.impl, **options}), values),
        (likelihood(values, tags, cu_seqlens, reference.log_likelihood), values),
        (likelihood(wide, tags, cu_seqlens, reference.log_likelihood), wide),
    )
    assert_within_budget(*(result for result, _ in results), "log-likelihood")
    gradients = [torch.autograd.grad(y, v, weights.to(y.dtype)) for y, v in results]
    for name, *triple in zip(NAMES, *gradients, strict=True):
        assert_within_budget(*triple, f"d{name}")


@pytest.mark.parametrize("num_tags", [1, 2, 9, 16, 25, 33, 64])
def test_likelihood_and_every_gradient_keep_the_budget(triton_target, num_tags):
    lengths = LENGTHS if num_tags < 33 else (1, 0, 7, 2)
    check_against_float64(triton_target, *inputs(num_tags, lengths))


@pytest.mark.parametrize("score", [-1e4, -float("inf")])
def test_forbidden_transitions_keep_the_budget(triton_target, score):
    values, _, cu_seqlens = inputs(9)
    forbid(values, [(0, 1), (3, 3), (8, 2)], score)
    with torch.no_grad():
        values[1][1] = values[2][4] = score
    tags = torch.full((sum(LENGTHS),), 5)
    check_against_float64(triton_target, values, tags, cu_seqlens)


def test_confident_emissions_and_long_sequences_keep_the_budget(triton_target):
    check_against_float64(triton_target, *inputs(9, scale=30.0))
    check_against_float64(triton_target, *inputs(5, (250,)))


def test_more_sequences_than_programs_keep_the_budget(triton_target, monkeypatch):
    from fastenc.kernels import crf

    monkeypatch.setattr(crf, "PROGRAMS", 3)
    check_against_float64(triton_target, *inputs(4, (3, 1, 0, 5, 2, 2, 4)))


def test_unused_tokens_are_as_if_cut_off(triton_target):
    lengths, used = (4, 0, 7, 3), (4, 0, 5, 0)
    values, tags, cu_seqlens = inputs(9, lengths)
    kept = torch.cat([torch.arange(n) < u for n, u in zip(lengths, used, strict=True)])
    with torch.no_grad():
        values[0][~kept] = float("nan")
    seqused = torch.tensor(used, dtype=torch.int32, device=triton_target.device)
    moved, moved_tags, moved_offsets = on(triton_target, values, tags, cu_seqlens)
    options = {"seqused": seqused, "impl": triton_target.impl}
    ours = likelihood(moved, moved_tags, moved_offsets, **options)
    wide = [value.detach().double().requires_grad_() for value in values]
    cut = [wide[0][kept], *wide[1:]]
    truth = likelihood(cut, tags[kept], offsets_of(used), reference.log_likelihood)
    torch.testing.assert_close(ours.cpu().double(), truth, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(y.sum(), v) for y, v in ((ours, moved), (truth, wide))]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one.cpu().double(), two, rtol=1e-4, atol=1e-5)
    scores = [value.detach() for value in moved[1:]]
    path, best = crf_decode(moved[0].detach(), moved_offsets, *scores, **options)
    parameters = [value.detach() for value in values[1:]]
    expected = reference.decode(values[0].detach()[kept], offsets_of(used), *parameters)
    assert torch.equal(path.cpu()[kept], expected[0]) and not path.cpu()[~kept].any()
    torch.testing.assert_close(best.cpu(), expected[1])


@pytest.mark.parametrize("num_tags", [1, 9, 25, 60])
def test_best_path_and_its_score(triton_target, num_tags):
    values, tags, cu_seqlens = inputs(num_tags, LENGTHS if num_tags < 60 else (6, 1))
    if num_tags > 1:
        forbid(values, [(0, 1), (1, 1)], -float("inf"))
    values, _, cu_seqlens = on(triton_target, values, tags, cu_seqlens)
    emissions, *scores = (value.detach() for value in values)
    path, best = crf_decode(emissions, cu_seqlens, *scores, impl=triton_target.impl)
    expected_path, expected_best = reference.decode(emissions, cu_seqlens, *scores)
    assert torch.equal(path, expected_path)
    torch.testing.assert_close(best, expected_best, rtol=1e-6, atol=1e-4)


def test_of_equal_paths_the_lowest_tag_wins(triton_target):
    device = triton_target.device
    emissions, scores = torch.zeros(6, 3, device=device), torch.zeros(3, device=device)
    transitions = torch.zeros(3, 3, device=device)
    offsets = offsets_of((4, 2)).to(device)
    path, _ = crf_decode(emissions, offsets, scores, scores, transitions, impl=triton_target.impl)
    assert not path.any()


def test_more_tags_than_the_kernels_hold_take_the_reference(triton_target):
    check_against_float64(triton_target, *inputs(65, (3, 1)), impl="auto")


def test_marginals_are_the_references(triton_target):
    values, _, cu_seqlens = on(triton_target, *inputs(5))
    emissions, *scores = (value.detach() for value in values)
    marginals = crf_marginals(emissions, cu_seqlens, *scores, impl=triton_target.impl)
    expected = crf_marginals(emissions.double(), cu_seqlens, *scores, impl="reference")
    torch.testing.assert_close(marginals, expected.float(), rtol=1e-5, atol=1e-6)


def test_repeated_calls_give_the_same_bits(triton_target):
    values, tags, cu_seqlens = on(triton_target, *inputs(9))
    results = []
    for _ in range(2):
        out = likelihood(values, tags, cu_seqlens, impl=triton_target.impl)
        results.append((out, *torch.autograd.grad(out.sum(), values)))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what only a GPU could take")
def test_what_the_kernels_cannot_take_is_named():
    (emissions, *scores), tags, cu_seqlens = inputs(3)
    with pytest.raises(ValueError, match="runs on CUDA tensors, got one on cpu"):
        crf_log_likelihood(emissions, tags, cu_seqlens, *scores, impl="triton")
    with pytest.raises(ValueError, match="runs on CUDA tensors, got one on cpu"):
        crf_decode_nbest(emissions, cu_seqlens, *scores, 2, impl="triton")


def test_a_masked_batch_reads_nothing_back():
    """On the meta device every read raises, and the CRF computes as on a GPU."""
    crf = fnn.CRF(4, batch_first=True).to("meta")
    emissions = torch.zeros(3, 7, 4, device="meta", requires_grad=True)
    tags = torch.zeros(3, 7, dtype=torch.int64, device="meta")
    mask = torch.ones(3, 7, dtype=torch.bool, device="meta")
    rows = crf._rows(emissions, mask)
    assert rows.emissions.shape == (21, 4) and rows.seqused.shape == (3,)
    assert rows.pick(tags).shape == (21,)


def test_masked_tokens_of_a_gpus_batch_may_stand_anywhere(triton_target):
    """On a GPU the real tokens of a row are moved to its front."""
    device = triton_target.device
    crf = fnn.CRF(5, batch_first=True).to(device)
    emissions, tags = torch.randn(3, 6, 5, device=device), torch.randint(5, (3, 6), device=device)
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]], device=device)
    got, paths = crf(emissions, tags, mask, reduction="none"), crf.decode(emissions, mask)
    for row, real in enumerate(mask.bool()):
        parameters = [value.detach().double() for value in crf.scores()]
        offsets = torch.tensor([0, int(real.sum())], dtype=torch.int32, device=device)
        wide, chosen = emissions[row][real].double(), tags[row][real]
        alone = reference.log_likelihood(wide, chosen, offsets, *parameters)
        torch.testing.assert_close(got[row].double(), alone[0], rtol=1e-5, atol=1e-5)
        assert paths[row] == reference.decode(wide, offsets, *parameters)[0].tolist()
