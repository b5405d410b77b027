"""Fills this GPU's table of launch parameters, kernels/tuned/sm_<capability>.json.

fastenc bench --tune [--dtype DTYPE] [--seconds N] [--force] [OP ...]

For every problem below it notes which launches the op asks about, and improves each from the kernel's own rule on, one
parameter at a time, until no single change helps. A candidate that fails to compile, or whose result or gradient is
not the reference's, is never timed; the rule keeps its place unless it is beaten by more than 2 %. The table is written
after every launch, so an interrupted run goes on where it stopped; entries that are there are kept unless --force is
given. The exit code is 75 where --seconds were up before everything was tuned.

Candidates compile one after the other, which takes most of the time, so a run tunes for one dtype: bfloat16, in which
encoders are trained and run on GPUs, unless --dtype names another. What is not tuned keeps its rule.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from fastenc.kernels import launch
from torch import Tensor

from benchmarks._harness import DEVICE, ON_GPU, TOLERANCES, UNFINISHED, machine
from fastenc._files import write_atomically
from fastenc.ops import attention, bias_gelu, bias_glu, embedding_layer_norm, layer_norm
from fastenc.packing import pack_sequences
from fastenc.profiling.timing import KernelTimer, synchronize

TOKENS, VOCABULARY = 16384, 30522
GAIN = 0.98  # of the rule's time: less is noise
REPEATS = 20
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TF32_TOLERANCE = TOLERANCES[torch.float16]  # as many bits of significand: 11
Clock = Callable[[Callable, Callable | None], float]


class Problem(NamedTuple):
    """An op at a shape to tune for: op(*inputs, impl=...), differentiable in its inputs.

    Fields:
        mode: what it is tuned under, a context, such as deterministic backwards.
        tolerance: largest ||result - truth|| / ||truth|| of a right result; that of the inputs' dtype if None.
    """

    op: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    mode: Callable[[], AbstractContextManager] = nullcontext
    tolerance: float | None = None


def problems(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    """Encoders' shapes, made one at a time; attention first, which has most to gain, what is rarer last."""
    yield from attention_problems(dtype, (64, 32), p=(0.1, 0.0))
    for width in (768, 1024, 384):
        for p in (0.1, 0.0):
            yield lambda: norm_problem(TOKENS, width, dtype, p)
            yield lambda: embedding_problem(TOKENS, width, dtype, p)
    for width in (3072, 4096, 1536):
        yield lambda: gelu_problem(TOKENS, width, dtype)
    yield lambda: glu_problem(TOKENS, 1152, dtype)
    # The deterministic backward's second kernel; its first has the atomic one's entries.
    for length in (512, 256) if dtype != torch.float32 else ():
        lengths = [length] * (TOKENS // length)
        yield lambda: attention_problem(lengths, 12, 64, dtype, 0.1, mode=deterministic)
    for p in (0.1, 0.0):  # Longformer's window stands for every bias: all have one entry
        options = {**attention_options(dtype), "window": (256, 256)}
        yield lambda: attention_problem([2048] * 4, 12, 64, dtype, p, **options)
    yield from attention_problems(dtype, (128, 96), p=(0.1, 0.0))
    if dtype == torch.float32:
        # Last, as candidates with full float32 products compile for up to a minute.
        yield from attention_problems(dtype, (64, 32), p=(0.0,), full=True)


def attention_problems(
    dtype: torch.dtype, dims: tuple[int, ...], p: tuple[float, ...], full: bool = False
) -> Iterator[Callable[[], Problem]]:
    """full: float32 products, not TF32's."""
    options = {} if full else attention_options(dtype)
    for dim in dims:
        for probability in p:
            for length in (512, 128, 256, 64, 32):
                lengths = [length] * (TOKENS // length)
                yield lambda: attention_problem(lengths, 12, dim, dtype, probability, **options)


def attention_options(dtype: torch.dtype) -> dict:
    """float32's products in TF32."""
    return {"mode": tf32, "tolerance": TF32_TOLERANCE} if dtype == torch.float32 else {}


def random_inputs(dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(*s, device=DEVICE).to(dtype).requires_grad_() for s in shapes)


def norm_problem(rows: int, width: int, dtype: torch.dtype, p: float) -> Problem:
    def run(x, residual, weight, bias, x_bias, impl):
        return layer_norm(x, weight, bias, residual=residual, x_bias=x_bias, dropout_p=p, impl=impl)

    matrix, vector = (rows, width), (width,)
    inputs = random_inputs(dtype, matrix, matrix, vector, vector, vector)
    return Problem("layer_norm", run, inputs)


def embedding_problem(tokens: int, width: int, dtype: torch.dtype, p: float) -> Problem:
    ids, positions = (torch.randint(n, (tokens,), device=DEVICE) for n in (VOCABULARY, 512))

    def run(word, position, token_type, weight, bias, impl):
        tables = {"position_ids": positions, "position": position, "token_type": token_type}
        return embedding_layer_norm(ids, word, weight, bias, dropout_p=p, impl=impl, **tables)

    shapes = ((VOCABULARY, width), (512, width), (2, width), (width,), (width,))
    return Problem("embedding_layer_norm", run, random_inputs(dtype, *shapes))


def gelu_problem(rows: int, width: int, dtype: torch.dtype) -> Problem:
    return Problem("bias_gelu", bias_gelu, random_inputs(dtype, (rows, width), (width,)))


def glu_problem(rows: int, width: int, dtype: torch.dtype) -> Problem:
    inputs = random_inputs(dtype, (rows, 2 * width), (2 * width,))
    return Problem("bias_glu", partial(bias_glu, activation="gelu"), inputs)


@contextmanager
def tf32() -> Iterator[None]:
    """float32 products in TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # the truth's products may be neither
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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


def kernel_clock() -> Clock:
    """Median device time, from a cold cache."""
    timer = KernelTimer(DEVICE)

    def clock(call: Callable, prepare: Callable | None) -> float:
        start = time.perf_counter()
        call(*(() if prepare is None else (prepare(),)))
        host = time.perf_counter() - start
        synchronize(DEVICE)
        return statistics.median(timer.seconds(call, REPEATS, host, prepare))

    return clock


class Tuner:
    """Tunes problem after problem into one table.

    Args:
        impl: the implementation whose launches are tuned.
        keep: whether entries of the table that is there already stay as they are.
    """

    def __init__(self, path: Path, clock: Clock, *, impl: str = "triton", keep: bool = True):
        self.path, self.clock, self.impl, self.keep = path, clock, impl, keep
        self.entries: dict[tuple[str, launch.Key], dict] = {}
        if path.is_file():
            for entry in json.loads(path.read_text())["entries"]:
                self.entries[entry["op"], tuple(sorted(entry["key"].items()))] = entry
        self.tuned: set[tuple[str, launch.Key]] = set(self.entries) if keep else set()

    def tune(self, problem: Problem, until: float = float("inf")) -> bool:
        """Both directions; stops between launches once ``time.monotonic()`` is past ``until``.

        Returns: whether every launch has its entry.
        """
        with problem.mode():
            return self._tune_both(problem, until)

    def _tune_both(self, problem: Problem, until: float) -> bool:
        exact = tuple(v.detach().double().requires_grad_() for v in problem.inputs)
        out = self._seeded(problem, exact, "reference")
        dout = torch.randn_like(out)
        truth = torch.autograd.grad(out, exact, dout)
        low = dout.to(problem.inputs[0].dtype)
        forward = lambda: self._seeded(problem, problem.inputs, self.impl)
        backward = lambda y: torch.autograd.grad(y, problem.inputs, low)
        return self._tune(problem, forward, None, (out.detach(),), until) and self._tune(
            problem, backward, forward, truth, until
        )

    def _seeded(self, problem: Problem, inputs: tuple[Tensor, ...], impl: str) -> Tensor:
        torch.manual_seed(0)  # the same dropout mask every time
        return problem.run(*inputs, impl=impl)

    def _tune(
        self, problem: Problem, call, prepare, truth: tuple[Tensor, ...], until: float
    ) -> bool:
        asked: dict[tuple[str, launch.Key], dict] = {}

        def note(tunable, key, rule):
            asked.setdefault((tunable.op, key), rule)
            return rule

        argument = () if prepare is None else (prepare(),)
        with launch.overruled(note):
            call(*argument)
        for place, rule in asked.items():
            if place in self.tuned:
                continue
            if time.monotonic() > until:
                return False
            self._tune_launch(place, rule, problem, call, prepare, truth)
        return True

    def _tune_launch(self, place, rule: dict, problem: Problem, call, prepare, truth) -> None:
        op, key = place
        tried: dict[str, float] = {}  # parameters → seconds, infinite for what cannot be used

        def seconds(candidate: dict) -> float:
            name = json.dumps(candidate, sort_keys=True)
            if name not in tried:
                tried[name] = self._measure(place, candidate, problem, call, prepare, truth)
            return tried[name]

        rule_seconds = seconds(rule)
        if rule_seconds == math.inf:
            raise RuntimeError(f"{op} {dict(key)}: the rule's own {rule} fails or is wrong")
        best, found = rule, None
        while best != found:
            found = best
            for parameter, values in launch.registry[op].grid.items():
                best = min([best, *({**best, parameter: v} for v in values)], key=seconds)
        if seconds(best) > GAIN * rule_seconds:
            best = rule
        self.entries[place] = {
            "op": op,
            "key": dict(key),
            "launch": best,
            "us": seconds(best) * 1e6,
            "rule_us": rule_seconds * 1e6,
        }
        self.tuned.add(place)
        self.write()
        unusable = sum(value == math.inf for value in tried.values())
        print(
            f"{op} {dict(key)}: {best}, {seconds(best) * 1e6:.1f} us; the rule {rule_seconds * 1e6:.1f} us; "
            f"{len(tried)} tried, {unusable} unusable",
            flush=True,
        )

    def _measure(self, place, candidate: dict, problem: Problem, call, prepare, truth) -> float:
        def answer(tunable, key, rule):
            return candidate if (tunable.op, key) == place else rule

        with launch.overruled(answer):
            try:
                result = call(*(() if prepare is None else (prepare(),)))
                tolerance = problem.tolerance or TOLERANCES[problem.inputs[0].dtype]
                right = self._right(result, truth, tolerance)
                return self.clock(call, prepare) if right else math.inf
            except Exception:  # too much shared memory, a shape that the compiler refuses
                return math.inf

    @staticmethod
    def _right(result, truth: tuple[Tensor, ...], tolerance: float) -> bool:
        results = (result,) if isinstance(result, Tensor) else result
        # Written so that NaN is wrong.
        return all(
            ((value.detach().double() - true).norm() <= tolerance * true.norm()).item()
            for value, true in zip(results, truth, strict=True)
        )

    def write(self) -> None:
        """The table so far, in place of the old one."""
        ordered = sorted(self.entries.values(), key=lambda e: (e["op"], json.dumps(e["key"])))
        text = json.dumps({"machine": machine(), "entries": ordered}, indent=1) + "\n"
        self.path.parent.mkdir(exist_ok=True)
        write_atomically(self.path, lambda temporary: temporary.write_text(text))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "fastenc bench --tune",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--force", action="store_true", help="tune again what the table has")
    given = parser.parse_args(arguments)
    if not ON_GPU:
        parser.error("tuning times kernels on a GPU, and torch sees none here")
    until = time.monotonic() + given.seconds
    path = launch.TABLES / f"{launch.architecture(torch.device('cuda', 0))}.json"
    tuner = Tuner(path, kernel_clock(), keep=not given.force)
    finished = True
    for make in problems(DTYPES[given.dtype]):
        problem = make()
        if given.ops and problem.op not in given.ops:
            continue
        finished = tuner.tune(problem, until)
        if not finished:
            print("the time is up; the next run goes on here")
            break
    print(f"{len(tuner.entries)} entries in {path}")
    return 0 if finished else UNFINISHED


if __name__ == "__main__":
    raise SystemExit(main())
