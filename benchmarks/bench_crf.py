"""CRF against pytorch-crf: loss with gradients, and decoding; batch 32, lengths 1 to 128, ragged.

The module takes pytorch-crf's padded batch and returns what it returns. The rows "packed" are the public functions on
packed tokens, as in a training loop over packed batches.
"""

from functools import partial

import torch

from benchmarks._compare import NOT_INSTALLED, compare, peer
from benchmarks._device import DEVICE
from benchmarks._results import run_groups
from fastenc.nn import CRF
from fastenc.ops import crf_decode, crf_log_likelihood
from fastenc.profiling import Work
from fastenc.reference import crf as reference

TABLES = {"crf": "Linear-chain CRF, batch 32, lengths to 128"}
NOTE = (
    "fastenc is `fastenc.nn.CRF` in place of pytorch-crf. packed are the functions of `fastenc.ops` on packed tokens, "
    "as in fastenc's own training."
)
SMALLEST = (3,)  # the shape that the tests measure
BATCH, LENGTH = 32, 128
PACKED = "fastenc, packed"


def work(tokens: int, num_tags: int) -> tuple[Work, Work]:
    """The least work of the loss with its gradients, and of decoding.

    Loss: for each token one product of a row and the transitions in the forward recursion, one in the backward
    recursion and one for the transitions' gradient. Emissions and tags are read, the emissions' gradient is written.
    Best path: emissions are read, the path is written; maxima and no products.
    """
    emissions, labels = 4 * tokens * num_tags, 8 * tokens
    products = 3 * 2 * tokens * num_tags**2
    return Work(2 * emissions + labels, products), Work(emissions + labels)


def measure(num_tags: int) -> dict[str, dict]:
    torch.manual_seed(0)
    ours = CRF(num_tags, batch_first=True).to(DEVICE)
    theirs = peer("torchcrf", lambda module: module.CRF(num_tags, batch_first=True).to(DEVICE))
    if theirs != NOT_INSTALLED:
        theirs.load_state_dict(ours.state_dict())
    emissions = torch.randn(BATCH, LENGTH, num_tags, device=DEVICE, requires_grad=True)
    tags = torch.randint(num_tags, (BATCH, LENGTH), device=DEVICE)
    lengths = torch.randint(1, LENGTH + 1, (BATCH,), device=DEVICE)
    lengths[0] = LENGTH
    work_of_loss, work_of_path = work(int(lengths.sum()), num_tags)
    mask = torch.arange(LENGTH, device=DEVICE)[None] < lengths[:, None]

    def loss_and_gradients(module):
        loss = -module(emissions, tags, mask)
        return loss, torch.autograd.grad(loss, [emissions, *module.parameters()])

    wide = [v.detach().double().requires_grad_() for v in (emissions, *ours.parameters())]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    log_likelihood = reference.log_likelihood(wide[0][mask], tags[mask], cu_seqlens, *wide[1:])
    truth_loss = -log_likelihood.sum()
    truth = torch.autograd.grad(truth_loss, wide)

    packed, packed_tags = emissions.detach()[mask].requires_grad_(), tags[mask]

    def loss_of_packed():
        loss = -crf_log_likelihood(packed, packed_tags, cu_seqlens, *ours.scores()).sum()
        return loss, torch.autograd.grad(loss, [packed, *ours.parameters()])

    def worst_gradient(gradients):
        """The largest error of the gradient of the padded, or of the packed, emissions."""
        first, *others = truth
        first = first if gradients[0].dim() == 3 else first[mask]
        pairs = zip(gradients, (first, *others), strict=True)
        return max((g.double() - t).abs().max().item() for g, t in pairs)

    def check(_, result):
        loss, gradients = result
        error = abs(loss.item() / truth_loss.item() - 1)
        worst = worst_gradient(gradients)
        right = error < 1e-5 and worst < 1e-3
        return None if right else f"loss off by {error:.1g}, gradients by {worst:.1g}"

    providers = {"pytorch-crf": theirs, "fastenc": ours}
    calls = {
        name: module if isinstance(module, str) else lambda m=module: loss_and_gradients(m)
        for name, module in providers.items()
    }
    calls[PACKED] = loss_of_packed
    options = {"baseline": "pytorch-crf", "end_to_end": True}
    rows = compare(calls, check=check, work=work_of_loss, **options)
    for name, run in calls.items():
        if "median_ms" in rows[name]:
            rows[name]["gradient_error"] = worst_gradient(run()[1])
    expected = None if theirs == NOT_INSTALLED else theirs.decode(emissions, mask)

    def right_paths(_, paths):
        if isinstance(paths, tuple):  # the packed form: paths and their scores
            paths = [path.tolist() for path in paths[0].split(lengths.tolist())]
        return None if expected in (None, paths) else "other paths"

    decoders = {
        name: module if isinstance(module, str) else lambda m=module: m.decode(emissions, mask)
        for name, module in providers.items()
    }
    decoders[PACKED] = lambda: crf_decode(packed, cu_seqlens, *ours.scores())
    paths = compare(decoders, check=right_paths, work=work_of_path, **options)
    return {f"{num_tags} tags, loss and gradients": rows, f"{num_tags} tags, best path": paths}


def main() -> None:
    run_groups("crf", {f"{count} tags": partial(measure, count) for count in (9, 25)})


if __name__ == "__main__":
    main()
