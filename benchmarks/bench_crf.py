"""CRF against pytorch-crf: loss with gradients, and decoding; batch 32, lengths 1 to 128, ragged."""

import torch

from benchmarks._harness import compare, write
from fastenc.nn import CRF
from fastenc.reference import crf as reference

BATCH, LENGTH = 32, 128


def main() -> None:
    from torchcrf import CRF as PytorchCrf

    cases = {}
    for num_tags in (9, 25):
        torch.manual_seed(0)
        ours, theirs = CRF(num_tags, batch_first=True), PytorchCrf(num_tags, batch_first=True)
        theirs.load_state_dict(ours.state_dict())
        emissions = torch.randn(BATCH, LENGTH, num_tags, requires_grad=True)
        tags = torch.randint(num_tags, (BATCH, LENGTH))
        lengths = torch.randint(1, LENGTH + 1, (BATCH,))
        lengths[0] = LENGTH
        mask = torch.arange(LENGTH)[None] < lengths[:, None]

        def loss_and_gradients(module):
            loss = -module(emissions, tags, mask)
            return loss, torch.autograd.grad(loss, [emissions, *module.parameters()])

        wide = [v.detach().double().requires_grad_() for v in (emissions, *ours.parameters())]
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        truth_loss = -reference.log_likelihood(
            wide[0][mask], tags[mask], cu_seqlens, *wide[1:]
        ).sum()
        truth = torch.autograd.grad(truth_loss, wide)

        def check(_, result):
            loss, gradients = result
            error = abs(loss.item() / truth_loss.item() - 1)
            errors = [
                (g.double() - t).abs().max().item() for g, t in zip(gradients, truth, strict=True)
            ]
            if not (error < 1e-5 and max(errors) < 1e-3):
                return f"loss off by {error:.1g}, gradients by {max(errors):.1g}"
            return None

        providers = {"pytorch-crf": theirs, "fastenc": ours}
        calls = {n: lambda m=m: loss_and_gradients(m) for n, m in providers.items()}
        rows = compare(calls, baseline="pytorch-crf", check=check)
        for name, call in calls.items():
            gradients = call()[1]
            rows[name]["gradient_error"] = max(
                (g.double() - t).abs().max().item() for g, t in zip(gradients, truth, strict=True)
            )
        cases[f"{num_tags} tags, loss and gradients"] = rows
        expected = theirs.decode(emissions, mask)
        cases[f"{num_tags} tags, best path"] = compare(
            {n: lambda m=m: m.decode(emissions, mask) for n, m in providers.items()},
            baseline="pytorch-crf",
            check=lambda _, paths: None if paths == expected else "other paths",
        )
    write("crf", cases)


if __name__ == "__main__":
    main()
