"""A CRF layer with the interface of pytorch-crf."""

import torch
from torch import Tensor, nn

from fastenc.ops import crf_decode, crf_log_likelihood

REDUCTIONS = ("none", "sum", "mean", "token_mean")


class CRF(nn.Module):
    """Linear-chain conditional random field; takes the place of ``torchcrf.CRF``, state-dict keys included.

    Args:
        num_tags: number of tags, at least 1.
        batch_first: emissions are (batch, length, num_tags) rather than (length, batch, num_tags).
    Parameters: start_transitions, end_transitions (num_tags,), transitions (num_tags, num_tags) from row to column;
        first values uniform in [-0.1, 0.1].
    Source: :func:`fastenc.ops.crf_log_likelihood`.
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
        """Log-likelihood of tags; a loss is its negative.

        Args:
            tags: integer (batch, length) or (length, batch), as emissions; anything where masked.
            mask: true or 1 at real tokens, or None. Masked tokens may stand anywhere: they are left out.
            reduction: "none" a value for each sequence, "sum", "mean" over sequences, "token_mean" over real tokens.
        Raises: ValueError stating rule, received value, remedy.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
        packed, cu_seqlens, real = self._pack(emissions, mask)
        if tags.shape != emissions.shape[:2]:
            raise ValueError(
                f"tags must have the first two sizes of emissions, {tuple(emissions.shape[:2])}, "
                f"got {tuple(tags.shape)}"
            )
        tags = (tags if self.batch_first else tags.t())[real].long()
        likelihood = crf_log_likelihood(packed, tags, cu_seqlens, *self.scores())
        if reduction == "none":
            return likelihood
        if reduction == "mean":
            return likelihood.mean()
        total = likelihood.sum()
        return total if reduction == "sum" else total / packed.shape[0]

    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """The best tags of each sequence's real tokens."""
        packed, cu_seqlens, _ = self._pack(emissions, mask)
        path, _ = crf_decode(packed, cu_seqlens, *self.scores())
        return [part.tolist() for part in path.cpu().split(cu_seqlens.diff().tolist())]

    def scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """(start, end, transitions), as the ops take them."""
        return self.start_transitions, self.end_transitions, self.transitions

    def _pack(self, emissions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(packed emissions, cu_seqlens, which places are real (batch, length))."""
        if emissions.dim() != 3 or emissions.shape[2] != self.num_tags:
            raise ValueError(
                f"emissions must have three dimensions, the last of size {self.num_tags}, "
                f"got shape {tuple(emissions.shape)}"
            )
        if mask is not None and mask.shape != emissions.shape[:2]:
            raise ValueError(
                f"mask must have the first two sizes of emissions, {tuple(emissions.shape[:2])}, "
                f"got {tuple(mask.shape)}"
            )
        if not self.batch_first:
            emissions = emissions.transpose(0, 1)
            mask = None if mask is None else mask.t()
        real = (
            torch.ones(emissions.shape[:2], dtype=torch.bool, device=emissions.device)
            if mask is None
            else mask != 0
        )
        cu_seqlens = nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()
        return emissions[real], cu_seqlens, real
