"""Every op, forward and backward, on small awkward shapes, for NVIDIA's compute-sanitizer; not a pytest file.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck .venv/bin/python -m tests.helpers.sanitize
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck .venv/bin/python -m tests.helpers.sanitize

Without torch's cache every tensor is an allocation of its own, so that a step past its end is seen. Results are not
compared here; the tests do that. ``--device cpu`` tries the script itself; cases may be chosen by patterns.
"""

import argparse
import itertools
import os
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from random import Random

import torch

import fastenc
from fastenc import ops, packing
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.nn import weight_copies
from fastenc.nn.adamw import AdamW
from tests.fuzz.op_calls import CALLS
from tests.fuzz.valid_calls import gradients, leaves_of, tensors_of

LENGTHS = (1, 0, 17, 64, 65, 130)
SHORT = (1, 0, 17, 64, 65, 128)  # several sequences share a tile of half-precision attention
TOKENS = sum(LENGTHS)
CASES: dict[str, Callable] = {}


def case(run):
    CASES[run.__name__] = run
    return run


def offsets(lengths=LENGTHS) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def leaf(*shape, dtype=None):
    """Random values that want a gradient. ``torch.set_default_device`` says where."""
    return torch.randn(*shape).to(dtype or torch.float32).requires_grad_()


def norm(op, dtype, with_bias):
    for rows, width in ((1, 1), (3, 37), (5, 768), (2, 8192)):
        x, residual = leaf(rows, width, dtype=dtype), leaf(rows, width, dtype=dtype)
        weight, x_bias = leaf(width, dtype=dtype), leaf(width, dtype=dtype)
        more = {"bias": leaf(width, dtype=dtype)} if with_bias else {}
        op(x, weight, **more, residual=residual, x_bias=x_bias, dropout_p=0.1).sum().backward()
        op(x.detach())


@case
def layer_norm(dtype):
    norm(ops.layer_norm, dtype, True)


@case
def rms_norm(dtype):
    norm(ops.rms_norm, dtype, False)


@case
def bias_gelu(dtype):
    for (rows, width), approximate in itertools.product(((1, 1), (5, 1000)), ("none", "tanh")):
        x, bias = leaf(rows, width, dtype=dtype), leaf(width, dtype=dtype)
        ops.bias_gelu(x, bias, approximate=approximate).sum().backward()
        ops.bias_gelu(x.detach(), bias.detach(), inplace=True)


@case
def bias_glu(dtype):
    for (rows, width), activation in itertools.product(
        ((1, 2), (5, 1000)), ("gelu", "gelu_tanh", "silu")
    ):
        x, bias = leaf(rows, width, dtype=dtype), leaf(width, dtype=dtype)
        ops.bias_glu(x, bias, activation=activation).sum().backward()


def embedding_inputs(dtype):
    tables = (leaf(97, 40, dtype=dtype), leaf(40, dtype=dtype), leaf(40, dtype=dtype))
    rest = dict(
        position_ids=torch.arange(TOKENS) % 64,
        position=leaf(64, 40, dtype=dtype),
        token_type_ids=torch.arange(TOKENS) % 2,
        token_type=leaf(2, 40, dtype=dtype),
        dropout_p=0.1,
    )
    # One id so often that its gradient is summed in several pieces.
    return torch.arange(TOKENS).clamp(max=96), tables, rest


@case
def embedding_layer_norm(dtype):
    ids, tables, rest = embedding_inputs(dtype)
    ops.embedding_layer_norm(ids, *tables, **rest).sum().backward()


@case
def tied_embedding_layer_norm(dtype):
    ids, tables, rest = embedding_inputs(dtype)
    y, word = ops.tied_embedding_layer_norm(ids, *tables, **rest)
    (y.sum() + word.square().sum()).backward()


@case
def mlm_corruption(dtype):
    special = torch.arange(97) < 5
    choices = torch.arange(5, 97)[:, None].expand(-1, 2).contiguous()
    cutoffs = torch.full((92,), 2**32)
    ops.mlm_corruption(torch.arange(TOKENS) % 97, special, choices, cutoffs, 4)


def padded():
    """A mask with rows of LENGTHS, and the batch packed by it."""
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return packing.pack(mask.long(), mask)


@case
def pack(dtype):
    ops.pack(leaf(len(LENGTHS), max(LENGTHS), 3, dtype=dtype), padded()).sum().backward()


@case
def unpack(dtype):
    ops.unpack(leaf(TOKENS, 3, dtype=dtype), padded()).sum().backward()


@case
def segment_pool(dtype):
    for mode in ("cls", "mean", "max"):
        ops.segment_pool(leaf(TOKENS, 37, dtype=dtype), offsets(), mode).sum().backward()


@case
def rotary(dtype):
    for head_dim, rotary_dim in ((32, 32), (64, 32)):
        table = torch.randn(max(LENGTHS), rotary_dim)
        x = leaf(TOKENS, 2, head_dim, dtype=dtype)
        ops.rotary(x, table, offsets(), max(LENGTHS)).sum().backward()


@case
def head_statistics(dtype):
    for head_dim in (32, 40, 128):
        q, k = (torch.randn(TOKENS, 2, head_dim, dtype=dtype) for _ in range(2))
        ops.head_statistics(q, k, offsets(), max(LENGTHS))
        seen = {"window_size": (3, 20), "relative_bias": torch.randn(2, 9)}
        ops.head_statistics(q, k, offsets(), max(LENGTHS), skip_ends=True, **seen)


@case
def attention(dtype):
    for head_dim, lengths in itertools.product((32, 40, 64, 128), (LENGTHS, SHORT, (33,) * 5)):
        qkv = leaf(sum(lengths), 3, 2, head_dim, dtype=dtype)
        ops.attention(qkv, offsets(lengths), max(lengths), dropout_p=0.1).sum().backward()


@case
def deterministic_attention(dtype):
    torch.use_deterministic_algorithms(True)
    for head_dim in (32, 40, 64, 128):
        qkv = leaf(TOKENS, 3, 2, head_dim, dtype=dtype)
        ops.attention(qkv, offsets(), max(LENGTHS), dropout_p=0.1).sum().backward()
    torch.use_deterministic_algorithms(False)


@case
def cross_attention(dtype):
    """Prefixes, a window and every bias; sequences of one query or none, and of keys alone."""
    keys = [length + 3 for length in LENGTHS]
    cu_seqlens_k = torch.tensor([0, *itertools.accumulate(keys)], dtype=torch.int32)
    q = leaf(TOKENS, 2, 40, dtype=dtype)
    k, v = leaf(sum(keys), 2, 40, dtype=dtype), leaf(sum(keys), 2, 40, dtype=dtype)
    ops.cross_attention(
        *(q, k, v, offsets(), cu_seqlens_k, max(LENGTHS), max(keys)),
        dropout_p=0.1,
        window_size=(20, 70),
        alibi_slopes=torch.tensor([0.5, 0.25]),
        relative_bias=leaf(2, 9),
        key_bias=torch.randn(sum(keys)),
    ).sum().backward()


def labels(rows, classes):
    values = torch.arange(rows) * 7 % classes
    values[::3] = -100
    return values


@case
def masked_cross_entropy(dtype):
    # On a GPU a row is in one block's registers, in a cluster's, or read twice.
    for rows, classes in ((1, 1), (9, 1001), (3, 40_001), (3, 300_001)):
        logits = leaf(rows, classes, dtype=dtype)
        loss = ops.masked_cross_entropy(logits, labels(rows, classes), label_smoothing=0.1)
        loss.backward()


@case
def linear_masked_cross_entropy(dtype):
    hidden, weight = leaf(9, 64, dtype=dtype), leaf(1001, 64, dtype=dtype)
    bias = leaf(1001, dtype=dtype)
    ops.linear_masked_cross_entropy(hidden, weight, bias, labels(9, 1001)).backward()


@case
def linear_kl_divergence(dtype):
    student = (leaf(9, 64, dtype=dtype), leaf(1001, 64, dtype=dtype), leaf(1001, dtype=dtype))
    teacher = (leaf(9, 40, dtype=dtype), leaf(1001, 40, dtype=dtype), leaf(1001, dtype=dtype))
    teacher = tuple(tensor.detach() for tensor in teacher)
    ops.linear_kl_divergence(*student, *teacher, temperature=2.0).backward()


def crf_inputs(dtype, tags=5):
    """CRFs have no empty sequence."""
    offset = torch.tensor([0, 1, 18, 83], dtype=torch.int32)
    scores = (leaf(tags, dtype=dtype), leaf(tags, tags, dtype=dtype), leaf(tags, dtype=dtype))
    return leaf(83, tags, dtype=dtype), torch.arange(83) % tags, offset, scores


@case
def crf_log_likelihood(dtype):
    emissions, tags, offset, (start, transitions, end) = crf_inputs(dtype)
    ops.crf_log_likelihood(emissions, tags, offset, start, end, transitions).sum().backward()


@case
def crf_marginals(dtype):
    emissions, _, offset, (start, transitions, end) = crf_inputs(dtype)
    with torch.no_grad():
        ops.crf_marginals(emissions, offset, start, end, transitions)


@case
def crf_decode(dtype):
    emissions, _, offset, (start, transitions, end) = crf_inputs(dtype)
    with torch.no_grad():
        ops.crf_decode(emissions, offset, start, end, transitions)


@case
def crf_decode_nbest(dtype):
    emissions, _, offset, (start, transitions, end) = crf_inputs(dtype)
    with torch.no_grad():
        ops.crf_decode_nbest(emissions, offset, start, end, transitions, 3)


@case
def linear_gelu(dtype):
    """The products with epilogues, which "auto" takes by a switch only."""
    on_gpu = torch.get_default_device().type == "cuda"
    impl = "triton" if on_gpu and dtype != torch.float32 else "auto"
    for rows, width, inner, out in ((1, 8, 8, 8), (130, 40, 200, 24), (5, 37, 131, 3)):
        weights = (leaf(inner, width, dtype=dtype), leaf(inner, dtype=dtype))
        given = (leaf(rows, width, dtype=dtype), *weights, leaf(out, inner, dtype=dtype))
        ops.linear_gelu(*given, impl=impl).sum().backward()


@case
def adamw(dtype):
    """Tensors of several blocks and of a part of one, with copies and without."""
    if torch.get_default_device().type != "cuda":
        return
    tensors = [leaf(size) for size in (1, 1023, 1025, 4096)]
    optimizer = AdamW(tensors)
    if dtype != torch.float32:
        optimizer.copies = dtype
        for tensor in tensors[1:]:
            weight_copies.keep(tensor, torch.empty_like(tensor, dtype=dtype))
    optimizer.found_inf = torch.zeros(())
    for _ in range(2):
        sum(tensor.square().sum() for tensor in tensors).backward()
        optimizer.step()


@case
def whole_model(dtype):
    """A training step and inference, on a GPU through a CUDA graph too.

    Without torch's cache an allocation is a cudaMalloc, which a capture does not allow.
    """
    model = MaskedLM(EncoderConfig(97, 64, 2, 2, 128, 140)).to(dtype).train()
    batch = packing.pack_sequences([[1] * n for n in LENGTHS]).to(torch.get_default_device())
    model(batch, labels(TOKENS, 97)).loss.backward()
    model.eval()
    run = (
        model
        if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
        else fastenc.compile_inference(model)
    )
    run(batch)


def random_calls(op, dtype):
    """Of an op without a case of its own: the fuzzers' calls, with their inputs in this dtype."""
    rng = Random(0)
    for _ in range(20):
        call = CALLS[op](rng)
        arguments = leaves_of(call, dtype)
        results = [y for y in tensors_of(call.op(**arguments)) if y.requires_grad]
        if results:
            gradients(results, arguments, [torch.ones_like(y) for y in results])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="CASE")
    options = parser.parse_args()
    torch.set_default_device(options.device)
    for name in set(ops.__all__) - CASES.keys():
        CASES[name] = partial(random_calls, name)
    chosen = [n for n in CASES if any(fnmatch(n, pattern) for pattern in options.patterns)]
    dtypes = [torch.float32, torch.bfloat16] + [torch.float16] * (options.device == "cuda")
    for name, dtype in itertools.product(chosen, dtypes):
        print(name, dtype, flush=True)
        CASES[name](dtype)


if __name__ == "__main__":
    main()
