"""The first eight minutes on a GPU: are the kernels right, how fast are they, beside whom, and what does a step take?

    python -m benchmarks.gpu_quick [prewarm] [check] [time] [sweep] [peers] [step] [graphs] [--output FOLDER] [--small]

Sections run in this order, all of them by default:

    prewarm   several processes compile every op's kernels; the cache goes into FOLDER/triton-cache
    check     every op and gradient against float64 at real sizes, dropout included (the masks are the reference's)
    time      each op: microseconds, the roofline's floor, percent of it; forward and backward
    sweep     launch parameters of the large ops, for two minutes; writes kernels/tuned/
    peers     PyTorch's and cuDNN's attention, F.layer_norm, F.cross_entropy on the same sizes
    step      masked-LM steps: milliseconds, tokens a second, the host's time
    graphs    the steps of smaller batches as CUDA graphs

Every section is written to FOLDER/gpu_quick.json when it ends and prints a line a case; one that fails does not stop
the next. No torch.compile. Without a GPU --small runs all but the sweep at small sizes, on whatever kernels there are:
for finding mistakes in this file.
"""

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._harness import (
    DEVICE,
    ON_GPU,
    TOLERANCES,
    Prepared,
    Work,
    compare,
    machine,
    peer,
)
from fastenc import ops
from fastenc._files import write_atomically
from fastenc.ops._attention_blocks import attention_blocks
from fastenc.profiling import models
from fastenc.profiling.timing import synchronize

DTYPE = torch.bfloat16
PROCESSES = 14
SWEEP_SECONDS = 120
SECONDS = 0.3  # of timing a case


class Size(NamedTuple):
    tokens: int
    heads: int
    vocabulary: int
    lengths: tuple[int, ...]
    models: tuple[str, ...]
    batches: tuple[tuple[int, int], ...]  # (tokens, length) of a step

    @property
    def width(self) -> int:
        return 64 * self.heads


STEPS = ((4096, 128), (16384, 128), (65536, 512))
REAL = Size(16384, 12, 30522, (64, 128, 512), ("bert-base", "minilm"), STEPS)
SMALL = Size(128, 1, 50, (64, 128), ("minilm",), ((32, 16),))


class Problem(NamedTuple):
    """An op at a size.

    Fields:
        run: called with the inputs and impl.
        inputs: floating-point tensors are differentiated.
        forward, backward: the least work of each direction.
    """

    name: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    forward: Work
    backward: Work


def problems(size: Size) -> Iterator[tuple[str, Callable[[], Problem]]]:
    """(name, what makes it)."""
    for p in (0.0, 0.1):
        for length in size.lengths:
            lengths = [length] * (size.tokens // length)
            yield f"attention {length}, dropout {p}", partial(attention, size, lengths, p)
        yield f"attention mixed, dropout {p}", partial(attention, size, mixed(size), p)
        yield f"layer_norm, dropout {p}", partial(layer_norm, size, p)
        yield f"embedding_layer_norm, dropout {p}", partial(embedding, size, p)
    yield "bias_gelu", partial(bias_gelu, size)
    yield "bias_glu", partial(bias_glu, size)
    yield "masked_cross_entropy", partial(cross_entropy, size)
    yield "linear_masked_cross_entropy", partial(linear_cross_entropy, size)


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE).requires_grad_()


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


def work(elements: float, flops: float = 0.0) -> Work:
    return Work(elements * DTYPE.itemsize, flops, DTYPE)


def mixed(size: Size) -> list[int]:
    """Lengths: a quarter of the tokens in the longest sequences, the rest in those of an eighth of their length."""
    long, short = size.lengths[-1], size.lengths[-1] // 8
    return [long] * -(-size.tokens // (4 * long)) + [short] * (3 * size.tokens // 4 // short)


def attention(size: Size, lengths: list[int], p: float) -> Problem:
    offsets, longest = offsets_of(lengths), max(lengths)
    inputs = (new(sum(lengths), 3, size.heads, 64),)
    blocks = attention_blocks(inputs[0], offsets, longest)

    def run(qkv, impl):
        return ops.attention(qkv, offsets, longest, dropout_p=p, blocks=blocks, impl=impl)

    one, flops = sum(lengths) * size.width, 4 * sum(n * n for n in lengths) * size.width
    return Problem("attention", run, inputs, work(4 * one, flops), work(7 * one, 2.5 * flops))


def layer_norm(size: Size, p: float) -> Problem:
    def run(x, residual, x_bias, weight, bias, impl):
        fused = {"residual": residual, "x_bias": x_bias, "dropout_p": p}
        return ops.layer_norm(x, weight, bias, impl=impl, **fused)

    one, vector = size.tokens * size.width, (size.width,)
    inputs = (
        new(size.tokens, size.width),
        new(size.tokens, size.width),
        *(new(*vector) for _ in range(3)),
    )
    return Problem("layer_norm", run, inputs, work(4 * one), work((4 if p else 3) * one))


def embedding(size: Size, p: float) -> Problem:
    ids = torch.randint(size.vocabulary, (size.tokens,), device=DEVICE)
    positions = torch.arange(size.tokens, device=DEVICE) % 128

    def run(word, position, token_type, weight, bias, impl):
        tables = {"position_ids": positions, "position": position, "token_type": token_type}
        return ops.embedding_layer_norm(ids, word, weight, bias, dropout_p=p, impl=impl, **tables)

    shapes = (
        (size.vocabulary, size.width),
        (128, size.width),
        (2, size.width),
        *[(size.width,)] * 2,
    )
    one, table = size.tokens * size.width, size.vocabulary * size.width
    inputs = tuple(new(*shape) for shape in shapes)
    return Problem("embedding", run, inputs, work(2 * one), work(7 * one + table))


def bias_gelu(size: Size) -> Problem:
    inputs = (new(size.tokens, 4 * size.width), new(4 * size.width))
    one = inputs[0].numel()
    return Problem("bias_gelu", ops.bias_gelu, inputs, work(2 * one), work(3 * one))


def bias_glu(size: Size) -> Problem:
    inputs = (new(size.tokens, 4 * size.width), new(4 * size.width))
    one = inputs[0].numel()
    run = partial(ops.bias_glu, activation="gelu")
    return Problem("bias_glu", run, inputs, work(1.5 * one), work(2.5 * one))


def cross_entropy(size: Size) -> Problem:
    rows = size.tokens // 8
    labels = torch.randint(size.vocabulary, (rows,), device=DEVICE)
    run = lambda logits, impl: ops.masked_cross_entropy(logits, labels, impl=impl)
    one = rows * size.vocabulary  # the gradient is formed with the loss
    return Problem("cross_entropy", run, (new(rows, size.vocabulary),), work(one), work(one))


def linear_cross_entropy(size: Size) -> Problem:
    rows = size.tokens // 8
    labels = torch.randint(size.vocabulary, (rows,), device=DEVICE)

    def run(hidden, weight, bias, impl):
        return ops.linear_masked_cross_entropy(
            hidden, weight, bias, labels, max_labels=rows, impl=impl
        )

    inputs = (new(rows, size.width), new(size.vocabulary, size.width), new(size.vocabulary))
    flops = 2 * rows * size.vocabulary * size.width
    logits = rows * size.vocabulary
    return Problem("linear", run, inputs, work(logits, flops), work(logits, 2 * flops))


def results(problem: Problem, inputs: tuple[Tensor, ...], impl: str) -> list[Tensor]:
    """The output and every gradient, of the same masks at every call."""
    torch.manual_seed(0)
    out = problem.run(*inputs, impl=impl)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def compile_one(number: int, size: Size) -> str:
    name, make = list(problems(size))[number]
    problem = make()
    results(problem, problem.inputs, "auto")
    return name


def prewarm(size: Size) -> dict[str, Any]:
    """Each process compiles an op's kernels into the cache that all share."""
    names = [name for name, _ in problems(size)]
    start = time.perf_counter()
    if ON_GPU:
        with multiprocessing.get_context("spawn").Pool(min(PROCESSES, len(names))) as pool:
            for name in pool.imap_unordered(partial(compile_one, size=size), range(len(names))):
                print(f"  {time.perf_counter() - start:5.1f} s  {name}", flush=True)
    return {"seconds": time.perf_counter() - start, "problems": len(names)}


def check(size: Size) -> dict[str, Any]:
    found = {}
    for name, make in problems(size):
        problem = make()
        wide = tuple(x.detach().double().requires_grad_() for x in problem.inputs)
        pairs = zip(
            results(problem, problem.inputs, "auto"),
            results(problem, wide, "reference"),
            strict=True,
        )
        errors = [
            ((mine.double() - true).norm() / true.norm().clamp(min=1e-30)).item()
            for mine, true in pairs
        ]
        right = max(errors) < TOLERANCES[DTYPE]
        found[name] = {"right": right, "relative errors": errors}
        print(f"  {'right' if right else 'WRONG':6} {name}: {max(errors):.1e}", flush=True)
    return found


def time_ops(size: Size) -> dict[str, Any]:
    found = {}
    for name, make in problems(size):
        problem = make()
        call = lambda problem=problem: problem.run(*problem.inputs, impl="auto")
        dout = torch.ones_like(call())
        gradients = lambda out, problem=problem, dout=dout: torch.autograd.grad(
            out, problem.inputs, dout
        )
        for direction, timed, least in (
            ("forward", call, problem.forward),
            ("backward", Prepared(call, gradients), problem.backward),
        ):
            with torch.no_grad() if direction == "forward" else nullcontext():
                row = compare({"fastenc": timed}, baseline="fastenc", work=least, seconds=SECONDS)[
                    "fastenc"
                ]
            found[f"{name}, {direction}"] = row
            print(line(f"{name}, {direction}", row), flush=True)
    return found


def line(name: str, row: dict[str, Any]) -> str:
    if "median_ms" not in row:
        return f"  {name:48} {row}"
    text = f"  {name:48} {row['median_ms'] * 1e3:9.1f} us"
    if "floor_ms" in row:
        text += f"  floor {row['floor_ms'] * 1e3:8.1f}  {row['percent_of_roofline']:5.1f} %"
    return text


def sweep(size: Size) -> dict[str, Any]:
    if not ON_GPU:
        return {"skipped": "tuning times kernels on a GPU"}
    from benchmarks import tune

    return {"finished": tune.main(["--seconds", str(SWEEP_SECONDS)]) == 0}


def peers(size: Size) -> dict[str, Any]:
    found = {}

    def against(name: str, providers: dict[str, Any], inputs: tuple[Tensor, ...]) -> None:
        for direction in ("forward", "forward + backward"):
            calls = {}
            for provider, call in providers.items():
                forward = call if isinstance(call, str) else partial(call, *inputs)
                both = lambda forward=forward: torch.autograd.grad(
                    (out := forward()), inputs, torch.ones_like(out)
                )
                calls[provider] = (
                    forward if isinstance(call, str) or direction == "forward" else both
                )
            with torch.no_grad() if direction == "forward" else nullcontext():
                rows = compare(calls, baseline="fastenc", seconds=SECONDS * len(calls))
            found[f"{name}, {direction}"] = rows
            for provider, row in rows.items():
                print(line(f"{name}, {direction}, {provider}", row), flush=True)

    for length in size.lengths[1:]:
        batch = size.tokens // length
        offsets = offsets_of([length] * batch)
        providers = {
            "fastenc": lambda qkv, length=length, offsets=offsets: ops.attention(
                qkv, offsets, length
            ),
            **{
                backend: partial(padded_attention, batch, backend)
                for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION")
            },
            "cuDNN, packed": lambda qkv, length=length, offsets=offsets: ops.attention(
                qkv, offsets, length, impl="cudnn"
            ),
            "varlen_attn": peer(
                "torch.nn.attention.varlen", partial(varlen_attention, offsets, length)
            ),
        }
        against(f"attention {length}", providers, (new(size.tokens, 3, size.heads, 64),))
    norm = (new(size.tokens, size.width), new(size.width), new(size.width))
    providers = {
        "fastenc": lambda x, weight, bias: ops.layer_norm(x, weight, bias),
        "F.layer_norm": lambda x, weight, bias: F.layer_norm(x, (size.width,), weight, bias),
    }
    against("layer_norm", providers, norm)
    rows = size.tokens // 8
    labels = torch.randint(size.vocabulary, (rows,), device=DEVICE)
    providers = {
        "fastenc": lambda logits: ops.masked_cross_entropy(logits, labels),
        "F.cross_entropy": lambda logits: F.cross_entropy(logits, labels),
    }
    against("masked_cross_entropy", providers, (new(rows, size.vocabulary),))
    return found


def padded_attention(batch: int, backend: str, qkv: Tensor) -> Tensor:
    """Equal lengths, so that nothing is padding."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = qkv.unflatten(0, (batch, -1)).permute(2, 0, 3, 1, 4)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


def varlen_attention(offsets: Tensor, length: int, module) -> Callable[[Tensor], Tensor]:
    def run(qkv: Tensor) -> Tensor:
        return module.varlen_attn(*qkv.unbind(1), offsets, offsets, length, length)

    return run


def step(size: Size, graph: bool = False) -> dict[str, Any]:
    """graph: recorded as CUDA graphs, which large batches do not need."""
    found = {}
    for name, (tokens, length) in product(size.models, size.batches[: 2 if graph else None]):
        model = models.load(name, training=True).to(DEVICE)
        lengths = [length] * (tokens // length)
        run = models.training_step(model, lengths, DEVICE, autocast=True, graph=graph)
        for _ in range(3):
            run()
        synchronize(DEVICE)
        repeats = 10 if ON_GPU else 1
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        host = (time.perf_counter() - start) / repeats
        synchronize(DEVICE)
        seconds = (time.perf_counter() - start) / repeats
        case = f"{name}, {tokens} tokens in sequences of {length}"
        found[case] = {
            "ms": seconds * 1e3,
            "host_ms": host * 1e3,
            "tokens_per_s": tokens / seconds,
        }
        print(
            f"  {case}: {seconds * 1e3:.1f} ms, host {host * 1e3:.1f} ms, {tokens / seconds:,.0f} tokens/s"
        )
        del model, run
    return found


SECTIONS = {
    "prewarm": prewarm,
    "check": check,
    "time": time_ops,
    "sweep": sweep,
    "peers": peers,
    "step": step,
    "graphs": partial(step, graph=True),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--output", type=Path, default=Path("gpu-quick"), metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="small sizes, also without a GPU")
    given = parser.parse_args(arguments)
    if unknown := set(given.sections) - set(SECTIONS):
        parser.error(f"SECTION must be one of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if not ON_GPU and not given.small:
        parser.error("torch sees no GPU here: --small tries the script without one")
    given.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRITON_CACHE_DIR", str(given.output.resolve() / "triton-cache"))
    path = given.output / "gpu_quick.json"
    report = json.loads(path.read_text()) if path.is_file() else {}
    report["machine"] = machine()
    failed = False
    for name in given.sections or SECTIONS:
        print(f"{name}:", flush=True)
        start = time.perf_counter()
        try:
            found = SECTIONS[name](SMALL if given.small else REAL)
        except Exception as error:
            traceback.print_exc(limit=-4)
            found = {"failed": f"{type(error).__name__}: {error}"[:500]}
        failed |= "failed" in found or (
            name == "check" and not all(c["right"] for c in found.values())
        )
        report[name] = {"seconds": time.perf_counter() - start, "found": found}
        write_atomically(path, lambda to: to.write_text(json.dumps(report, indent=1)))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
