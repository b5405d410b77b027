"""The host's time around the kernels, by pytest-benchmark: python -m benchmarks.run host_costs

Inputs are so small that the arithmetic hardly counts. On a GPU a call returns when its kernels are queued.
"""

import pytest
import torch

from benchmarks._device import DEVICE
from benchmarks._peers import padded
from benchmarks.lengths import lengths
from fastenc import ops
from fastenc.data import BatchSampler
from fastenc.models import EncoderConfig
from fastenc.packing import pack, pack_sequences
from fastenc.profiling.models import random_sequences

SEQUENCES = random_sequences(EncoderConfig(), lengths("SST-2", 512))


def small(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def ops_and_inputs() -> dict:
    x, weight, qkv = small(4, 64), small(64), small(4, 3, 1, 64)
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    return {
        "layer_norm": (lambda: ops.layer_norm(x, weight), x),
        "layer_norm, residual and dropout": (
            lambda: ops.layer_norm(x, weight, residual=x, dropout_p=0.1),
            x,
        ),
        "bias_gelu": (lambda: ops.bias_gelu(x, weight), x),
        "attention": (lambda: ops.attention(qkv, offsets, 4), qkv),
        "torch layer_norm": (lambda: torch.nn.functional.layer_norm(x, (64,), weight), x),
    }


@pytest.mark.parametrize("name", ops_and_inputs())
def test_forward(benchmark, name):
    forward, _ = ops_and_inputs()[name]
    with torch.no_grad():
        benchmark(forward)


@pytest.mark.parametrize("name", ops_and_inputs())
def test_forward_and_backward(benchmark, name):
    forward, x = ops_and_inputs()[name]
    dout = torch.ones_like(forward())
    benchmark(lambda: torch.autograd.grad(forward(), x, dout))


def test_pack_sequences(benchmark):
    assert benchmark(pack_sequences, SEQUENCES).num_sequences == len(SEQUENCES)


def test_pack_a_padded_batch(benchmark):
    batch = padded(SEQUENCES)
    packed = benchmark(lambda: pack(batch["input_ids"], batch["attention_mask"]))
    assert packed.total_tokens == sum(map(len, SEQUENCES))


def test_batch_to_device(benchmark):
    benchmark(pack_sequences(SEQUENCES).to, DEVICE)


def test_batches_of_an_epoch_of_10000(benchmark):
    sizes = lengths("SST-2", 140_000)[:10_000]
    sampler = BatchSampler(sizes, 32, shuffle=True)
    benchmark(lambda: list(sampler.epoch(0)))
