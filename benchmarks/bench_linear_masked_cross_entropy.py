"""The masked-LM head's last product and its loss, 15 % labelled: loss, gradients of both factors, time and memory."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks._compare import compare, compiled, peer
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from benchmarks.gpu_quick import problems
from fastenc.ops import linear_masked_cross_entropy
from fastenc.profiling import Work

TABLES = {
    "linear_masked_cross_entropy": "Masked-LM head: product and loss, 15 % labelled, with gradients"
}
SMALLEST = (90, 8, 30, torch.float32)  # the shape that the tests measure
SHARE = 0.15
# model: tokens, hidden size, vocabulary
SHAPES = (
    {"BERT-base": (16384, 768, 30522), "XLM-R-base": (16384, 768, 250002)}
    if ON_GPU
    else {"MiniLM": (2048, 384, 30522)}
)
DTYPES = (torch.bfloat16,) if ON_GPU else (torch.float32, torch.bfloat16)


def work(labelled: int, tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> Work:
    """Three products over the labelled rows. Weights and hidden rows are read twice, and their gradients are
    written."""
    moved = 3 * (vocabulary + labelled) * hidden + tokens * hidden
    return Work(moved * dtype.itemsize, 6 * labelled * hidden * vocabulary, dtype)


def full(x, weight, bias, labels):
    return F.cross_entropy(F.linear(x, weight, bias).float(), labels)


def gathered(x, weight, bias, labels):
    chosen = labels != -100
    return full(x[chosen], weight, bias, labels[chosen])


def liger(module):
    return lambda x, w, b, labels: module.liger_fused_linear_cross_entropy(x, w, labels, b)


def cut(module):
    return lambda x, w, _, labels: module.linear_cross_entropy(x, w, labels)


def measure(
    name: str, tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype
) -> dict[str, dict]:
    torch.manual_seed(0)
    new = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)
    x = new(tokens, hidden).requires_grad_()
    weight = (0.05 * new(vocabulary, hidden)).requires_grad_()
    # cut-cross-entropy takes no bias. With a bias of zeros whose gradient is not taken, all compute the same.
    bias = torch.zeros(vocabulary, device=DEVICE, dtype=dtype)
    labels = torch.randint(vocabulary, (tokens,))
    labels = torch.where(torch.rand(tokens) < SHARE, labels, -100).to(DEVICE)
    count = int((labels != -100).sum())
    # The collator passes this number; without it, on a GPU every row goes through the product.
    ours = partial(linear_masked_cross_entropy, max_labels=count)
    losses = {
        "full logits": full,
        "gather": gathered,
        "torch.compile of full logits": compiled(full),
        "liger-kernel": peer("liger_kernel.transformers.functional", liger),
        "cut-cross-entropy": peer("cut_cross_entropy", cut),
        "fastenc": ours,
    }
    if not ON_GPU:
        del losses["liger-kernel"], losses["cut-cross-entropy"]
    chosen = labels != -100
    wide = [v.detach().double().requires_grad_() for v in (x[chosen], weight)]
    exact_loss = F.cross_entropy(wide[0] @ wide[1].T, labels[chosen])
    exact = torch.autograd.grad(exact_loss, wide)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2

    def run(loss_of):
        loss = loss_of(x, weight, bias, labels)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    def check(_, result):
        loss, dx, dweight = result
        errors = [abs(loss.item() / exact_loss.item() - 1)]
        for value, true in ((dx[chosen], exact[0]), (dweight, exact[1])):
            errors.append(((value.double() - true).norm() / true.norm()).item())
        right = max(errors) < tolerance
        return None if right else "relative errors " + ", ".join(f"{e:.2g}" for e in errors)

    rows = compare(
        {key: f if isinstance(f, str) else lambda f=f: run(f) for key, f in losses.items()},
        baseline="full logits",
        check=check,
        work=work(count, tokens, hidden, vocabulary, dtype),
    )
    return {name: rows}


def main() -> None:
    groups = {}
    for model, (tokens, hidden, vocabulary) in SHAPES.items():
        for dtype in DTYPES:
            name = f"{model} {tokens:,} x {hidden} x {vocabulary:,} {dtype_name(dtype)}"
            groups[name] = partial(measure, name, tokens, hidden, vocabulary, dtype)
    run_groups("linear_masked_cross_entropy", groups)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    yield "linear_masked_cross_entropy", partial(visited_problem, size)


def visited_problem(size: problems.Size) -> problems.Problem:
    """Every row has a label."""
    rows = size.tokens // 8
    labels = torch.randint(size.vocabulary, (rows,), device=DEVICE)
    logits, flops = rows * size.vocabulary, 2 * rows * size.vocabulary * size.width
    return problems.problem(
        "linear_masked_cross_entropy",
        size.of([rows]),
        problems.work(logits, flops),
        problems.work(logits, 2 * flops),
        labels=labels,
        max_labels=rows,
    )


if __name__ == "__main__":
    main()
