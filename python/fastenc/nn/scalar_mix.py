"""A learned weighted sum of an encoder's states."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ScalarMix(nn.Module):
    """The weighted sum of several states, with learned weights that sum to 1 and a learned factor.

        y = γ Σ_j softmax(s)_j h_j,   j = 0 (the embeddings' output) … num_states - 1

    It is initialised as the mean: s = 0, γ = 1.

    Args:
        num_states: number of states; for all states of an encoder the number of layers + 1.
    Raises: ValueError for fewer than one state, and in forward for another number of states.
    Source: Peters et al. 2018, arXiv:1802.05365; Tenney et al. 2019, arXiv:1905.06316.
    """

    def __init__(self, num_states: int):
        super().__init__()
        if num_states < 1:
            raise ValueError(f"num_states must be at least 1, got {num_states}")
        self.scalars = nn.Parameter(torch.empty(num_states))
        self.gamma = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scalars)
        nn.init.ones_(self.gamma)

    @property
    def weights(self) -> Tensor:
        """(num_states,), γ softmax(s): the factor of each state."""
        return self.gamma * self.shares

    @property
    def shares(self) -> Tensor:
        """(num_states,), softmax(s): the factor of each state without γ."""
        return self.scalars.softmax(0)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """Args:
            states: num_states tensors of one shape and dtype.
        Returns: that shape and dtype.
        """
        if len(states) != len(self.scalars):
            raise ValueError(
                f"ScalarMix has weights for {len(self.scalars)} states, got {len(states)}: make it with that number"
            )
        mixed = None
        for weight, state in zip(self.weights, states, strict=True):
            mixed = add_weighted(mixed, weight, state)
        assert mixed is not None
        return mixed

    def describe(self) -> str:
        """The share of each state, "embeddings 0.12, layer 1 0.20, …", and γ."""
        names = ["embeddings", *(f"layer {i}" for i in range(1, len(self.scalars)))]
        shares = self.shares.tolist()
        listed = ", ".join(f"{n} {share:.3f}" for n, share in zip(names, shares, strict=True))
        return f"{listed}; gamma {self.gamma.item():.3f}"

    def extra_repr(self) -> str:
        return f"num_states={len(self.scalars)}"


def add_weighted(total: Tensor | None, weight: Tensor, state: Tensor) -> Tensor:
    """total + weight * state; total None counts as 0."""
    weight = weight.to(state.dtype)
    return weight * state if total is None else torch.addcmul(total, weight, state)
