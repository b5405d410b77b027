"""How many kernels a masked-LM step of BERT-base launches on a GPU, counted without one.

    python -m benchmarks._dry_run benchmarks.step_launches [--layers N]

Triton's launches are counted by the driver that starts nothing. PyTorch's are counted from its calls: one for each call
that computes, and for calls of many tensors as many as ``multi_tensor_apply`` of PyTorch 2.11 makes (ATen/native/cuda/
MultiTensorApply.cuh). cuBLAS may split a product into several kernels, which is not counted. The step is the third one:
the first makes the optimiser's state.
"""

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._environment import environment
from fastenc.models import MaskedLM
from fastenc.ops import gemm
from fastenc.profiling import models

LENGTHS = (16,) * 4
# Tensors of a launch by the number of lists, elements of a block, blocks of a launch.
TENSORS, ELEMENTS, BLOCKS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}, 65536, 320
LISTS = {"_foreach_copy_": 2, "_foreach_add_": 1, "_foreach_sub_": 2, "_fused_adamw_": 4}
# Calls that compute nothing on a GPU; a dry run fills new tensors with zeros.
NOT_COUNTED = ("empty", "new_empty", "empty_like", "detach", "zero_", "_local_scalar_dense")
# The addresses of the gradients, which the host sends to the device.
SENT = Counter({"copy to the device": 1})


class Calls(TorchDispatchMode):
    """Counts the launches of PyTorch's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        if function.namespace == "aten" and not function.is_view and name not in NOT_COUNTED:
            many = LISTS.get(name)
            sizes = [t.numel() for t in arguments[0]] if many else []
            self.launches[name] += multi_tensor_launches(sizes, TENSORS[many]) if many else 1
        return function(*arguments, **(options or {}))


def multi_tensor_launches(sizes: Iterable[int], tensors: int) -> int:
    """Launches for tensors of these sizes, with at most ``tensors`` of them in one launch."""
    launches = taken = blocks = 0
    for size in sizes:
        taken += 1
        chunks = -(-size // ELEMENTS)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == BLOCKS or (taken == tensors and last):
                launches, blocks, taken = launches + 1, 0, 0 if last else 1
    return launches + (blocks > 0)


def count(layers: int, adamw: bool, wide_products: bool) -> Counter:
    """Launches of a step by kernel, with and without our AdamW and products that leave float32 gradients."""
    from benchmarks import _fake_gpu  # it becomes Triton's driver

    torch.manual_seed(0)
    gemm._widens = lambda a: wide_products and a.dtype == torch.bfloat16
    gemm._widening_product = wide_product
    model = MaskedLM(replace(models.SIZES["bert-base"], num_layers=layers))
    with environment("FASTENC_ADAMW", str(int(adamw))):
        step = models.training_step(model, LENGTHS, torch.device("cpu"), autocast=True)
    step(), step()
    before = len(_fake_gpu.launches())
    with Calls() as calls:
        step()
    launches = calls.launches + Counter(each["kernel"] for each in _fake_gpu.launches(before))
    return launches + SENT if adamw else launches


def wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One call, as on a GPU: a CPU has no product of bfloat16 into float32."""
    return a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    launches_of = partial(count, parser.parse_args().layers)
    counts = {
        "casts of gradients and weights, torch's AdamW": launches_of(False, False),
        "float32 gradients from the products, torch's AdamW": launches_of(False, True),
        "float32 gradients from the products, AdamW with copies": launches_of(True, True),
    }
    first = next(iter(counts.values()))
    for name, launches in counts.items():
        print(f"{name}: {launches.total()} launches")
        for kernel in sorted(first | launches):
            if launches is first or launches[kernel] != first[kernel]:
                print(f"    {launches[kernel]:5} {kernel}")


if __name__ == "__main__":
    main()
