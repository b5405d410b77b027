import pytest
import torch

from fastenc.ops import segment_pool
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp
from tests.helpers.segment_pool import MODES, check_against_plain, offsets


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "lengths,width", [([1], 1), ([5, 1, 33, 64], 37), ([127, 128, 129, 700], 384)]
)
def test_values_and_gradient_keep_the_budget(instruction_set, lengths, width, dtype, mode):
    check_against_plain(lengths, width, dtype, mode, "cpp")


@pytest.mark.parametrize("mode", MODES)
def test_reference_is_the_plain_computation(mode):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        check_against_plain([5, 1, 33], 7, dtype, mode, "reference")
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: segment_pool(v, offsets([4, 0, 5]), mode), x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_empty_sequences_give_zeros(instruction_set, impl, mode):
    x = torch.randn(6, 19, requires_grad=True)
    y = segment_pool(x, offsets([0, 2, 0, 0, 4, 0]), mode, impl=impl)
    assert not y[[0, 2, 3, 5]].any()
    full = segment_pool(x, offsets([2, 4]), mode, impl=impl)
    assert torch.equal(y[[1, 4]], full)
    (ours,), (expected,) = (torch.autograd.grad(v.sum(), x) for v in (y, full))
    assert torch.equal(ours, expected)
    nothing = torch.zeros(0, 19, requires_grad=True)
    for cu_seqlens, batch in ((offsets([]), 0), (offsets([0, 0]), 2)):
        y = segment_pool(nothing, cu_seqlens, mode, impl=impl)
        assert y.shape == (batch, 19) and not y.any()
        assert torch.autograd.grad(y.sum(), nothing)[0].shape == (0, 19)


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_a_maximums_gradient_goes_to_its_first_token(instruction_set, impl):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1, -inf, 0.0], [3, -inf, -0.0], [3, -inf, nan], [2, -inf, nan]])
    x = x.repeat(1, 7).requires_grad_()  # columns in whole vectors and in the rest
    y = segment_pool(x, offsets([4]), "max", impl=impl)
    torch.testing.assert_close(y, torch.tensor([[3, -inf, nan] * 7]), equal_nan=True)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    position = torch.tensor([1, 0, 2] * 7)
    assert torch.equal(dx, torch.nn.functional.one_hot(position, 4).T.float())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_nan_stays_in_its_sequence(instruction_set, impl, mode):
    x = torch.randn(9, 20)
    x[3] = float("nan")
    y = segment_pool(x, offsets([3, 4, 2]), mode, impl=impl)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@needs_cpp
@pytest.mark.parametrize("mode", MODES)
def test_results_do_not_depend_on_threads_or_strides(mode):
    x, cu_seqlens = torch.randn(3000, 128), offsets([700] * 4 + [200])
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(segment_pool(x, cu_seqlens, mode))
    torch.set_num_threads(before)
    results.append(segment_pool(x.T.contiguous().T, cu_seqlens, mode))
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_cpp
def test_registration_passes_opcheck():
    x, cu_seqlens = torch.randn(7, 24), offsets([3, 0, 4])
    for mode in (MODES.index("mean"), MODES.index("max")):
        torch.library.opcheck(torch.ops.fastenc.segment_pool_fwd.default, (x, cu_seqlens, mode))
    y, argmax = torch.ops.fastenc.segment_pool_fwd(x, cu_seqlens, mode)
    arguments = (y, argmax, cu_seqlens, 7, mode)
    torch.library.opcheck(torch.ops.fastenc.segment_pool_bwd.default, arguments)


@pytest.mark.parametrize("impl", [pytest.param("cpp", marks=needs_cpp), "reference"])
@pytest.mark.parametrize("mode", MODES)
def test_torch_compile_full_graph_and_dynamic_shapes(mode, impl):
    compiled = compiled_once(
        lambda x, cu_seqlens: segment_pool(x, cu_seqlens, mode, impl=impl),
    )
    for lengths in ([3, 4], [5, 1, 6]):
        x, cu_seqlens = torch.randn(sum(lengths), 40, requires_grad=True), offsets(lengths)
        dy = torch.randn(len(lengths), 40)
        y, expected = compiled(x, cu_seqlens), segment_pool(x, cu_seqlens, mode, impl=impl)
        assert torch.equal(y, expected)
        (ours,), (theirs,) = (torch.autograd.grad(v, x, dy) for v in (y, expected))
        assert torch.equal(ours, theirs)


def test_pooling_is_sentence_transformers_own():
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    mask = (torch.arange(9) < torch.tensor([5, 1, 9])[:, None]).long()
    padded = torch.randn(3, 9, 8)
    for mode in MODES:
        pooling = modules.Pooling(8, pooling_mode=mode)
        features = {"token_embeddings": padded.clone(), "attention_mask": mask}
        expected = pooling(features)["sentence_embedding"]
        ours = segment_pool(padded[mask.bool()], offsets([5, 1, 9]), mode)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_bad_input_is_named():
    x, cu_seqlens = torch.randn(4, 8), offsets([1, 3])
    for arguments, message in (
        ((x, cu_seqlens, "sum"), "mode must be one of .* got 'sum'"),
        (
            (x[0], cu_seqlens),
            r"x must be floating point of shape .* got torch.float32 of shape \(8,\)",
        ),
        ((x.long(), cu_seqlens), "got torch.int64 of shape"),
        ((x, offsets([1, 2])), "cu_seqlens must run from 0 to the number of tokens 4"),
        ((x, cu_seqlens.long()), "cu_seqlens must be int32"),
    ):
        with pytest.raises(ValueError, match=message):
            segment_pool(*arguments)
    with pytest.raises(
        ValueError,
        match=r"cannot take this call: (it runs on CUDA tensors|triton is not installed)",
    ):
        segment_pool(x, cu_seqlens, impl="triton")
