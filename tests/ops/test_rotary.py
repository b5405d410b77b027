import pytest
import torch
from fastenc.kernels.attention_call import self_attention_call

from fastenc.ops import attention, rotary
from tests.helpers.attention_cases import offsets_of
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp
from tests.helpers.rotary import check_rotary, check_rotary_attention, plain, table_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LENGTHS = (1, 0, 70, 5, 129)


@DTYPES
@pytest.mark.parametrize("dim,rotary_dim", [(64, 64), (16, 16), (64, 32), (24, 10), (7, 2)])
def test_values_and_gradient_keep_the_budget(instruction_set, dim, rotary_dim, dtype):
    check_rotary(LENGTHS, 3, dim, rotary_dim, dtype, "cpp")


@DTYPES
@pytest.mark.parametrize("dim,rotary_dim", [(16, 16), (64, 64), (64, 20), (128, 128)])
def test_attention_rotates_what_it_reads(instruction_set, dim, rotary_dim, dtype):
    check_rotary_attention(LENGTHS, dim, rotary_dim, dtype, "cpp")


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_attention_with_a_window_rotates_too(impl):
    check_rotary_attention((3, 200), 32, 32, torch.float32, impl, window_size=(20, 4))


def test_reference_is_transformers_and_its_gradient_the_rotation_back():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    x = torch.randn(8, 4, 32, dtype=torch.float64, requires_grad=True)
    table = table_of(8, 32)
    cosine, sine = (part.double().repeat(1, 2)[None] for part in table.chunk(2, 1))
    queries = x.transpose(0, 1)[None]
    theirs, _ = modeling.apply_rotary_pos_emb(queries, queries, cosine, sine)
    ours = rotary(x, table, offsets_of((8,)), 8, impl="reference")
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1))
    assert torch.autograd.gradcheck(lambda v: rotary(v, table, offsets_of((5, 3)), 5), x)


def test_strides_are_read_in_place(instruction_set):
    wide = torch.randn(20, 3, 4, 48)
    table, cu_seqlens = table_of(12, 16), offsets_of((12, 8))
    backwards = torch.randn(16, 4, 20).permute(2, 1, 0)
    for x in (wide[:, 1, :, 8:24], backwards):
        before = x.clone()
        y = rotary(x, table, cu_seqlens, 12, impl="cpp")
        torch.testing.assert_close(y, plain(x, table, (12, 8)))
        assert torch.equal(x, before)
    by_columns = table.T.contiguous().T
    torch.testing.assert_close(
        rotary(wide[:, 0], by_columns, cu_seqlens, 12), plain(wide[:, 0], table, (12, 8))
    )


@needs_cpp
def test_no_tokens_and_results_for_any_number_of_threads():
    empty = torch.zeros(0, 2, 16, requires_grad=True)
    y = rotary(empty, table_of(1, 16), offsets_of((0, 0)), 0)
    y.sum().backward()
    assert y.shape == empty.grad.shape == (0, 2, 16)
    x, cu_seqlens, before = (
        torch.randn(600, 4, 64),
        offsets_of((1, 0, 399, 200)),
        torch.get_num_threads(),
    )
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(rotary(x, table_of(399, 64), cu_seqlens, 399))
    torch.set_num_threads(before)
    assert torch.equal(*results)


@needs_cpp
def test_registration_passes_opcheck():
    x, table, cu_seqlens = torch.randn(10, 2, 16), table_of(6, 12), offsets_of((4, 6))
    for inverse in (False, True):
        torch.library.opcheck(torch.ops.fastenc.rotary.default, (x, table, cu_seqlens, 6, inverse))


@needs_cpp
def test_torch_compile_full_graph_and_dynamic_shapes():
    compiled = compiled_once(
        lambda x, table, cu, longest: rotary(x, table, cu, longest).square().sum(0).sum(),
    )
    for lengths in ((3, 7), (7, 2, 9)):
        x, table = torch.randn(sum(lengths), 2, 16, requires_grad=True), table_of(9, 8)
        (ours,) = torch.autograd.grad(compiled(x, table, offsets_of(lengths), max(lengths)), x)
        (theirs,) = torch.autograd.grad(plain(x, table, lengths).square().sum(), x)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_nan_stays_in_its_token(impl):
    x = torch.randn(6, 2, 16)
    x[2, 1, 3] = float("nan")
    y = rotary(x, table_of(3, 16), offsets_of((3, 3)), 3, impl=impl)
    assert y.isnan().sum() == 2 and y[2, 1, [3, 11]].isnan().all()


TABLE = torch.zeros(3, 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(6, 16)}, "x must be floating point of shape .*got torch.float32"),
        ({"table": TABLE.double()}, "table must be float32 .*got torch.float64"),
        ({"table": torch.zeros(3, 7)}, "rotary_dim even.*got torch.float32 of shape \\(3, 7\\)"),
        ({"table": torch.zeros(3, 18)}, "at most the head_dim 16, got .*\\(3, 18\\)"),
        ({"table": TABLE[:2]}, "a row for each position below max_seqlen 3, got 2"),
        ({"table": TABLE.clone().requires_grad_()}, "table is not differentiable.*detach it"),
        ({"table": TABLE.to("meta")}, "table must be on the input's device cpu, got meta"),
        ({"max_seqlen": 2}, "max_seqlen must be at least the longest sequence, got 2"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"x": torch.zeros(6, 2, 16), "table": TABLE, "max_seqlen": 3}
    arguments["cu_seqlens"] = torch.tensor([0, 3, 6]).int()
    with pytest.raises(ValueError, match=message):
        rotary(**{**arguments, **change})


def test_attention_names_a_bad_table():
    with pytest.raises(ValueError, match="attention: rotary must be float32 of shape"):
        attention(torch.zeros(4, 3, 2, 16), offsets_of((4,)), 4, rotary=torch.zeros(4, 18))


@needs_cpp
def test_the_op_refuses_a_table_for_keys_of_their_own():
    q, cu_seqlens = torch.zeros(4, 2, 16), offsets_of((4,))
    attention_call = self_attention_call(cu_seqlens, 4, scale=1.0, rotary=table_of(4, 16))
    with pytest.raises(RuntimeError, match="queries and keys of the same sequences"):
        torch.ops.fastenc.attention_fwd(q, q, q, *attention_call._replace(cu_seqlens_k=cu_seqlens))
