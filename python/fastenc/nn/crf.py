"""A CRF layer with the interface of pytorch-crf."""

import torch
from torch import Tensor, nn

from fastenc.ops import crf_decode, crf_log_likelihood

REDUCTIONS = ("none", "sum", "mean", "token_mean")


class CRF(nn.Module):
    """Linear-chain conditional random field, with the interface and the state-dict keys of ``torchcrf.CRF``.

    Args:
        num_tags: number of tags, at least 1.
        batch_first: emissions are (batch, length, num_tags) instead of (length, batch, num_tags).
    Parameters: start_transitions and end_transitions (num_tags,); transitions (num_tags, num_tags), from row's tag to
        column's tag. They are initialised uniformly in [-0.1, 0.1].
    Source: see :func:`fastenc.ops.crf_log_likelihood`.
    """

    def __init__(self, num_tags: int, batch_first: bool = False) -> None:
        if num_tags < 1:
            raise ValueError(f"num_tags must be at least 1, got {num_tags}")
        super().__init__()
        self.num_tags, self.batch_first = num_tags, batch_first
        self.start_transitions = nn.Parameter(torch.empty(num_tags))
        self.end_transitions = nn.Parameter(torch.empty(num_tags))
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def extra_repr(self) -> str:
        return f"num_tags={self.num_tags}, batch_first={self.batch_first}"

    def forward(
        self, emissions: Tensor, tags: Tensor, mask: Tensor | None = None, reduction: str = "sum"
    ) -> Tensor:
        """Log-likelihood of the tags; the loss is its negative.

        Args:
            emissions: floating point (batch, length, num_tags) or (length, batch, num_tags), see ``batch_first``.
            tags: integers of the first two dimensions of emissions; padding may have any value.
            mask: of the same shape, true or 1 at real tokens, or None. Padding may be anywhere; it is left out.
            reduction: "none" (a value for each sequence), "sum", "mean" over sequences, or "token_mean" over real
                tokens.
        Returns: float32, a scalar or (batch,).
        Raises: ValueError stating rule, received value, remedy.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
        rows = self._rows(emissions, mask)
        if tags.shape != emissions.shape[:2]:
            raise ValueError(
                f"tags must have the first two dimensions of emissions, {tuple(emissions.shape[:2])}, "
                f"got {tuple(tags.shape)}"
            )
        tags = rows.pick(tags if self.batch_first else tags.t()).long()
        arguments = (rows.emissions, tags, rows.cu_seqlens, *self.scores())
        likelihood = crf_log_likelihood(*arguments, seqused=rows.seqused)
        if reduction == "none":
            return likelihood
        if reduction == "mean":
            return likelihood.mean()
        total = likelihood.sum()
        return total if reduction == "sum" else total / rows.lengths.sum()

    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """The tags of each sequence's best path, for its real tokens; arguments as in :meth:`forward`."""
        rows = self._rows(emissions, mask)
        path, _ = crf_decode(rows.emissions, rows.cu_seqlens, *self.scores(), seqused=rows.seqused)
        tags, starts = path.tolist(), rows.cu_seqlens.tolist()
        return [
            tags[start : start + length]
            for start, length in zip(starts[:-1], rows.lengths.tolist(), strict=True)
        ]

    def scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """(start, end, transitions), as the ops take them."""
        return self.start_transitions, self.end_transitions, self.transitions

    def _rows(self, emissions: Tensor, mask: Tensor | None) -> "_Rows":
        if emissions.dim() != 3 or emissions.shape[2] != self.num_tags:
            raise ValueError(
                f"emissions must have three dimensions, the last of size {self.num_tags}, "
                f"got shape {tuple(emissions.shape)}"
            )
        if mask is not None and mask.shape != emissions.shape[:2]:
            raise ValueError(
                f"mask must have the first two dimensions of emissions, {tuple(emissions.shape[:2])}, "
                f"got {tuple(mask.shape)}"
            )
        if not self.batch_first:
            emissions = emissions.transpose(0, 1)
            mask = None if mask is None else mask.t()
        return _Rows(emissions, mask)


class _Rows:
    """The sequences of a padded batch in the layout that the ops take.

    With right padding the rows stay as they are, and ``seqused`` says how many tokens are real. With other padding the
    real tokens are packed. On a GPU, where packing would wait for the device, each row's real tokens are moved to its
    front instead.
    """

    def __init__(self, emissions: Tensor, mask: Tensor | None):
        batch, length, num_tags = emissions.shape
        device = emissions.device
        self.seqused, self._real, self._order = None, None, None
        offsets = torch.arange(0, batch * length + 1, length or 1, dtype=torch.int32, device=device)
        self.cu_seqlens = offsets if length else offsets.new_zeros(batch + 1)
        self.emissions = emissions.reshape(batch * length, num_tags)
        if mask is None:
            self.lengths = self.cu_seqlens.diff()
            return
        real = mask if mask.dtype == torch.bool else mask != 0
        self.lengths = real.sum(1, dtype=torch.int32)
        if device.type != "cpu":
            self.seqused = self.lengths
            self._order = (~real).byte().argsort(dim=1, stable=True)
            order = self._order[:, :, None].expand_as(emissions)
            self.emissions = emissions.gather(1, order).reshape(batch * length, num_tags)
            return
        indices = torch.arange(length, dtype=torch.int32)
        if torch.equal(indices < self.lengths[:, None], real):
            self.seqused = self.lengths
            return
        self._real, self.emissions = real, emissions[real]
        self.cu_seqlens = nn.functional.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))

    def pick(self, values: Tensor) -> Tensor:
        """values (batch, length) in the same layout as the emissions."""
        if self._order is not None:
            values = values.gather(1, self._order)
        return values.reshape(-1) if self._real is None else values[self._real]
