"""What the host spends on the launches of each op's kernels, without a GPU.

    python -m benchmarks.launch_costs [--seconds 0.2]

Kernels are compiled for sm_90 and everything of a call happens but the launches themselves (_stub_driver.py). Prints
JSON: medians of the time of an op's call, which includes the allocation of its results, and of each of its launches
alone; and how many variants of each kernel were compiled for the sizes of a few batches, with whether each uses fused
multiply-adds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from fastenc.kernels import (
    attention,
    attention_blocks,
    bias_gelu,
    bias_glu,
    column_sum,
    embedding_layer_norm,
    index_sum,
    layer_norm,
    mlm_corruption,
    packing,
    rotary,
)
from fastenc.kernels import run as launches
from fastenc.kernels.attention_call import self_attention_call

from benchmarks import _stub_driver  # noqa: F401

WIDTH = 64
RNG = torch.tensor([1, 2])
# Tokens of batches: one, a multiple of 16, neither.
TOKENS = (1, 64, 65, 130)


def calls(tokens: int) -> Iterator[tuple[str, Callable]]:
    """(op, a call of it) for so many tokens in one sequence."""
    bf16 = lambda *shape: torch.randn(*shape).bfloat16()
    x, w = bf16(tokens, WIDTH), bf16(WIDTH)
    norm = (x, x, w, w, w, RNG, 0.1, 1e-5, False, True)
    _, h, mean, rstd = layer_norm.layer_norm_forward(*norm)
    yield "layer_norm forward", lambda: layer_norm.layer_norm_forward(*norm)
    backward = (x, x, h, mean, rstd, w, RNG, 0.1, False, True, True)
    yield "layer_norm backward", lambda: layer_norm.layer_norm_backward(*backward)
    yield "bias_gelu forward", lambda: bias_gelu.bias_gelu_forward(x, w, False)
    yield "bias_gelu backward", lambda: bias_gelu.bias_gelu_backward(x, x, w, False)
    y, v = bf16(tokens, WIDTH // 2), w
    yield "bias_glu forward", lambda: bias_glu.bias_glu_forward(x, v, 0)
    yield "bias_glu backward", lambda: bias_glu.bias_glu_backward(y, x, v, 0)
    yield "column_sum", lambda: column_sum.column_sum(x)
    ids = torch.arange(tokens) % 7
    table = bf16(200, WIDTH)
    tables = (ids, ids, ids, table, table, table)
    norm_of = (*tables, w, w, RNG, 2, 0.1, 1e-5, True)
    yield "embedding forward", lambda: embedding_layer_norm.embedding_layer_norm_forward(*norm_of)
    rest = (*tables, w, RNG, mean, rstd, 2, 0.1, True)
    yield (
        "embedding backward",
        lambda: embedding_layer_norm.embedding_layer_norm_backward(x, *rest),
    )
    order = ids.argsort(stable=True)
    rows = (table, x, ids[order], order, 0, -1)
    yield "embedding rows", lambda: embedding_layer_norm.add_rows_in_place(*rows)
    yield "index_sum", lambda: index_sum.index_sum(x, ids % 100, 512, 2, -1)
    indices = torch.arange(tokens)
    yield "unpack", lambda: packing.unpack(x, indices, tokens + 3, 0.0)
    special, choices = torch.zeros(200, dtype=torch.bool), torch.zeros(9, 2, dtype=torch.int64)
    corruption = (ids, RNG[:1], special, choices, choices[:, 0].contiguous(), 4, 2**29)
    yield "mlm_corruption", lambda: mlm_corruption.mlm_corruption(*corruption)
    q, k, v = bf16(tokens, 3, 1, 64).unbind(1)
    offsets, dout = torch.tensor([0, tokens], dtype=torch.int32), bf16(tokens, 1, 64)
    yield "attention_blocks", lambda: attention_blocks.attention_blocks(offsets, tokens, tokens)
    angles = torch.randn(max(512, tokens), 64)
    yield "rotary", lambda: rotary.rotary(q, angles, offsets, 512, False)
    for name, longest in (("short ", 128), ("", 512)):
        if name and tokens > longest:
            continue
        call = self_attention_call(offsets, longest, scale=0.125, dropout_p=0.1, rng_state=RNG)
        out, lse = attention.attention_forward(q, k, v, *call)
        yield (
            f"{name}attention forward",
            lambda call=call: attention.attention_forward(q, k, v, *call),
        )
        saved = (dout, None, out, lse, q, k, v, *call, True, False, True)
        yield (
            f"{name}attention backward",
            lambda saved=saved: attention.attention_backward(*saved),
        )


def launches_of(call: Callable) -> list[tuple[str, Callable]]:
    """(kernel, its launch alone) of what a call launches."""
    found = []

    def noting(kernel, *arguments, **named):
        found.append((kernel.__name__, partial(launches.run, kernel, *arguments, **named)))
        launches.run(kernel, *arguments, **named)

    modules = [m for name, m in sys.modules.items() if name.startswith("fastenc.kernels.")]
    importing = [
        m for m in modules if getattr(m, "run", None) is launches.run and m is not launches
    ]
    for module in importing:
        module.run = noting
    call()
    for module in importing:
        module.run = launches.run
    return found


def median_time(call: Callable, seconds: float) -> float:
    """Of batches of ten calls; in microseconds a call."""
    end, times = time.perf_counter() + seconds, []
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(10):
            call()
        times.append((time.perf_counter() - start) / 10)
    return round(statistics.median(times) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="of timing an op")
    seconds = parser.parse_args().seconds
    costs, bare = {}, {}
    for tokens in TOKENS:
        for name, call in calls(tokens):
            call()
            if tokens == 64:
                costs[name] = median_time(call, seconds)
                for kernel, launch in launches_of(call):
                    bare[kernel] = median_time(launch, seconds)
    compiled = {
        signature.kernel: [found.metadata.enable_fp_fusion for found in signature.compiled.values()]
        for signature in launches.signatures()
    }
    report = {
        "microseconds a call": costs,
        "microseconds a launch": bare,
        "median launch": statistics.median(bare.values()),
        "variants": compiled,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
