"""Packed attention against other ways to compute it: padded sdpa and its backends, a loop over the sequences, cuDNN's
packed kernels, torch's varlen_attn, and flex_attention where something is added to the scores.

python -m benchmarks.bench_attention [plain | variants]

plain: real and equal lengths; for some of them other dtypes, head sizes and dropout. variants: a window, biases, heads
that share keys, and keys of other lengths than the queries, with results of their own. 12 heads of 64, on a CPU of 32.
"""

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._compare import compiled, peer
from benchmarks._compare_ops import Provider, compare_op
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, exit_if_broken, measure_groups
from benchmarks._tuning import (
    TF32_TOLERANCE,
    TOKENS,
    Problem,
    deterministic,
    random_inputs,
    tf32,
)
from benchmarks.gpu_quick import problems
from benchmarks.lengths import NAMES
from benchmarks.lengths import lengths as real_lengths
from fastenc.ops import attention, cross_attention, unpack
from fastenc.ops.attention import sequence_bounds
from fastenc.ops.attention_blocks import attention_blocks
from fastenc.packing import PackedBatch, pack_sequences
from fastenc.profiling import Work

TABLES = {
    "attention": "Attention over packed sequences: 12 heads of 32 on a CPU, of 64 on a GPU",
    "attention_variants": "Attention with a window, with biases, with grouped queries, and to other keys",
}
HEADS, HEAD_DIM = (12, 64) if ON_GPU else (12, 32)
WINDOW = 64  # to each side, as in ModernBERT's local layers (Warner et al. 2024, arXiv:2412.13663)
FARTHEST = 128  # the largest distance in T5's table
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Case(NamedTuple):
    """A batch, and the form of attention over it."""

    batch: str  # the name of its lengths
    lengths: list[int]
    key_lengths: list[int] | None = None  # lengths of keys and values that are separate tensors
    variant: str = ""  # "window", "ALiBi", "relative bias" or "key bias"
    dtype: torch.dtype = torch.bfloat16 if ON_GPU else torch.float32
    heads: int = HEADS
    head_dim: int = HEAD_DIM
    dropout_p: float = 0.0
    # Heads of keys and values, which are then separate tensors; 0: as many as of queries.
    key_heads: int = 0

    @property
    def name(self) -> str:
        usual = (self.heads, self.head_dim) == (HEADS, HEAD_DIM)
        labels = (
            self.batch,
            self.variant,
            "" if usual else f"{self.heads} x {self.head_dim}",
            f"{self.key_heads} of keys" if self.key_heads else "",
            dtype_name(self.dtype),
            f"dropout {self.dropout_p}" if self.dropout_p else "",
        )
        return ", ".join(label for label in labels if label)

    def work(self) -> tuple[Work, Work]:
        """Forward: q, k, v are read and out is written; the products q k^T and p v. Backward: these and dout are read,
        dq, dk and dv are written; the scores again, and four products for gradients."""
        keys = self.key_lengths or self.lengths
        pairs = sum(n * m for n, m in zip(self.lengths, keys, strict=True))
        if self.variant == "window":
            pairs = sum(
                min(i, WINDOW) + 1 + min(n - 1 - i, WINDOW) for n in self.lengths for i in range(n)
            )
        rows = sum(self.lengths) * self.heads + sum(keys) * (self.key_heads or self.heads)
        moved = rows * self.head_dim * self.dtype.itemsize
        product = 2 * self.heads * self.head_dim * pairs
        return (
            Work(2 * moved, 2 * product, self.dtype),
            Work(4 * moved, 5 * product, self.dtype),
        )


def batches() -> dict[str, list[int]]:
    """Lengths of the sequences of a batch."""
    if ON_GPU:
        same = {f"{TOKENS // n} sequences of {n}": [n] * (TOKENS // n) for n in (128, 2048)}
        return {name: real_lengths(name, TOKENS) for name in NAMES} | same
    draw = random.Random(0)
    return {
        "32 sequences of 8 to 40": [draw.randint(8, 40) for _ in range(32)],
        "32 sequences of 10 to 256": [draw.randint(10, 256) for _ in range(32)],
        "16 sequences of 128": [128] * 16,
        "4 sequences of 512": [512] * 4,
    }


def plain_cases() -> list[Case]:
    lengths_by_name = batches()
    if not ON_GPU:
        dtypes = (torch.float32, torch.bfloat16)
        return [
            Case(n, sizes, dtype=dtype) for n, sizes in lengths_by_name.items() for dtype in dtypes
        ]
    others: tuple[dict, ...] = (
        {"dropout_p": 0.1},
        {"dtype": torch.float16},
        {"head_dim": 32},  # MiniLM's
        {"heads": 8, "head_dim": 128},
    )
    chosen = ("SST-2", "Wikipedia", "full 512")
    return [Case(name, sizes) for name, sizes in lengths_by_name.items()] + [
        Case(name, lengths_by_name[name], **other) for other in others for name in chosen
    ]


def variant_cases() -> list[Case]:
    lengths_by_name = batches()
    if ON_GPU:
        ragged, even = "Wikipedia", "full 512"
        queries, keys = "SST-2", "Wikipedia"
        windowed = [
            Case("8 sequences of 2048", lengths_by_name["8 sequences of 2048"], variant="window")
        ]
    else:
        ragged, even = "32 sequences of 8 to 40", "16 sequences of 128"
        queries, keys = "32 sequences of 8 to 40", "32 sequences of 10 to 256"
        # Two heads, because the peers store all scores. Full attention for comparison: the time should fall with the
        # window.
        long = partial(Case, "1 sequence of 4096", [4096], heads=2, head_dim=64)
        windowed = [long(), long(variant="window")]
    alone = (
        (ragged, "ALiBi"),
        # Without padding: the padded peers would have to add its mask to the table's bias in every call.
        (even, "relative bias"),
        (ragged, "key bias"),
    )
    cases = [Case(name, lengths_by_name[name], variant=variant) for name, variant in alone]
    # EmbeddingGemma's heads, and those of Qwen3-Embedding-0.6B.
    shared = ({"heads": 3, "head_dim": 256, "key_heads": 1},)
    shared += ({"heads": 16, "head_dim": 128, "key_heads": 8},)
    cases += [Case(ragged, lengths_by_name[ragged], **heads) for heads in shared]
    asking = lengths_by_name[queries][: len(lengths_by_name[keys])]
    return [
        *windowed,
        *cases,
        Case(f"queries: {queries}, keys: {keys}", asking, lengths_by_name[keys]),
    ]


class Variant(NamedTuple):
    """What is added to the scores, in the form that each provider takes.

    Fields:
        arguments: fastenc's arguments, from the parameters.
        bias: (1 or batch, 1 or heads, queries, keys), from the distances (queries, keys), the keys' numbers in the
            packed batch (batch, keys) and the parameters.
        score: one changed score, from the score, the head, the distance, the key's number and the parameters.
        parameters: tensors with a gradient, in addition to q, k and v.
        window: the number of visible tokens on each side.
    """

    arguments: Callable[..., dict] = lambda: {}
    bias: Callable[..., Tensor] | None = None
    score: Callable[..., Tensor] | None = None
    parameters: tuple[Tensor, ...] = ()
    window: int | None = None


def make_variant(case: Case) -> Variant:
    if case.variant == "window":
        return Variant(
            lambda: {"window_size": (WINDOW, WINDOW)},
            lambda distance, keys: torch.zeros(distance.shape, device=DEVICE).masked_fill(
                distance.abs() > WINDOW, -torch.inf
            )[None, None],
            window=WINDOW,
        )
    if case.variant == "ALiBi":
        slopes = 2 ** (-8 * torch.arange(1.0, case.heads + 1, device=DEVICE) / case.heads)
        return Variant(
            lambda: {"alibi_slopes": slopes},
            lambda distance, keys: -slopes[None, :, None, None] * distance.abs(),
            lambda score, head, distance, key: score - slopes[head] * distance.abs(),
        )
    if case.variant == "relative bias":
        index = lambda distance: distance.clamp(-FARTHEST, FARTHEST) + FARTHEST
        return Variant(
            lambda weight: {"relative_bias": weight.T},
            lambda distance, keys, weight: F.embedding(index(distance), weight).permute(2, 0, 1)[
                None
            ],
            lambda score, head, distance, key, weight: score + weight[index(distance), head],
            (torch.randn(2 * FARTHEST + 1, case.heads, device=DEVICE).requires_grad_(),),
        )
    if case.variant == "key bias":
        values = torch.randn(sum(case.lengths), device=DEVICE)
        return Variant(
            lambda: {"key_bias": values},
            lambda distance, keys: values[keys][:, None, None],
            lambda score, head, distance, key: score + values[key],
        )
    return Variant()


def split(qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """q, k and v of one tensor (..., 3, heads, head_dim), or the three."""
    return qkv[0].unbind(-3) if len(qkv) == 1 else qkv


def distances(queries: int, keys: int) -> Tensor:
    return torch.arange(keys, device=DEVICE) - torch.arange(queries, device=DEVICE)[:, None]


def sdpa(qkv, mask=None, dropout_p=0.0):
    """(batch, length, heads, head_dim) each → (batch, length, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in split(qkv))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
    options = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, **options).transpose(1, 2)


class Batch:
    """A case's tensors, packed and padded, and every way to compute attention over them.

    The caller pads, removes padding and makes masks without a gradient, as in a padded model; none of this is timed.
    """

    def __init__(self, case: Case):
        pack = lambda sizes: pack_sequences([[0] * size for size in sizes]).to(DEVICE)
        self.case, self.variant = case, make_variant(case)
        self.queries = self.keys = pack(case.lengths)
        if case.key_lengths is not None:
            self.keys = pack(case.key_lengths)
        new = lambda batch, *shape: torch.randn(
            batch.total_tokens, *shape, case.head_dim, device=DEVICE
        ).to(case.dtype)
        owners: tuple[PackedBatch, ...] = (self.queries,)
        if case.key_lengths is None and not case.key_heads:
            self.packed: tuple[Tensor, ...] = (new(self.queries, 3, case.heads).requires_grad_(),)
        else:
            owners = (self.queries, self.keys, self.keys)
            heads = (case.heads, *(case.key_heads or case.heads,) * 2)
            self.packed = tuple(map(new, owners, heads))
            for x in self.packed:
                x.requires_grad_()
        self.dout = new(self.queries, case.heads)
        self.padded = tuple(
            unpack(x.detach(), owner).requires_grad_()
            for x, owner in zip(self.packed, owners, strict=True)
        )
        self.dout_padded = unpack(self.dout, self.queries)
        real = lambda batch: unpack(torch.ones(batch.total_tokens, device=DEVICE), batch) != 0
        self.real, self.real_keys = real(self.queries), real(self.keys)
        self.constant_mask = None if self.variant.parameters else self.mask()

    def mask(self, *parameters: Tensor) -> Tensor | None:
        """What padded attention adds to the scores, or a mask of the visible keys."""
        variant, lengths = self.variant, self.case.key_lengths or self.case.lengths
        even, real = len(set(lengths)) == 1, self.real_keys[:, None, None]
        if variant.bias is None:
            return None if even else real
        indices = unpack(torch.arange(self.keys.total_tokens, device=DEVICE), self.keys)
        distance = distances(self.queries.max_seqlen, self.keys.max_seqlen)
        bias = variant.bias(distance, indices, *parameters)
        # As in transformers, not -inf: a row of padding that sees no key would have NaN, and so would gradients.
        least = torch.finfo(self.case.dtype).min
        return bias.clamp(min=least) if even else bias.masked_fill(~real, least).clamp(min=least)

    def padded_call(self, qkv: tuple[Tensor, ...], parameters: tuple[Tensor, ...]) -> Tensor:
        mask = self.mask(*parameters) if parameters else self.constant_mask
        return sdpa(qkv, mask, self.case.dropout_p)

    def on_padded(self, attend: Callable[..., Tensor]) -> Provider:
        chosen = {tuple(real.shape): real for real in (self.real, self.real_keys)}
        inputs = (*self.padded, *self.variant.parameters)

        def to_truth(x: Tensor) -> Tensor:
            return x[chosen[tuple(x.shape[:2])]] if tuple(x.shape[:2]) in chosen else x

        forward = lambda: attend(self.padded, self.variant.parameters)
        return Provider(forward, inputs, self.dout_padded, to_truth)

    def with_backend(self, backend: SDPBackend, qkv, parameters) -> Tensor:
        with sdpa_kernel(backend):
            return self.padded_call(qkv, parameters)

    def one_by_one(self, *inputs: Tensor) -> Tensor:
        """One call for each sequence."""
        count = len(self.packed)
        q, k, v = split(inputs[:count])
        lengths, key_lengths = self.case.lengths, self.case.key_lengths or self.case.lengths
        indices = torch.arange(k.shape[0], device=DEVICE).split(key_lengths)
        outs = []
        texts = (q.split(lengths), k.split(key_lengths), v.split(key_lengths), indices)
        for q_text, k_text, v_text, index in zip(*texts, strict=True):
            bias = None
            if self.variant.bias is not None:
                distance = distances(len(q_text), len(k_text))
                bias = self.variant.bias(distance, index[None], *inputs[count:])
            outs.append(sdpa((q_text[None], k_text[None], v_text[None]), bias)[0])
        return torch.cat(outs)

    def varlen(self, module) -> Provider | str:
        if self.case.dropout_p:
            return "no dropout"
        if self.variant.score is not None:
            return "no bias"
        window = self.variant.window
        options: dict = {} if window is None else {"window_size": (window, window)}
        options |= {"enable_gqa": True} if self.case.key_heads else {}
        offsets = (self.queries.cu_seqlens, self.keys.cu_seqlens)
        longest = (self.queries.max_seqlen, self.keys.max_seqlen)
        forward = lambda: module.varlen_attn(*split(self.packed), *offsets, *longest, **options)
        return Provider(forward, self.packed, self.dout)

    def flex(self, module, prepare: Callable[[Callable], Callable] = compiled) -> Provider:
        """The packed batch as one sequence, in which only tokens of the same text see each other."""
        parameters = self.variant.parameters
        window = self.variant.window
        added = self.variant.score
        lengths, key_lengths = self.case.lengths, self.case.key_lengths or self.case.lengths
        text = lambda sizes: torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        text_q, text_k = text(lengths).to(DEVICE), text(key_lengths).to(DEVICE)

        def seen(batch, head, i, j):
            same = text_q[i] == text_k[j]
            return same if window is None else same & ((j - i).abs() <= window)

        def score(value, batch, head, i, j):
            return added(value, head, j - i, j, *parameters)

        @cache  # made in the first call, so that an error is this provider's
        def blocks():
            shape = (self.queries.total_tokens, self.keys.total_tokens)
            return module.create_block_mask(seen, None, None, *shape, device=DEVICE)

        fused = prepare(module.flex_attention)

        def forward():
            q, k, v = (x.transpose(0, 1)[None] for x in split(self.packed))
            options = {"score_mod": None if added is None else score, "block_mask": blocks()}
            options |= {"enable_gqa": True} if self.case.key_heads else {}
            return fused(q, k, v, **options)[0].transpose(0, 1)

        return Provider(forward, (*self.packed, *parameters), self.dout)

    def ours(self) -> Tensor:
        options = self.variant.arguments(*self.variant.parameters)
        options["dropout_p"] = self.case.dropout_p
        if len(self.packed) == 1:
            offsets = (self.queries.cu_seqlens, self.queries.max_seqlen)
            return attention(*self.packed, *offsets, **options)
        return cross_attention(
            *self.packed,
            self.queries.cu_seqlens,
            self.keys.cu_seqlens,
            self.queries.max_seqlen,
            self.keys.max_seqlen,
            **options,
        )

    def by_cudnn(self) -> Tensor:
        offsets = (self.queries.cu_seqlens, self.queries.max_seqlen)
        return attention(*self.packed, *offsets, dropout_p=self.case.dropout_p, impl="cudnn")

    def providers(self) -> dict[str, Provider | str]:
        inputs = (*self.packed, *self.variant.parameters)
        providers: dict[str, Provider | str] = {"sdpa, padded": self.on_padded(self.padded_call)}
        if ON_GPU:
            for name, backend in BACKENDS.items():
                attend = partial(self.with_backend, backend)
                providers[f"sdpa {name}, padded"] = self.on_padded(attend)
            providers["torch.compile of sdpa, padded"] = self.on_padded(compiled(self.padded_call))
            providers["varlen_attn"] = peer("torch.nn.attention.varlen", self.varlen)
            if not self.case.variant and len(self.packed) == 1:
                providers["fastenc, cuDNN"] = Provider(self.by_cudnn, inputs, self.dout)
            else:
                providers["flex_attention"] = peer("torch.nn.attention.flex_attention", self.flex)
        else:
            providers["sdpa, a loop"] = Provider(
                lambda: self.one_by_one(*inputs), inputs, self.dout
            )
        providers["fastenc"] = Provider(self.ours, inputs, self.dout)
        return providers

    def truth(self) -> Provider:
        inputs = (*self.packed, *self.variant.parameters)
        wide = tuple(x.detach().double().requires_grad_() for x in inputs)
        return Provider(lambda: self.one_by_one(*wide), wide, self.dout.double())


def measure(case: Case) -> dict[str, dict]:
    batch = Batch(case)
    forward, backward = case.work()
    return compare_op(
        case.name,
        batch.providers(),
        batch.truth(),
        baseline="sdpa, padded",
        forward=forward,
        backward=backward,
        checked=not case.dropout_p,
    )


def main() -> None:
    groups = {
        "plain": ("attention", plain_cases),
        "variants": ("attention_variants", variant_cases),
    }
    unknown = set(sys.argv[1:]) - set(groups)
    if unknown:
        raise SystemExit(f"give {' or '.join(groups)}, got {', '.join(unknown)}")
    broken = []
    for group in sys.argv[1:] or groups:
        name, make = groups[group]
        measure_groups(name, {case.name: partial(measure, case) for case in make()}, broken)
    exit_if_broken(broken)


def tuned(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    yield from attention_problems(dtype, (64,), p=(0.1, 0.0), lengths=(512, 128, 64))


def tuned_rarely(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    yield from attention_problems(dtype, (32,), p=(0.1, 0.0), lengths=(512, 128, 64))
    yield from attention_problems(dtype, (64, 32), p=(0.1, 0.0), lengths=(256, 32))
    # The second kernel of the deterministic backward; its first kernel uses the entries of the atomic one.
    for length in (512, 256) if dtype != torch.float32 else ():
        lengths = [length] * (TOKENS // length)
        yield partial(attention_problem, lengths, 12, 64, dtype, 0.1, mode=deterministic)
    for p in (0.1, 0.0):  # Longformer's window stands for every bias: all share one entry
        options = {**attention_options(dtype), "window": (256, 256)}
        yield partial(attention_problem, [2048] * 4, 12, 64, dtype, p, **options)
    wide = (256,) if dtype != torch.float32 else ()
    yield from attention_problems(dtype, (*wide, 128, 96), p=(0.1, 0.0))
    if dtype == torch.float32:
        # Last, because candidates with full float32 products compile for up to a minute.
        yield from attention_problems(dtype, (64, 32), p=(0.0,), full=True)


def attention_problems(
    dtype: torch.dtype,
    dims: tuple[int, ...],
    p: tuple[float, ...],
    full: bool = False,
    lengths: tuple[int, ...] = (512, 128, 256, 64, 32),
) -> Iterator[Callable[[], Problem]]:
    """full: whether products are full float32 instead of TF32."""
    options = {} if full else attention_options(dtype)
    for dim in dims:
        for probability in p:
            for length in lengths:
                equal = [length] * (TOKENS // length)
                yield partial(attention_problem, equal, 12, dim, dtype, probability, **options)


def attention_options(dtype: torch.dtype) -> dict:
    """float32's products in TF32."""
    return {"mode": tf32, "tolerance": TF32_TOLERANCE} if dtype == torch.float32 else {}


def attention_problem(
    lengths: list[int],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    p: float,
    window: tuple[int, int] = (-1, -1),
    **options,
) -> Problem:
    """options: mode and tolerance, see :class:`Problem`."""
    batch = pack_sequences([[0] * length for length in lengths]).to(DEVICE)

    def run(qkv, impl):
        offsets = batch.cu_seqlens, batch.max_seqlen
        return attention(qkv, *offsets, dropout_p=p, window_size=window, impl=impl)

    inputs = random_inputs(dtype, (sum(lengths), 3, heads, dim))
    return Problem("attention", run, inputs, **options)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    """Batches of one length, and one with a quarter of its tokens in the longest sequences."""
    long, short = size.lengths[-1], size.lengths[-1] // 8
    batches = {str(n): [n] * (size.tokens // n) for n in size.lengths}
    batches["mixed"] = [long] * -(-size.tokens // (4 * long))
    batches["mixed"] += [short] * (3 * size.tokens // 4 // short)
    for p, (name, lengths) in itertools.product((0.0, 0.1), batches.items()):
        yield f"attention {name}, dropout {p}", partial(visited_problem, size, lengths, p)


def visited_problem(size: problems.Size, lengths: list[int], p: float) -> problems.Problem:
    one, flops = sum(lengths) * size.width, 4 * sum(n * n for n in lengths) * size.width
    like = torch.empty(sum(lengths), 0, dtype=problems.DTYPE, device=DEVICE)
    given = like, problems.offsets_of(lengths), max(lengths)
    # Made once for all layers, as in a model.
    more = {"bounds": sequence_bounds(*given), "blocks": attention_blocks(*given)}
    least = problems.work(4 * one, flops), problems.work(7 * one, 2.5 * flops)
    return problems.problem("attention", size.of(lengths), *least, dropout_p=p, **more)


if __name__ == "__main__":
    main()
