"""The numerics budget: the largest allowed error of a result."""

import torch
from torch import Tensor

# The largest of about ten thousand normal errors is this many times their root mean square.
LARGEST_OF_MANY = 4.0


def error_budget(
    plain: Tensor, truth: Tensor, rounded: float = 0.0, scale: float = 0.0
) -> tuple[float, float]:
    """Largest allowed (max, mean) error: 2 × (the plain path's own error + half a rounding step).

    Args:
        plain: the plain PyTorch path's result in the dtype under test.
        truth: the float64 reference computed from the same inputs.
        rounded: relative error of a number that the algorithm has to store and the plain path has not, such as a
            log-sum-exp. It is multiplied by the values and added to half a rounding step.
        scale: size of the terms of a sum that is zero by symmetry, such as the gradient of a key's bias, which cannot
            change a softmax. The rounding step is at least that of a number of this size.
    The rounding step is the spacing of the dtype's numbers at each value (the largest one for the maximum, their mean
    for the mean). The largest error of a few numbers is luck. So the plain path's largest error counts as at least
    four times its root mean square.
    """
    plain, truth = plain.detach(), truth.detach()
    step = truth.abs().clamp(min=scale) * torch.finfo(plain.dtype).eps
    error = (plain.double() - truth).abs()
    if not truth.numel():
        return 0.0, 0.0
    largest = max(float(error.max()), LARGEST_OF_MANY * float(error.square().mean().sqrt()))
    rounding = step / 2 + rounded * truth.abs()
    return 2 * (largest + float(rounding.max())), 2 * float(error.mean() + rounding.mean())


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
    """Raise AssertionError unless ``result`` is within the budget and has the expected shape and dtype."""
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
