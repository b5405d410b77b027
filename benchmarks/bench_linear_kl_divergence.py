"""Distillation's loss over the vocabulary, including both models' last products: loss and the student's gradients."""

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks._compare import compare, compiled
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from fastenc.ops import linear_kl_divergence
from fastenc.profiling import Work
from fastenc.reference.linear_kl_divergence import linear_kl_divergence as exact

TABLES = {
    "linear_kl_divergence": "Distillation over the vocabulary: both models' products and the loss, with gradients"
}
SMALLEST = (9, 8, 12, 30, torch.float32)  # the shape that the tests measure
TEMPERATURE = 2.0
# student: rows (the labelled 15 % of a batch), its width, the teacher's width, vocabulary
SHAPES = (
    {"DistilBERT": (2458, 768, 768, 30522), "MiniLM": (2458, 384, 768, 30522)}
    if ON_GPU
    else {"MiniLM": (307, 384, 768, 30522)}
)
DTYPES = (torch.bfloat16,) if ON_GPU else (torch.float32, torch.bfloat16)


def work(rows: int, width: int, teacher_width: int, vocabulary: int, dtype: torch.dtype) -> Work:
    """Four products: both models' logits, and the gradients of the student's rows and weights. Both models' rows and
    weights are read once for the logits, the student's again for the gradients; the gradients are written."""
    moved = (vocabulary + rows) * (3 * width + teacher_width)
    flops = 2 * rows * vocabulary * (3 * width + teacher_width)
    return Work(moved * dtype.itemsize, flops, dtype)


def eager(hidden, weight, bias, *teacher):
    own = F.linear(hidden, weight, bias).float() / TEMPERATURE
    theirs = F.linear(*teacher).float() / TEMPERATURE
    own, theirs = own.log_softmax(1), theirs.log_softmax(1)
    return TEMPERATURE**2 * F.kl_div(own, theirs, reduction="batchmean", log_target=True)


def model(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Hidden rows, weight and bias that give logits of order 1."""
    new = lambda *shape: torch.randn(*shape, device=DEVICE)
    weight = new(vocabulary, width) / width**0.5
    return tuple(x.to(dtype) for x in (new(rows, width), weight, new(vocabulary)))


def measure(
    name: str, rows: int, width: int, teacher_width: int, vocabulary: int, dtype: torch.dtype
) -> dict[str, dict]:
    torch.manual_seed(0)
    student = tuple(x.requires_grad_() for x in model(rows, width, vocabulary, dtype))
    teacher = model(rows, teacher_width, vocabulary, dtype)
    wide = tuple(x.detach().double().requires_grad_() for x in student)
    true_loss = exact(*wide, *(x.double() for x in teacher), temperature=TEMPERATURE)
    truth = torch.autograd.grad(true_loss, wide)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2

    def run(loss_of):
        loss = loss_of(*student, *teacher)
        return loss.detach(), *torch.autograd.grad(loss, student)

    def check(_, result):
        pairs = zip(result, (true_loss, *truth), strict=True)
        errors = [((value.double() - true).norm() / true.norm()).item() for value, true in pairs]
        right = max(errors) < tolerance
        return None if right else "relative errors " + ", ".join(f"{e:.2g}" for e in errors)

    losses = {"fastenc": partial(linear_kl_divergence, temperature=TEMPERATURE), "eager": eager}
    if ON_GPU:
        losses["torch.compile"] = compiled(eager)
    results = compare(
        {key: partial(run, loss_of) for key, loss_of in losses.items()},
        baseline="eager",
        check=check,
        work=work(rows, width, teacher_width, vocabulary, dtype),
    )
    return {name: results}


def main() -> None:
    groups = {}
    for student, (rows, width, teacher_width, vocabulary) in SHAPES.items():
        for dtype in DTYPES:
            name = f"{student} {rows:,} x {width} x {vocabulary:,} {dtype_name(dtype)}"
            groups[name] = partial(measure, name, rows, width, teacher_width, vocabulary, dtype)
    run_groups("linear_kl_divergence", groups)


if __name__ == "__main__":
    main()
