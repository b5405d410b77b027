"""The backward of T5's attention with its table of relative biases, and what the table's gradient adds to it.

python -m benchmarks.studies.relative_bias [threads]

transformers' attention stores the scores of the padded batch (batch, heads, length, length) and sums their gradients;
fastenc's stores none. 8 heads of 64, float32, without the projections. "real lengths" follow a log-normal distribution
and are padded by transformers to the longest. The gradients of q, k, v and the table must agree before anything is
timed. Each backward is timed with the table's gradient and without it; "the table's gradient" is the difference.
"""

import random
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks._compare import compare
from benchmarks._results import read_cases, write
from fastenc.nn.relative_bias import RelativeBiasSpec, relative_bias
from fastenc.ops import attention
from fastenc.packing import pack_sequences

RESULT, HEADS, HEAD_DIM, SEQUENCES = "relative_bias", 8, 64, 16
OURS, THEIRS = "fastenc", "transformers"
FROZEN, ALONE = ", table frozen", ", the table's gradient"


def real_lengths() -> list[int]:
    draw = random.Random(0)
    return [min(512, int(draw.lognormvariate(4.5, 0.6)) + 3) for _ in range(SEQUENCES)]


class Case:
    """A batch with random q, k, v, table and output gradient, packed and padded."""

    def __init__(self, lengths: list[int], causal: bool):
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5Attention

        torch.manual_seed(0)
        self.batch = pack_sequences([[0] * length for length in lengths])
        self.causal = causal
        settings = T5Config(
            d_model=HEADS * HEAD_DIM, d_kv=HEAD_DIM, num_heads=HEADS, is_decoder=causal
        )
        self.theirs = T5Attention(settings, has_relative_attention_bias=True, layer_idx=0)
        self.qkv = torch.randn(self.batch.total_tokens, 3, HEADS, HEAD_DIM)
        self.qkv[:, 0] *= HEAD_DIM**-0.5
        self.dout = torch.randn(self.batch.total_tokens, HEADS, HEAD_DIM)
        real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        least = torch.finfo(torch.float32).min
        self.real = real
        self.mask = torch.zeros(real.shape).masked_fill(~real, least)[:, None, None]
        if causal:
            later = torch.ones(2 * (max(lengths),), dtype=torch.bool).triu(1)
            self.mask = self.mask.expand(-1, -1, max(lengths), -1).masked_fill(later, least)

    def padded(self, packed: Tensor) -> Tensor:
        """(tokens, heads, head_dim) → (batch, heads, length, head_dim)."""
        rows = packed.new_zeros(*self.real.shape, HEADS, HEAD_DIM)
        rows[self.real] = packed
        return rows.transpose(1, 2).contiguous()

    def backward_of(self, name: str, trained: bool) -> Callable[[], tuple[Tensor, ...]]:
        """The backward of one forward: the gradients of q, k and v, and of the table if it is ``trained``."""
        table = self.theirs.relative_attention_bias.weight.detach().requires_grad_(trained)
        if name == OURS:
            inputs: tuple[Tensor, ...] = (self.qkv.clone().requires_grad_(),)
            spec = RelativeBiasSpec(bidirectional=not self.causal)
            out = attention(
                *inputs,
                self.batch.cu_seqlens,
                self.batch.max_seqlen,
                softmax_scale=1.0,
                window_size=(-1, 0) if self.causal else (-1, -1),
                relative_bias=relative_bias(table, spec, self.batch.max_seqlen),
            )
            dout = self.dout
        else:
            from transformers.models.t5.modeling_t5 import eager_attention_forward

            inputs = tuple(self.padded(x).requires_grad_() for x in self.qkv.unbind(1))
            self.theirs.relative_attention_bias.weight = torch.nn.Parameter(table, trained)
            table = self.theirs.relative_attention_bias.weight
            bias = self.theirs.compute_bias(*2 * (self.real.shape[1],))
            attend = partial(eager_attention_forward, self.theirs, *inputs, self.mask, scaling=1.0)
            out, _ = attend(position_bias=bias)
            dout = self.padded(self.dout).transpose(1, 2).contiguous()
        wanted = (*inputs, table) if trained else inputs
        return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)

    def packed_gradients(self, name: str, gradients: tuple[Tensor, ...]) -> list[Tensor]:
        if name == OURS:
            return [*gradients[0].unbind(1), *gradients[1:]]
        return [*(x.transpose(1, 2)[self.real] for x in gradients[:3]), *gradients[3:]]

    def measure(self) -> dict[str, dict]:
        backwards = {
            name + suffix: self.backward_of(name, suffix != FROZEN)
            for name in (THEIRS, OURS)
            for suffix in ("", FROZEN)
        }
        expected = self.packed_gradients(THEIRS, backwards[THEIRS]())

        def check(name: str, result: tuple[Tensor, ...]) -> str | None:
            ours = self.packed_gradients(name.removesuffix(FROZEN), result)
            pairs = zip(ours, expected, strict=name in (THEIRS, OURS))
            errors = [((a - b).norm() / b.norm()).item() for a, b in pairs]
            return None if max(errors) < 1e-4 else f"gradients differ by {max(errors):.2g}"

        rows = compare(backwards, baseline=THEIRS, check=check, seconds=6)
        for name in (THEIRS, OURS):
            added = rows[name]["median_ms"] - rows[name + FROZEN]["median_ms"]
            rows[name + ALONE] = {"difference_ms": added}
        return rows


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    cases = read_cases(RESULT)
    for name, lengths, causal in (
        ("encoder, 16 texts of 128", [128] * SEQUENCES, False),
        ("encoder, real lengths", real_lengths(), False),
        ("decoder, 16 texts of 128", [128] * SEQUENCES, True),
    ):
        cases[f"{name}, threads={torch.get_num_threads()}"] = Case(lengths, causal).measure()
    write(RESULT, cases)


if __name__ == "__main__":
    main()
