"""What every op with a GPU kernel must do: on a GPU at the sizes of real encoders, or interpreted at small sizes."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fastenc import ops, packing
from fastenc.ops import dispatch
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import offsets_of, plain_cross
from tests.helpers.cross_entropy import labels_for
from tests.helpers.gpu import deterministic


class Size(NamedTuple):
    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


SMALL = Size((5, 0, 33, 20), 2, 16, 50)
DRAW = Random(0)
REAL = Size((512, 1, 0, *(DRAW.randint(1, 512) for _ in range(62))), 12, 64, 30522)  # 16k tokens


def size_of(target, heads=12) -> Size:
    return REAL._replace(heads=heads) if target.device.type == "cuda" else SMALL


class Op(NamedTuple):
    """An op, and the same computation in plain PyTorch.

    Fields:
        inputs: arguments by name; those of floating point are cast to the dtype under test and get gradients.
        ours: the op, called with the inputs and impl.
        plain: the computation, called with the inputs and the lengths.
        resize: changes the size to one that the op's kernel is for.
        mode: the mode in which its gradients repeat bit for bit; None: no mode.
    """

    inputs: Callable[[Size], dict[str, Any]]
    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    resize: Callable[[Size], Size] = lambda size: size
    mode: Callable | None = nullcontext


def attention_inputs(size):
    qkv = torch.randn(size.tokens, 3, size.heads, size.head_dim)
    return {"qkv": qkv, "cu": offsets_of(size.lengths), "longest": max(size.lengths)}


def plain_attention(lengths, qkv, cu, longest):
    parts = (part.permute(1, 2, 0, 3)[:, None] for part in qkv.split(lengths))
    return torch.cat([F.scaled_dot_product_attention(*part)[0].transpose(0, 1) for part in parts])


def relative_inputs(size):
    return attention_inputs(size) | {"relative_bias": torch.randn(size.heads, 257)}


def biased_inputs(size):
    """Biases without a gradient are made from integers."""
    hidden = {"key_bias": torch.randint(-2, 3, (size.tokens,))}
    return attention_inputs(size) | hidden | {"alibi_slopes": torch.arange(size.heads)}


def biases_of(key_bias, alibi_slopes):
    return {"key_bias": key_bias.float(), "alibi_slopes": 2.0 ** (-alibi_slopes - 1)}


def plain_biased(lengths, qkv, cu, longest, key_bias, alibi_slopes):
    biases = biases_of(key_bias, alibi_slopes)
    options = {"key_bias": biases["key_bias"], "slopes": biases["alibi_slopes"]}
    return plain_cross(*qkv.unbind(1), lengths, lengths, **options)


def keys_of(lengths):
    return [length or 3 for length in reversed(lengths)]


def cross_inputs(size):
    """Every sequence has as many keys as another one has queries."""
    sizes = {"q": size.lengths, "k": keys_of(size.lengths), "v": keys_of(size.lengths)}
    rows = {n: torch.randn(sum(sizes[n]), size.heads, size.head_dim) for n in sizes}
    offsets = {"cu_q": offsets_of(sizes["q"]), "cu_k": offsets_of(sizes["k"])}
    return rows | offsets | {"longest": max(*sizes["q"], *sizes["k"])}


def cut(size, longest=128):
    return size._replace(lengths=tuple(min(n, longest) for n in size.lengths))


def stretched(size, longest=130):
    """One sequence is too long for the kernel of short ones."""
    return size._replace(lengths=(max(longest, size.lengths[0]), *size.lengths[1:]))


def attention_op(resize):
    """Without any option. float32 uses the kernel of long sequences also for short ones."""
    ours = lambda impl, qkv, cu, longest: ops.attention(qkv, cu, longest, impl=impl)
    return Op(attention_inputs, ours, plain_attention, resize, deterministic)


def norm_inputs(size):
    rows, columns = (size.tokens, size.width), (size.width,)
    shapes = {"x": rows, "residual": rows, "x_bias": columns, "weight": columns}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def activation_inputs(size, halves):
    width = halves * (4 // halves) * size.width
    return {"x": torch.randn(size.tokens, width), "bias": torch.randn(width)}


def embedding_inputs(size):
    words, longest = size.vocabulary, max(size.lengths)
    tables = {"word": words, "position": longest, "token_type": 2}
    return {
        # A quarter of the tokens are one word, like [MASK].
        "input_ids": torch.randint(words, (size.tokens,)) * (torch.rand(size.tokens) < 0.75),
        "position_ids": torch.cat([torch.arange(n) for n in size.lengths]),
        "token_type_ids": torch.randint(2, (size.tokens,)),
        **{name: torch.randn(rows, size.width) for name, rows in tables.items()},
        "weight": torch.randn(size.width),
        "bias": torch.randn(size.width),
    }


def plain_embedding(
    lengths, input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias
):
    h = F.embedding(input_ids, word) + F.embedding(token_type_ids, token_type)
    h = h + F.embedding(position_ids, position)
    return F.layer_norm(h, weight.shape, weight, bias, 1e-12)


def batch_of(size):
    mask = torch.arange(max(size.lengths)) < torch.tensor(size.lengths)[:, None]
    return packing.pack(mask.long(), mask)


def packed_inputs(size):
    return {"x": torch.randn(size.tokens, size.width), "cu": offsets_of(size.lengths)}


def pooling(mode, of_one):
    def plain(lengths, x, cu):
        parts = x.split(lengths)
        return torch.stack([of_one(p) if len(p) else x.new_zeros(x.shape[1]) for p in parts])

    return Op(packed_inputs, lambda impl, x, cu: ops.segment_pool(x, cu, mode, impl=impl), plain)


def loss_inputs(size):
    return {
        "hidden": torch.randn(size.tokens, size.width),
        "weight": torch.randn(size.vocabulary, size.width) / size.width**0.5,
        "bias": torch.randn(size.vocabulary),
        "labels": labels_for(size.tokens, size.vocabulary, 0.15),
    }


def plain_loss(lengths, hidden, weight, bias, labels):
    logits = F.linear(hidden, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels)


OPS = {
    "attention": attention_op(stretched),
    "attention of short sequences": attention_op(cut),
    "attention with heads of 32": attention_op(
        lambda size: stretched(size)._replace(heads=2, head_dim=32)
    ),
    "attention with heads of 128": attention_op(
        lambda size: stretched(size)._replace(heads=2, head_dim=128)
    ),
    "attention in a window": Op(
        attention_inputs,
        lambda impl, qkv, cu, longest: ops.attention(
            qkv, cu, longest, window_size=(17, 9), impl=impl
        ),
        lambda lengths, qkv, cu, longest: plain_cross(
            *qkv.unbind(1), lengths, lengths, window=(17, 9)
        ),
        mode=deterministic,
    ),
    "attention with a relative bias": Op(
        relative_inputs,
        lambda impl, qkv, cu, longest, relative_bias: ops.attention(
            qkv, cu, longest, relative_bias=relative_bias, impl=impl
        ),
        lambda lengths, qkv, cu, longest, relative_bias: plain_cross(
            *qkv.unbind(1), lengths, lengths, relative=relative_bias
        ),
        mode=deterministic,
    ),
    "attention with ALiBi and a key bias": Op(
        biased_inputs,
        lambda impl, qkv, cu, longest, key_bias, alibi_slopes: ops.attention(
            qkv, cu, longest, **biases_of(key_bias, alibi_slopes), impl=impl
        ),
        plain_biased,
        mode=deterministic,
    ),
    "cross_attention": Op(
        cross_inputs,
        lambda impl, longest, **tensors: ops.cross_attention(
            *tensors.values(), longest, longest, impl=impl
        ),
        lambda lengths, q, k, v, cu_q, cu_k, longest: plain_cross(
            q, k, v, lengths, keys_of(lengths)
        ),
        mode=deterministic,
    ),
    "layer_norm": Op(
        lambda size: norm_inputs(size) | {"bias": torch.randn(size.width)},
        ops.layer_norm,
        lambda lengths, x, residual, x_bias, weight, bias: F.layer_norm(
            residual + (x + x_bias), weight.shape, weight, bias
        ),
    ),
    "rms_norm": Op(
        norm_inputs,
        ops.rms_norm,
        lambda lengths, x, residual, x_bias, weight: F.rms_norm(
            residual + (x + x_bias), weight.shape, weight, 1e-6
        ),
    ),
    "bias_gelu": Op(
        lambda size: activation_inputs(size, 1),
        ops.bias_gelu,
        lambda lengths, x, bias: F.gelu(x + bias),
    ),
    "bias_glu": Op(
        lambda size: activation_inputs(size, 2),
        ops.bias_glu,
        lambda lengths, x, bias: torch.mul(
            *(f(h) for f, h in zip((F.gelu, lambda h: h), (x + bias).chunk(2, 1), strict=True))
        ),
    ),
    "embedding_layer_norm": Op(embedding_inputs, ops.embedding_layer_norm, plain_embedding),
    "tied_embedding_layer_norm": Op(
        embedding_inputs,
        lambda impl, **inputs: F.linear(*ops.tied_embedding_layer_norm(**inputs, impl=impl)),
        lambda lengths, word, **inputs: F.linear(
            plain_embedding(lengths, word=word, **inputs), word
        ),
        lambda size: cut(size, 32),  # float64 scores of 16k tokens would take 4 GB
        deterministic,  # torch's products form the scores
    ),
    "pack": Op(
        lambda size: {
            "x": torch.randn(len(size.lengths), max(size.lengths), size.width),
            "batch": batch_of(size),
        },
        ops.pack,
        lambda lengths, x, batch: torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)]),
    ),
    "unpack": Op(
        lambda size: {"values": torch.randn(size.tokens, size.width), "batch": batch_of(size)},
        ops.unpack,
        lambda lengths, values, batch: pad_sequence(values.split(lengths), True),
    ),
    "segment_pool mean": pooling("mean", lambda part: part.mean(0)),
    "segment_pool max": pooling("max", lambda part: part.max(0).values),
    "linear_masked_cross_entropy": Op(
        loss_inputs,
        lambda impl, **inputs: ops.linear_masked_cross_entropy(**inputs),
        plain_loss,
        lambda size: cut(size, 32),  # float64 logits of 16k tokens would take 4 GB
        mode=None,
    ),
}
# Attention's own tests interpret heads of other sizes.
ON_GPU_ONLY = {"attention with heads of 32", "attention with heads of 128"}
EVERY = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.gpu) if n in ON_GPU_ONLY else n for n in OPS],
)


def dtypes(name, target):
    """The loss has no interpreted kernel, and its C++ kernel has no float16."""
    on_cpu = target.device.type == "cpu"
    return (torch.float32,) if on_cpu and OPS[name].mode is None else target.dtypes


def inputs_of(op, size, device, dtype):
    def prepared(value):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(device, dtype).requires_grad_()
        return value.to(device) if hasattr(value, "to") else value

    return {name: prepared(value) for name, value in op.inputs(op.resize(size)).items()}


def leaves(inputs):
    return [v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad]


def both_ways(out, inputs, dout):
    """The result and the gradient of every input."""
    return out.detach(), *torch.autograd.grad(out, leaves(inputs), dout.to(out.dtype))


def upstream(op, impl, inputs):
    return torch.randn_like(op.ours(impl=impl, **inputs))


# On a GPU also with width 1,024.
@pytest.mark.parametrize("heads", [12, pytest.param(16, marks=pytest.mark.gpu)])
@EVERY
def test_results_and_gradients_keep_the_budget(triton_target, name, heads):
    op, size = OPS[name], size_of(triton_target, heads)
    lengths = op.resize(size).lengths
    for dtype in dtypes(name, triton_target):
        inputs = inputs_of(op, size, triton_target.device, dtype)
        exact = {
            k: v.detach().double().requires_grad_()
            if any(v is leaf for leaf in leaves(inputs))
            else v
            for k, v in inputs.items()
        }
        out = op.ours(impl=triton_target.impl, **inputs)
        dout = torch.randn_like(out)
        ours = both_ways(out, inputs, dout)
        plain = both_ways(op.plain(lengths, **inputs), inputs, dout)
        truth = both_ways(op.plain(lengths, **exact), exact, dout)
        for place, triple in enumerate(zip(ours, plain, truth, strict=True)):
            assert_within_budget(*triple, f"{dtype} result {place}")


@EVERY
def test_gradients_repeat_bit_for_bit(triton_target, name):
    op = OPS[name]
    if op.mode is None:
        pytest.skip("its sums are torch's products")
    for dtype in dtypes(name, triton_target):
        inputs = inputs_of(op, size_of(triton_target), triton_target.device, dtype)
        dout = upstream(op, triton_target.impl, inputs)
        alone = name == "attention of short sequences" and dtype != torch.float32
        with nullcontext() if alone else op.mode():
            first, second = (
                both_ways(op.ours(impl=triton_target.impl, **inputs), inputs, dout)
                for _ in range(2)
            )
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), dtype


class Calls(TorchDispatchMode):
    """Stores the arguments of one call of each operator of the library."""

    def __init__(self):
        super().__init__()
        self.arguments: dict = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "fastenc":
            kept = tree_map_only(Tensor, lambda t: t.detach().clone(), (arguments, options or {}))
            self.arguments.setdefault(function, kept)
        return function(*arguments, **(options or {}))


def test_fastenc_info_knows_which_ops_have_a_gpu_kernel():
    """By the names that users call."""
    x = torch.ones(1)
    reason = lambda op, impl: dispatch.unsupported_reason(op, impl, x, None, None)
    losses = {"masked_cross_entropy", "linear_masked_cross_entropy"}
    for name in ops.__all__:
        plain = name in losses | {"crf_decode_nbest", "linear_kl_divergence"}
        assert (reason(name, "triton") == "it has no Triton kernel") == plain, name
        assert (reason(name, "cuda") != "it has no CUDA kernel") == (name in losses), name


@EVERY
def test_registrations_pass_opcheck(triton_target, name):
    op, dtype = OPS[name], dtypes(name, triton_target)[-1]
    inputs = inputs_of(op, SMALL, triton_target.device, dtype)
    dout = upstream(op, triton_target.impl, inputs)
    with Calls() as calls:
        both_ways(op.ours(impl=triton_target.impl, **inputs), inputs, dout)
    assert calls.arguments
    for function, arguments in calls.arguments.items():
        torch.library.opcheck(function, *arguments)


@EVERY
def test_torch_compile_full_graph_and_dynamic_shapes(triton_target, name):
    op, device = OPS[name], triton_target.device
    torch.compiler.reset()  # graphs of other ops count as recompilations of this one
    compiled = torch.compile(
        lambda inputs: op.ours(impl=triton_target.impl, **inputs),
        fullgraph=True,
        dynamic=True,
        backend="inductor" if device.type == "cuda" else "aot_eager",
    )
    for lengths in (SMALL.lengths, (7, 21, 2)):
        inputs = inputs_of(op, SMALL._replace(lengths=lengths), device, torch.float32)
        dout = upstream(op, triton_target.impl, inputs)
        results = (compiled(inputs), op.ours(impl=triton_target.impl, **inputs))
        ours, expected = (both_ways(result, inputs, dout) for result in results)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def recorded(step, device):
    """The step's results, and a function that computes them again in place: a CUDA graph; on a CPU the step."""
    results = step()
    if device.type == "cpu":
        return results, lambda: [kept.copy_(new) for kept, new in zip(results, step(), strict=True)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return results, graph.replay


def tensors(inputs):
    """All tensors in the inputs, also those of a batch; always in the same order."""
    for value in inputs.values():
        if isinstance(value, packing.PackedBatch):
            yield from (v for v in vars(value).values() if isinstance(v, Tensor))
        elif isinstance(value, Tensor):
            yield value


@EVERY
def test_a_recorded_step_follows_values_and_lengths(triton_target, name):
    op, device = OPS[name], triton_target.device
    size, dtype = op.resize(size_of(triton_target)), dtypes(name, triton_target)[-1]
    op = op._replace(resize=lambda size: size)
    inputs, other = (
        inputs_of(op, size._replace(lengths=lengths), device, dtype)
        for lengths in (size.lengths, size.lengths[::-1])
    )
    dout = upstream(op, triton_target.impl, inputs)
    step = lambda given: both_ways(op.ours(impl=triton_target.impl, **given), given, dout)
    results, replay = recorded(lambda: step(inputs), device)
    replay()  # the capture computes nothing
    before = [result.clone() for result in results]
    with torch.no_grad():
        for place, new in zip(tensors(inputs), tensors(other), strict=True):
            place.copy_(new)
    replay()
    # Atomic sums, and products of other shapes, differ by rounding.
    torch.testing.assert_close(results, step(other), rtol=1e-2, atol=1e-2)
    assert not torch.equal(before[0], results[0])


def in_uniform_probabilities(target, dtype, wrap=lambda call: call):
    """Attention whose values are unit vectors: the result is the mask, and so is the values' gradient."""
    length = 16
    qkv = torch.zeros(length, 3, 1, length, device=target.device, dtype=dtype)
    unit = torch.eye(length, device=target.device, dtype=dtype)
    qkv[:, 2, 0] = unit
    qkv.requires_grad_()
    cu_seqlens = offsets_of((length,)).to(target.device)
    call = wrap(lambda qkv: ops.attention(qkv, cu_seqlens, length, dropout_p=0.5, impl=target.impl))

    def step():
        out = call(qkv)
        (gradient,) = torch.autograd.grad(out, qkv, unit[:, None])
        return out.detach()[:, 0], gradient[:, 2, 0].t()

    return step


def in_layer_norm(target, dtype, wrap=lambda call: call):
    """Ones, some of which are dropped: only the kept ones are above the mean and have a gradient."""
    x = torch.ones(4, 256, device=target.device, dtype=dtype, requires_grad=True)
    residual, dout = torch.zeros_like(x), torch.randn_like(x)
    weight = torch.ones(256, device=target.device, dtype=dtype)
    named = dict(residual=residual, dropout_p=0.5, impl=target.impl)
    call = wrap(lambda x: ops.layer_norm(x, weight, torch.zeros_like(weight), **named))

    def step():
        y = call(x)
        (gradient,) = torch.autograd.grad(y, x, dout)
        return y.detach(), gradient

    return step


def in_embedding(target, dtype, wrap=lambda call: call):
    """One token, with a gradient for the norm's bias where dropout keeps an element."""
    new = lambda *shape: torch.randn(*shape, device=target.device).to(dtype)
    ids = torch.zeros(1, dtype=torch.long, device=target.device)
    tables, weight, bias = [new(3, 256) for _ in range(3)], new(256), new(256).requires_grad_()
    named = {"position": tables[1], "token_type": tables[2], "position_ids": ids.clone()}
    named |= {"dropout_p": 0.5, "impl": target.impl}
    call = wrap(lambda bias: ops.embedding_layer_norm(ids, tables[0], weight, bias, **named))

    def step():
        y = call(bias)
        (gradient,) = torch.autograd.grad(y, bias, torch.ones_like(y))
        return y.detach()[0].abs(), gradient

    return step


WITH_DROPOUT = pytest.mark.parametrize(
    "op", [in_uniform_probabilities, in_layer_norm, in_embedding]
)


def assert_drops_others_each_time_and_the_same_in_its_backward(step):
    """step: () -> (result, gradient), each 0 or less for a dropped element."""
    kept = []
    for _ in range(3):
        result, gradient = step()
        forward, backward = result > 0, gradient != 0
        assert torch.equal(forward, backward)
        assert 0.3 < forward.float().mean() < 0.7
        kept.append(forward.clone())
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])


@WITH_DROPOUT
def test_dropout_of_a_recorded_step(triton_target, op):
    for dtype in triton_target.dtypes:
        step = op(triton_target, dtype)
        step()  # compile before recording
        results, replay = recorded(step, triton_target.device)

        def replayed(results=results, replay=replay):
            replay()
            return results

        assert_drops_others_each_time_and_the_same_in_its_backward(replayed)


@WITH_DROPOUT
def test_dropout_under_torch_compile(triton_target, op):
    torch.compiler.reset()
    backend = "inductor" if triton_target.device.type == "cuda" else "aot_eager"
    wrap = partial(torch.compile, fullgraph=True, dynamic=True, backend=backend)
    step = op(triton_target, torch.float32, wrap)
    assert_drops_others_each_time_and_the_same_in_its_backward(step)


@pytest.mark.parametrize("longest", [40, 140])
def test_the_order_of_sequences_does_not_matter(triton_target, longest):
    lengths = [longest, 3, 0, 17, 1]
    turned = list(reversed(lengths))
    for dtype in triton_target.dtypes:
        parts = [torch.randn(n, 3, 2, 32, device=triton_target.device).to(dtype) for n in lengths]
        results = []
        for order, sizes in ((parts, lengths), (parts[::-1], turned)):
            qkv = torch.cat(order).requires_grad_()
            out = ops.attention(
                qkv, offsets_of(sizes).to(qkv.device), longest, impl=triton_target.impl
            )
            (dqkv,) = torch.autograd.grad(out.float().square().sum(), qkv)
            results.append((out.split(sizes), dqkv.split(sizes)))
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        for ours, other in zip(*results, strict=True):
            for one, same in zip(ours, reversed(other), strict=True):
                torch.testing.assert_close(one, same, rtol=tolerance, atol=tolerance)
