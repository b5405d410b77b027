"""The cases that the ops declare: an op's inputs for a size, and its result in plain PyTorch.

An op describes its inputs once. The numerics report, the fuzzers, the tests of the Triton kernels, the sanitizer and
the benchmarks make them from that description, each at its own sizes and with its own :class:`Draw`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastenc.packing import PackedBatch, pack_sequences

T = TypeVar("T")


class Size(NamedTuple):
    """The lengths of a batch's sequences and the sizes of an encoder; ``max_seqlen``: a bound of the lengths, or 0."""

    lengths: tuple[int, ...]
    width: int
    inner: int  # of the feed-forward layer
    heads: int
    head_dim: int
    vocabulary: int
    max_seqlen: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.max_seqlen, *self.lengths, 0)

    def at_least(self, longest: int) -> "Size":
        """A sequence is so long."""
        return self._replace(lengths=(max(longest, self.lengths[0]), *self.lengths[1:]))


class Draw:
    """Draws an op's inputs with its usual options.

    The fuzzers have a subclass that draws any option, layout and mixture of dtypes from the same description.

    Args:
        generator: on a CPU it draws the same inputs for every device.
        dtype: of the tensors that :meth:`normal`, :meth:`parameter` and :meth:`constant` draw.
        device: of the inputs; None: the generator's.
    """

    def __init__(
        self,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ):
        self.generator, self.dtype, self.device = generator, dtype, device or generator.device
        self._float32: list[Tensor] = []

    def random(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.generator.device)
        return drawn.to(self.device)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """An input that has a gradient."""
        return (self.random(*shape) * scale).to(self.dtype).requires_grad_()

    def parameter(self, *shape: int, scale: float = 1.0) -> Tensor:
        """The same for one that may be float32 beside inputs of lower precision."""
        return self.normal(*shape, scale=scale)

    def constant(self, *shape: int, scale: float = 1.0) -> Tensor:
        """An input without a gradient."""
        return self.normal(*shape, scale=scale).detach()

    def float32(self, *shape: int) -> Tensor:
        """A constant that is float32 whatever the dtype, in :meth:`in_float64` too."""
        return self.keep(self.random(*shape))

    def keep(self, values: Tensor) -> Tensor:
        """Computed values on the device, as :meth:`float32`."""
        self._float32.append(values.to(self.device))
        return self._float32[-1]

    def integers(self, limit: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        source = self.generator
        drawn = torch.randint(limit, shape, generator=source, dtype=dtype, device=source.device)
        return drawn.to(self.device)

    def labels(self, rows: int, vocabulary: int) -> Tensor:
        """Class indices for 15 % of the rows; -100, which losses ignore, for the others."""
        labelled = self.integers(100, rows) < self.choice(15, 0, 50, 100)
        return self.integers(vocabulary, rows).where(labelled, -100)

    def choice(self, usual: T, *others: T) -> T:
        """One of an option's values: the first one here."""
        return usual

    def leading(self, rows: int) -> tuple[int, ...]:
        """The leading dimensions of an input of rows."""
        return (rows,)

    def offsets(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int().to(self.device)

    def batch(self, size: Size) -> PackedBatch:
        return pack_sequences([[0] * length for length in size.lengths]).to(self.device)

    def in_float64(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The same inputs in float64, with gradients of their own."""
        return {name: self._wide(value) for name, value in inputs.items()}

    def _wide(self, value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        if not floating or any(value is kept for kept in self._float32):
            return value
        return value.detach().double().requires_grad_(value.requires_grad)


@dataclass(frozen=True)
class Case:
    """An op's inputs for a size, and its result by the library and by plain PyTorch.

    Fields:
        op: the op's name in ``fastenc.ops``.
        inputs: makes the op's arguments by name. Tensors of ``draw.normal`` and ``draw.parameter`` are differentiated.
        ours: the op, or what a model computes with it. Beside the inputs it is given ``impl``, unless that is "auto".
        plain: called with the inputs of a usual draw; returns one tensor, of the dtype of ``result``. In float64 it is
            the truth, so it must compute in float64 if its inputs are float64. None: an op of integers.
        detail: distinguishes several cases of one op. Random calls and benchmarks take the first.
        result: makes one tensor of what ``ours`` returns, of all that is compared.
        resize: the size that the case is about.
        reference: computes what ``ours`` does in plain PyTorch, where ``ours`` has no argument ``impl``.
    """

    op: str
    inputs: Callable[[Size, Draw], dict[str, Any]]
    ours: Callable[..., Any]
    plain: Callable[..., Tensor] | None
    detail: str = ""
    result: Callable[[Any], Tensor] = lambda result: result
    resize: Callable[[Size], Size] = lambda size: size
    reference: Callable[..., Any] | None = None

    def run(self, inputs: dict[str, Any], impl: str = "auto") -> Tensor:
        if impl == "reference" and self.reference is not None:
            return self.result(self.reference(**inputs))
        return self.result(self.ours(**inputs, **({} if impl == "auto" else {"impl": impl})))


CASES: list[Case] = []


def declare_case(
    op: Callable[..., Any],
    inputs: Callable[[Size, Draw], dict[str, Any]],
    plain: Callable[..., Tensor] | None,
    detail: str = "",
    **more: Any,
) -> None:
    """Declare a case of an op, see :class:`Case`. ``more``: further fields, or another ``ours`` than the op alone."""
    given = {"ours": op, "detail": detail, **more}
    CASES.append(Case(op=op.__name__, inputs=inputs, plain=plain, **given))


def first_cases() -> dict[str, Case]:
    """{op: its first case}."""
    return {case.op: case for case in reversed(CASES)}


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sequences(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    """The rows of each sequence."""
    return x.split(cu_seqlens.diff().tolist())


def packed_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {"x": draw.normal(size.tokens, size.width), "cu_seqlens": draw.offsets(size.lengths)}


def rotary_table(positions: int, dim: int) -> Tensor:
    """float32 (positions, dim): cosines, then sines."""
    frequencies = 10000 ** -(torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def rotated(x: Tensor, table: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rotary position embedding in plain PyTorch, of a table as wide as the heads."""
    lengths = cu_seqlens.diff().tolist()
    cosine, sine = (
        torch.cat([columns[:length] for length in lengths])[:, None].to(x.dtype)
        for columns in table.chunk(2, 1)
    )
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def masked_scores(
    queries: int,
    keys: int,
    like: Tensor,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """(heads or 1, queries, keys) in the dtype of ``like``: what attention adds to the scores of one sequence."""
    positions = torch.arange(keys, device=like.device)
    distance = positions - torch.arange(queries, device=like.device)[:, None] - (keys - queries)
    mask = like.new_zeros(1, queries, keys)
    if key_bias is not None:
        mask = mask + key_bias.to(like.dtype)
    if alibi_slopes is not None:
        mask = mask - alibi_slopes.to(like.dtype)[:, None, None] * distance.abs()
    if relative_bias is not None:
        farthest = relative_bias.shape[1] // 2
        mask = (
            mask + relative_bias.to(like.dtype)[:, distance.clamp(-farthest, farthest) + farthest]
        )
    left, right = (n if n >= 0 else keys + queries for n in window_size)
    return mask.masked_fill((distance < -left) | (distance > right), float("-inf"))
