from itertools import product

import pytest
import torch

from fastenc import nn as fnn
from fastenc.ops import crf_decode, crf_decode_nbest, crf_log_likelihood, crf_marginals
from fastenc.reference import crf as reference
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import offsets_of
from tests.helpers.crf import LENGTHS, NAMES, forbid, inputs, likelihood
from tests.helpers.extension import needs_cpp

# More sequences than a vector has lanes, with different lengths: the kernel puts sequences side by side.
MANY = (9, 1, 17, 0, 12, 12, 5, 17, 8, 30, 3, 16, 2, 11, 7, 28, 4, 0, 10, 25, 6, 19)
BOTH = pytest.mark.parametrize("lengths", [LENGTHS, MANY], ids=["few", "many"])


def check_against_float64(values, tags, cu_seqlens):
    weights = torch.randn(cu_seqlens.shape[0] - 1)
    wide = [value.detach().double().requires_grad_() for value in values]
    ours = likelihood(values, tags, cu_seqlens, impl="cpp")
    plain = likelihood(values, tags, cu_seqlens, reference.log_likelihood)
    truth = likelihood(wide, tags, cu_seqlens, reference.log_likelihood)
    assert_within_budget(ours, plain, truth, "log-likelihood")
    triples = (
        torch.autograd.grad(ours, values, weights),
        torch.autograd.grad(plain, values, weights),
        torch.autograd.grad(truth, wide, weights.double()),
    )
    for name, *triple in zip(NAMES, *triples, strict=True):
        assert_within_budget(*triple, f"d{name}")


@BOTH
@pytest.mark.parametrize("num_tags", [2, 9, 16, 25, 33])
def test_likelihood_and_every_gradient_keep_the_budget(instruction_set, num_tags, lengths):
    check_against_float64(*inputs(num_tags, lengths))


@pytest.mark.parametrize("num_tags", [128, 129])
def test_many_tags_keep_the_budget(instruction_set, num_tags):
    check_against_float64(*inputs(num_tags, (4, 4, 3, 0)))


def test_one_tag_leaves_nothing_to_learn(instruction_set):
    values, tags, cu_seqlens = inputs(1, MANY)
    out = likelihood(values, tags, cu_seqlens, impl="cpp")
    for result in (out, *torch.autograd.grad(out.sum(), values)):
        torch.testing.assert_close(result, torch.zeros_like(result), rtol=0, atol=1e-4)


def test_large_emissions_keep_the_budget(instruction_set):
    values, tags, cu_seqlens = inputs(9, (500, 500, 499))
    with torch.no_grad():
        values[0] += 1000
    wide = [value.detach().double() for value in values]
    ours = likelihood(values, tags, cu_seqlens, impl="cpp")
    truth = likelihood(wide, tags, cu_seqlens, reference.log_likelihood)
    # The sum of 500 emissions near 1,000 is subtracted again: the rest has the precision of float32.
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=0)


@BOTH
@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_empty_sequences_have_no_gradient(instruction_set, lengths, weight):
    values, tags, cu_seqlens = inputs(5, lengths)
    out = likelihood(values, tags, cu_seqlens, impl="cpp")
    weights = torch.where(torch.tensor(lengths) > 0, 1.0, weight)
    for gradient in torch.autograd.grad(out, values, weights):
        assert gradient.isfinite().all()


@BOTH
@pytest.mark.parametrize("score", [-1e4, -float("inf")])
def test_forbidden_transitions_keep_the_budget(instruction_set, score, lengths):
    values, _, cu_seqlens = inputs(9, lengths)
    forbid(values, [(0, 1), (3, 3), (8, 2)], score)
    with torch.no_grad():
        values[1][1] = values[2][4] = score
    # The given path is allowed. A forbidden path has likelihood 0, and at -infinity no finite gradient.
    tags = torch.full((sum(lengths),), 5)
    check_against_float64(values, tags, cu_seqlens)


def test_a_path_that_only_forbidden_steps_allow(instruction_set):
    # Every transition but one is at -200: products of exponentials would underflow, logarithms do not.
    values, tags, cu_seqlens = inputs(4)
    forbid(values, [(i, j) for i in range(4) for j in range(4) if (i, j) != (0, 1)], -200.0)
    wide = [value.detach().double().requires_grad_() for value in values]
    ours = likelihood(values, tags, cu_seqlens, impl="cpp")
    truth = likelihood(wide, tags, cu_seqlens, reference.log_likelihood)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=1e-5)
    gradients = (torch.autograd.grad(y.sum(), v) for y, v in ((ours, values), (truth, wide)))
    for one, two in zip(*gradients, strict=True):
        # Logarithms near 200 are added to others near -200, where float32 has steps of 1.5e-5.
        torch.testing.assert_close(one.double(), two, rtol=0, atol=1e-4)


@BOTH
def test_confident_emissions_keep_the_budget(instruction_set, lengths):
    check_against_float64(*inputs(9, lengths, scale=30.0))


def test_marginals_are_those_of_all_paths(instruction_set):
    values, _, cu_seqlens = inputs(3, (4, 1))
    emissions, start, end, transitions = (value.detach() for value in values)
    marginals = crf_marginals(emissions, cu_seqlens, start, end, transitions, impl="cpp")
    expected = torch.zeros(5, 3, dtype=torch.float64)
    for path in torch.cartesian_prod(*[torch.arange(3)] * 4):
        tags = torch.cat([path, torch.zeros(1, dtype=torch.int64)])
        chance = likelihood(values, tags, cu_seqlens, reference.log_likelihood)[0].double().exp()
        for index, tag in enumerate(path):
            expected[index, tag] += chance.detach()
    expected[4] = torch.softmax((emissions[4] + start + end).double(), 0)
    torch.testing.assert_close(marginals.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(marginals.sum(1), torch.ones(5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("impl", ["cpp", "reference"])
@pytest.mark.parametrize("inside", [True, False])
def test_marginals_of_tensors_of_inference_mode(impl, inside):
    values, _, cu_seqlens = inputs(5, (4, 0, 3))
    emissions, start, end, transitions = (value.detach() for value in values)
    expected = crf_marginals(emissions, cu_seqlens, start, end, transitions, impl="reference")
    with torch.inference_mode():
        given = [x.clone() for x in (emissions, cu_seqlens, start, end, transitions)]
    with torch.inference_mode(inside):
        torch.testing.assert_close(crf_marginals(*given, impl=impl), expected)


@BOTH
@pytest.mark.parametrize("num_tags", [2, 9, 25])
def test_best_path_and_its_score(instruction_set, num_tags, lengths):
    (emissions, start, end, transitions), _, cu_seqlens = inputs(num_tags, lengths)
    forbid((None, None, None, transitions), [(0, 1), (1, 1)], -float("inf"))
    arguments = (emissions, cu_seqlens, start, end, transitions)
    path, scores = crf_decode(*arguments, impl="cpp")
    expected_path, expected_scores = crf_decode(*arguments, impl="reference")
    assert torch.equal(path, expected_path)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-6, atol=1e-4)


@BOTH
@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_ties_go_to_the_lowest_tag(instruction_set, lengths, impl):
    """Scores of small whole numbers, so that many paths have exactly the same sum."""
    values, _, cu_seqlens = inputs(9, lengths)
    emissions, start, end, transitions = (torch.randint(3, value.shape).float() for value in values)
    expected = []
    for rows in emissions.split(list(lengths)):
        best, came_from = start, []
        for number, row in enumerate(rows):
            if number:
                sums = best[:, None] + transitions
                came_from.append(sums.argmax(0))  # the first of equal ones
                best = sums.amax(0)
            best = best + row
        path = [(best + end).argmax()][: len(rows)]
        for previous in reversed(came_from):
            path.insert(0, previous[path[0]])
        expected += path
    path, _ = crf_decode(emissions, cu_seqlens, start, end, transitions, impl=impl)
    assert path.tolist() == list(map(int, expected))


def check_against_every_path(values, lengths, n, impl):
    """Compare scores and order of the n best paths with the enumeration of all paths in float64."""
    cu_seqlens = offsets_of(lengths)
    emissions, start, end, transitions = (value.detach() for value in values)
    tags, scores = crf_decode_nbest(emissions, cu_seqlens, start, end, transitions, n, impl=impl)
    assert tags.shape == (n, sum(lengths)) and scores.shape == (n, len(lengths))
    e, s, f, t = (value.double() for value in (emissions, start, end, transitions))
    for index, length in enumerate(lengths):
        first = int(cu_seqlens[index])
        every = torch.tensor([*product(range(e.shape[1]), repeat=length)]).long()
        total = torch.zeros(len(every), dtype=torch.float64)
        if length:
            total += s[every[:, 0]] + f[every[:, -1]] + t[every[:, :-1], every[:, 1:]].sum(1)
            total += sum(e[first + i, every[:, i]] for i in range(length))
        order = total.argsort(descending=True)[: int(total.isfinite().sum())][:n]
        count = len(order)
        assert torch.equal(tags[:count, first : first + length], every[order])
        torch.testing.assert_close(
            scores[:count, index].double(), total[order], rtol=1e-6, atol=1e-5
        )
        assert (tags[count:, first : first + length] == -1).all()
        assert (scores[count:, index] == -float("inf")).all()


@pytest.mark.parametrize("num_tags, n", [(1, 3), (2, 1), (3, 7), (17, 4)])
def test_n_best_paths_are_those_of_all_paths(instruction_set, num_tags, n):
    lengths = (3, 0, 1, 2, 5) if num_tags < 17 else (3, 0, 1)
    values, _, _ = inputs(num_tags, lengths)
    check_against_every_path(values, lengths, n, "cpp")
    check_against_every_path(values, lengths, n, "reference")


def test_n_best_paths_leave_out_what_is_forbidden(instruction_set):
    values, _, _ = inputs(3, (4, 1))
    forbid(values, [(0, 1), (1, 1), (2, 0)], -float("inf"))
    with torch.no_grad():
        values[1][2] = -float("inf")
    for impl in ("cpp", "reference"):
        check_against_every_path(values, (4, 1), 40, impl)


def test_n_best_paths_of_long_sequences(instruction_set):
    (emissions, start, end, transitions), _, cu_seqlens = inputs(9, (3000, 40, 700))
    arguments = (emissions, cu_seqlens, start, end, transitions)
    tags, scores = crf_decode_nbest(*arguments, 3, impl="cpp")
    best, best_scores = crf_decode(*arguments, impl="cpp")
    assert torch.equal(tags[0], best) and torch.equal(scores[0], best_scores)
    _, expected_scores = crf_decode_nbest(*arguments, 3, impl="reference")
    torch.testing.assert_close(scores, expected_scores, rtol=1e-6, atol=0)
    # Near-ties may change places over thousands of tokens, so each path is compared with its own score.
    wide = [value.detach().double() for value in (emissions, start, end, transitions)]
    for path, score in zip(tags, scores, strict=True):
        e, s, f, t = wide
        for index, (a, b) in enumerate(
            zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
        ):
            y = path[a:b]
            total = s[y[0]] + f[y[-1]] + t[y[:-1], y[1:]].sum() + e[a:b].gather(1, y[:, None]).sum()
            torch.testing.assert_close(score[index].double(), total, rtol=1e-6, atol=0)


@pytest.mark.parametrize("lengths", [(6000,), (2000, 1900, 1)])
def test_long_sequences_do_not_drift(instruction_set, lengths):
    check_against_float64(*inputs(5, lengths))


@needs_cpp
@pytest.mark.parametrize("lowest", [-1.0, -1e4], ids=["probabilities", "logarithms"])
def test_result_does_not_depend_on_the_number_of_threads(lowest):
    values, tags, cu_seqlens = inputs(9, MANY * 3)
    forbid(values, [(0, 1)], lowest)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = likelihood(values, tags, cu_seqlens)
        results.append((out, *torch.autograd.grad(out.sum(), values)))
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_nan_stays_in_its_sequence(instruction_set):
    values, tags, cu_seqlens = inputs(6, (5, 8, 7))
    with torch.no_grad():
        values[0][7, 2] = float("nan")
    out = likelihood(values, tags, cu_seqlens, impl="cpp")
    assert out[1].isnan() and out[[0, 2]].isfinite().all()
    (gradient,) = torch.autograd.grad(out[0] + out[2], values[0])
    assert gradient[:5].isfinite().all() and gradient[13:].isfinite().all()


@needs_cpp
def test_registration_passes_opcheck():
    (emissions, start, end, transitions), tags, cu_seqlens = inputs(5)
    detached = [value.detach() for value in (emissions, start, end, transitions)]
    for seqused in (None, cu_seqlens.diff() // 2):
        arguments = (detached[0], tags, cu_seqlens, seqused, *detached[1:])
        torch.library.opcheck(torch.ops.fastenc.crf_fwd.default, arguments)
        _, alphas, norms = torch.ops.fastenc.crf_fwd(*arguments)
        backward = (torch.ones(len(LENGTHS)), *arguments, alphas, norms)
        torch.library.opcheck(torch.ops.fastenc.crf_bwd.default, backward)
        decoding = (detached[0], cu_seqlens, seqused, *detached[1:])
        torch.library.opcheck(torch.ops.fastenc.crf_viterbi.default, decoding)
    nbest = (detached[0], cu_seqlens, *detached[1:], 3)
    torch.library.opcheck(torch.ops.fastenc.crf_nbest.default, nbest)


@BOTH
def test_no_result_holds_uninitialised_memory(lengths):
    """Values that the kernel does not compute are finite: the rest of whole vectors, and unused tokens."""
    (emissions, start, end, transitions), tags, cu_seqlens = inputs(5, lengths)
    arguments = (emissions, tags, cu_seqlens, cu_seqlens.diff() // 2, start, end, transitions)
    dirty = [torch.full((emissions.shape[0], 16), torch.nan) for _ in range(20)]
    del dirty  # the allocator gives its memory to the next tensor
    with torch.no_grad():
        _, alphas, norms = torch.ops.fastenc.crf_fwd(*arguments)
    assert alphas[:, 5:].eq(0).all() and norms.isfinite().all()


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_unused_tokens_are_as_if_cut_off(instruction_set, impl):
    lengths, used = (4, 0, 7, 3), (4, 0, 5, 0)
    values, tags, cu_seqlens = inputs(9, lengths)
    kept = torch.cat([torch.arange(n) < u for n, u in zip(lengths, used, strict=True)])
    with torch.no_grad():
        values[0][~kept] = float("nan")
    tags[~kept] = -1
    seqused = torch.tensor(used, dtype=torch.int32)
    wide = [value.detach().double().requires_grad_() for value in values]
    cut = [wide[0][kept], *wide[1:]]
    truth = likelihood(cut, tags[kept], offsets_of(used), reference.log_likelihood)
    ours = likelihood(values, tags, cu_seqlens, seqused=seqused, impl=impl)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
    pairs = ((ours, values), (truth, wide))
    gradients = [torch.autograd.grad(y.sum(), leaves) for y, leaves in pairs]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-5)
    scores = [value.detach() for value in values[1:]]
    path, best = crf_decode(values[0].detach(), cu_seqlens, *scores, seqused=seqused, impl=impl)
    expected = reference.decode(values[0].detach()[kept], offsets_of(used), *scores)
    assert torch.equal(path[kept], expected[0]) and not path[~kept].any()
    torch.testing.assert_close(best, expected[1])


@pytest.mark.parametrize("used, message", [((5, 0), "got 5 for sequence 0 of 4"), ((4,), "shape")])
def test_bad_numbers_of_used_tokens_are_named(used, message):
    values, tags, cu_seqlens = inputs(3, (4, 2))
    with pytest.raises(ValueError, match=message):
        likelihood(values, tags, cu_seqlens, seqused=torch.tensor(used, dtype=torch.int32))


@pytest.mark.filterwarnings("ignore::UserWarning:torchcrf")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "token_mean"])
def test_module_takes_the_place_of_pytorch_crfs(batch_first, reduction):
    torchcrf = pytest.importorskip("torchcrf")
    theirs, ours = (m(9, batch_first=batch_first) for m in (torchcrf.CRF, fnn.CRF))
    ours.load_state_dict(theirs.state_dict())
    emissions, tags = torch.randn(6, 20, 9), torch.randint(9, (6, 20))
    mask = torch.arange(20)[None] < torch.tensor([20, 1, 7, 13, 20, 2])[:, None]
    if not batch_first:
        emissions, tags, mask = emissions.transpose(0, 1), tags.t(), mask.t()
    results = []
    for module in (ours, theirs):
        x = emissions.clone().requires_grad_()
        value = module(x, tags, mask, reduction=reduction)
        gradients = torch.autograd.grad(value.sum(), [x, *module.parameters()])
        results.append((value, *gradients))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert ours.decode(emissions, mask) == theirs.decode(emissions, mask)
    assert ours.decode(emissions) == theirs.decode(emissions)


@pytest.mark.filterwarnings("ignore::UserWarning:torchcrf")
@pytest.mark.parametrize("num_tags", [9, 25])
def test_gradients_are_closer_to_float64_than_pytorch_crfs(num_tags):
    torchcrf = pytest.importorskip("torchcrf")
    ours, theirs = (m(num_tags, batch_first=True) for m in (fnn.CRF, torchcrf.CRF))
    exact = torchcrf.CRF(num_tags, batch_first=True).double()
    for other in (theirs, exact):
        other.load_state_dict(ours.state_dict())
    emissions, tags = torch.randn(32, 128, num_tags), torch.randint(num_tags, (32, 128))

    def gradients(module, dtype):
        x = emissions.to(dtype).requires_grad_()
        loss = -module(x, tags, reduction="token_mean")
        return torch.autograd.grad(loss, [x, *module.parameters()])

    truth = gradients(exact, torch.float64)
    error = lambda values: [(f - t).norm() / t.norm() for f, t in zip(values, truth, strict=True)]
    both = error(gradients(ours, torch.float32)), error(gradients(theirs, torch.float32))
    for name, one, other in zip(NAMES, *both, strict=True):
        assert one < other, f"d{name}: {one:.2g} of ours, {other:.2g} of pytorch-crf's"


def test_module_leaves_out_masked_tokens_wherever_they_stand():
    crf = fnn.CRF(5, batch_first=True)
    emissions, tags = torch.randn(3, 6, 5), torch.randint(5, (3, 6))
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    got = crf(emissions, tags, mask, reduction="none")
    for row, real in enumerate(mask.bool()):
        alone = crf(emissions[row][real][None], tags[row][real][None])
        torch.testing.assert_close(got[row], alone)
        assert crf.decode(emissions, mask)[row] == crf.decode(emissions[row][real][None])[0]


def test_module_takes_an_empty_row_and_bfloat16():
    crf = fnn.CRF(4, batch_first=True)
    emissions, tags = torch.randn(2, 3, 4), torch.randint(4, (2, 3))
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    value = crf(emissions, tags, mask, reduction="none")
    assert value[1] == 0 and crf.decode(emissions, mask)[1] == []
    low = crf(emissions.bfloat16(), tags, mask, reduction="none")
    torch.testing.assert_close(low, crf(emissions.bfloat16().float(), tags, mask, reduction="none"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"emissions": torch.zeros(2, 3, 4)}, "emissions must be floating point of shape"),
        (
            {"tags": torch.tensor([0, 1, 4, 0, 0])},
            r"tags must be in \[0, 4\), got 4.*leave them out",
        ),
        ({"tags": torch.zeros(4).long()}, r"tags must be int64 of shape \(5,\)"),
        ({"start": torch.zeros(3)}, r"start must have shape \(4,\)"),
        ({"transitions": torch.zeros(4, 5)}, r"transitions must have shape \(4, 4\)"),
        (
            {"cu_seqlens": torch.tensor([0, 4]).int()},
            "from 0 to the number of tokens 5, got 0 to 4",
        ),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {
        "emissions": torch.zeros(5, 4),
        "tags": torch.zeros(5).long(),
        "cu_seqlens": torch.tensor([0, 2, 5]).int(),
        "start": torch.zeros(4),
        "end": torch.zeros(4),
        "transitions": torch.zeros(4, 4),
    }
    with pytest.raises(ValueError, match=message):
        crf_log_likelihood(**{**arguments, **change})
    del arguments["tags"]
    for n in (0, 2**24):
        with pytest.raises(ValueError, match=f"n must be from 1 to 4194304 for 4 tags, got {n}"):
            crf_decode_nbest(**arguments, n=n)
    crf = fnn.CRF(4)
    with pytest.raises(ValueError, match="the last of size 4"):
        crf.decode(torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="reduction must be one of"):
        crf(torch.zeros(2, 3, 4), torch.zeros(2, 3).long(), reduction="max")


@needs_cpp
def test_parameters_of_another_dtype_than_the_emissions():
    values, tags, cu_seqlens = inputs(5)
    low = [values[0], *(value.half() for value in values[1:])]
    same = [values[0], *(value.half().float() for value in values[1:])]
    ours, expected = likelihood(low, tags, cu_seqlens), likelihood(same, tags, cu_seqlens)
    assert torch.equal(ours, expected)
    gradients = torch.autograd.grad(ours.sum(), low[1:])
    for mine, theirs in zip(gradients, torch.autograd.grad(expected.sum(), same[1:]), strict=True):
        assert torch.equal(mine, theirs.half())
    emissions, *parameters = low
    path, _ = crf_decode(emissions, cu_seqlens, *parameters)
    assert torch.equal(path, crf_decode(emissions, cu_seqlens, *same[1:])[0])


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_marginals_of_no_tokens(impl):
    (emissions, start, end, transitions), *_ = inputs(5)
    no_tokens = torch.zeros(3, dtype=torch.int32)
    marginals = crf_marginals(emissions[:0], no_tokens, start, end, transitions, impl=impl)
    assert marginals.shape == (0, 5) and marginals.dtype == torch.float32


def test_transitions_in_double_precision_find_the_same_paths():
    (emissions, *others), _, cu_seqlens = inputs(5)
    wide = [value.double() for value in others]
    ours = crf_decode_nbest(emissions, cu_seqlens, *wide, 3)
    theirs = crf_decode_nbest(emissions, cu_seqlens, *others, 3)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
