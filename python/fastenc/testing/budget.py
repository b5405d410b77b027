"""The numerics policy as functions: how far a result may be from the truth."""

import torch
from torch import Tensor

# The largest of some ten thousand normal errors is about this many times their root mean square.
LARGEST_OF_MANY = 4.0


def error_budget(
    plain: Tensor, truth: Tensor, rounded: float = 0.0, scale: float = 0.0
) -> tuple[float, float]:
    """Largest allowed (max, mean) error: 2 × (the plain path's own error + half a rounding step).

    Args:
        plain: the plain PyTorch path's result in the dtype under test.
        truth: the float64 reference computed from the same inputs.
        rounded: relative error of a number that the algorithm has to store and the plain path does not, such as a
            log-sum-exp: added to the plain path's own, times the values as for a rounding step.
        scale: size of the terms of a sum that is zero by symmetry, such as the gradient of a key's bias, which cannot
            change a softmax. The rounding step is at least that of a number of this size.
    The rounding step is the spacing of the dtype's numbers at each value (at its largest value for the
    maximum, on average for the mean). The largest error of a few numbers is luck, so the plain path's counts as at
    least what many errors of their root mean square would have for a largest one.
    """
    plain, truth = plain.detach(), truth.detach()
    step = truth.abs().clamp(min=scale) * torch.finfo(plain.dtype).eps
    error = (plain.double() - truth).abs()
    if not truth.numel():
        return 0.0, 0.0
    largest = max(float(error.max()), LARGEST_OF_MANY * float(error.square().mean().sqrt()))
    own = step / 2 + rounded * truth.abs()
    return 2 * (largest + float(own.max())), 2 * float(error.mean() + own.mean())


def errors(result: Tensor, truth: Tensor) -> tuple[float, float]:
    """(max, mean) of |result - truth|."""
    if not truth.numel():
        return 0.0, 0.0
    error = (result.detach().double() - truth.detach()).abs()
    return float(error.max()), float(error.mean())


def assert_within_budget(
    result: Tensor,
    plain: Tensor,
    truth: Tensor,
    what: str = "result",
    rounded: float = 0.0,
    scale: float = 0.0,
) -> None:
    """Raise AssertionError unless ``result`` keeps the budget; shapes and dtypes must agree too."""
    if result.shape != truth.shape or result.dtype != plain.dtype:
        raise AssertionError(
            f"{what}: {result.dtype} {tuple(result.shape)}, expected {plain.dtype} {tuple(truth.shape)}"
        )
    max_allowed, mean_allowed = error_budget(plain, truth, rounded, scale)
    max_error, mean_error = errors(result, truth)
    # Written so that NaN fails.
    if not (max_error <= max_allowed and mean_error <= mean_allowed):
        raise AssertionError(
            f"{what}: error max {max_error:.3g} (allowed {max_allowed:.3g}), "
            f"mean {mean_error:.3g} (allowed {mean_allowed:.3g})"
        )
