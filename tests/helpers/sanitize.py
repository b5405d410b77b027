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
from unittest import mock

import torch

import fastenc
from fastenc import ops, packing
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.nn import weight_copies
from fastenc.nn.adamw import AdamW
from fastenc.ops.cases import Draw, Size, first_cases
from fastenc.ops.linear_gelu import SWITCH
from tests.helpers.gpu import deterministic

LENGTHS = (1, 0, 17, 64, 65, 130)
SHORT = (1, 0, 17, 64, 65, 128)  # several sequences share a tile of half-precision attention
SIZES = (
    Size(LENGTHS, width=37, inner=500, heads=2, head_dim=40, vocabulary=1001),
    Size(LENGTHS, width=40, inner=24, heads=2, head_dim=32, vocabulary=9),
    Size(LENGTHS, width=64, inner=33, heads=2, head_dim=64, vocabulary=97),
    Size(LENGTHS, width=3, inner=130, heads=2, head_dim=128, vocabulary=517),
    Size(SHORT, width=768, inner=16, heads=2, head_dim=40, vocabulary=50),
    Size(SHORT, width=17, inner=5, heads=2, head_dim=64, vocabulary=2),
    Size(SHORT, width=8192, inner=96, heads=2, head_dim=128, vocabulary=9),
    Size((33,) * 5, width=96, inner=64, heads=2, head_dim=32, vocabulary=101),
    Size((1,), width=1, inner=1, heads=1, head_dim=64, vocabulary=1),
    # On a GPU a row of logits is in one block's registers, in a cluster's, or read twice.
    Size((1, 2), width=16, inner=16, heads=1, head_dim=64, vocabulary=40_001),
    Size((1, 2), width=8, inner=8, heads=1, head_dim=32, vocabulary=300_001),
)
CASES: dict[str, Callable] = {}


class OptionsDraw(Draw):
    """Each option has its value of this number, beginning again after the last."""

    def __init__(self, number: int, dtype: torch.dtype):
        device = torch.get_default_device()
        super().__init__(torch.Generator(device).manual_seed(number), dtype)
        self.number = number

    def choice(self, usual, *others):
        return (usual, *others)[self.number % (1 + len(others))]


def with_options(op: str, numbers: tuple[int, ...], dtype: torch.dtype) -> None:
    case = first_cases()[op]
    for size, number in itertools.product(SIZES, numbers):
        out = case.run(case.inputs(size, OptionsDraw(number, dtype)))
        if out.requires_grad:
            out.sum().backward()


# The second set has what most calls leave out. It compiles many more kernels.
CASES |= {op: partial(with_options, op, (2,)) for op in ops.__all__}
CASES |= {f"options_of_{op}": partial(with_options, op, (0, 1)) for op in ops.__all__}


def case(run):
    CASES[run.__name__] = run
    return run


@case
def bias_gelu_in_place(dtype):
    for size in SIZES:
        x = torch.randn(size.tokens, size.inner, dtype=dtype)
        ops.bias_gelu(x, torch.randn(size.inner, dtype=dtype), inplace=True)


@case
def deterministic_attention(dtype):
    with deterministic():
        with_options("attention", (2,), dtype)


@case
def linear_gelu_in_epilogue(dtype):
    """The products with epilogues, which "auto" takes by a switch only."""
    with mock.patch.dict(os.environ, {SWITCH: "1"}):
        with_options("linear_gelu", (2,), dtype)


@case
def adamw(dtype):
    """Tensors of several blocks and of a part of one, with copies and without."""
    if torch.get_default_device().type != "cuda":
        return
    tensors = [torch.randn(size, requires_grad=True) for size in (1, 1023, 1025, 4096)]
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
    labels = torch.arange(batch.total_tokens) * 7 % 97
    model(batch, labels.where(labels % 3 > 0, -100)).loss.backward()
    model.eval()
    run = (
        model
        if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
        else fastenc.compile_inference(model)
    )
    run(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="CASE")
    options = parser.parse_args()
    torch.set_default_device(options.device)
    chosen = [n for n in CASES if any(fnmatch(n, pattern) for pattern in options.patterns)]
    dtypes = [torch.float32, torch.bfloat16] + [torch.float16] * (options.device == "cuda")
    for name, dtype in itertools.product(chosen, dtypes):
        print(name, dtype, flush=True)
        CASES[name](dtype)


if __name__ == "__main__":
    main()
