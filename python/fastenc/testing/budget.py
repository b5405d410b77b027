"""The error budget: the largest allowed error of a result, relative to that of plain PyTorch."""

import torch
from torch import Tensor

# The largest of about ten thousand normally distributed errors is about this many times their root mean square.
MAX_OVER_RMS = 4.0


def error_budget(
    plain: Tensor, truth: Tensor, rounded: float = 0.0, scale: float = 0.0
) -> tuple[float, float]:
    """Largest allowed (max, mean) error: 2 × (error of plain PyTorch + half a rounding step).

    The rounding step is the spacing of the dtype's numbers at each value. The budget for the max takes the largest
    step, that for the mean takes the mean of the steps. The largest of a few errors depends on chance. So the largest
    error of plain PyTorch counts as at least four times its root mean square.

    Args:
        plain: the result of plain PyTorch in the dtype under test.
        truth: the float64 result from the same inputs.
        rounded: relative error of an intermediate value that the op stores in low precision and plain PyTorch does not,
            such as a log-sum-exp. It is multiplied by |truth| and added to half a rounding step.
        scale: magnitude of the terms of a sum that is zero by symmetry, such as the gradient of a key's bias, which
            cannot change a softmax. The rounding step is at least that of a number of this magnitude.
    Returns: (max, mean).
    """
    plain, truth = plain.detach(), truth.detach()
    step = truth.abs().clamp(min=scale) * torch.finfo(plain.dtype).eps
    error = (plain.double() - truth).abs()
    if not truth.numel():
        return 0.0, 0.0
    largest = max(float(error.max()), MAX_OVER_RMS * float(error.square().mean().sqrt()))
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
    """Raise AssertionError unless ``result`` is within :func:`error_budget` and has truth's shape and plain's dtype.

    Args: what: the name of the result, for the message.
    """
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
