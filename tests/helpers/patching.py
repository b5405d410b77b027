"""Comparisons of a patched transformers model with the original."""

import torch

CHOICES = 2  # of each example
LABELS_OF_PAIRS = ("next_sentence_label", "sentence_order_label")


def labels_for(task, batch, taken=()):
    """Labels for a task. ``taken``: the names that the model's forward takes."""
    mask = batch["attention_mask"]
    rows, length = mask.shape
    torch.manual_seed(1)
    if task in ("ForSequenceClassification", "ForNextSentencePrediction"):
        return {"labels": torch.randint(2, (rows,))}
    if task == "ForMultipleChoice":
        return {"labels": torch.randint(CHOICES, (rows // CHOICES,))}
    if task == "ForQuestionAnswering":
        return {"start_positions": torch.zeros(rows).long(), "end_positions": mask.sum(1) - 1}
    high = 97 if task == "ForMaskedLM" else 2
    chosen = (torch.rand(rows, length) < 0.4) & mask.bool()
    labels = {name: torch.randint(2, (rows,)) for name in LABELS_OF_PAIRS if name in taken}
    return labels | {"labels": torch.where(chosen, torch.randint(high, (rows, length)), -100)}


def assert_same_outputs(ours, theirs, mask):
    """At every real token and for every sequence within 1e-5. Of values above 5, float32 keeps 2e-6 of the largest."""
    assert type(ours) is type(theirs) and ours.keys() == theirs.keys()
    for name in theirs:
        pairs = (
            zip(ours[name], theirs[name], strict=True)
            if name == "hidden_states"
            else [(ours[name], theirs[name])]
        )
        for a, b in pairs:
            assert a.shape == b.shape and a.dtype == b.dtype, name
            if a.shape[:2] == mask.shape:
                a, b = a[mask.bool()], b[mask.bool()]
            atol = max(1e-5, 2e-6 * float(b.detach().abs().max()))
            torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_gradients(ours, theirs):
    """Within 1e-4, relative, for every parameter.

    The bias of a key projection cannot change a softmax, so its gradient is rounding noise. Errors are therefore
    divided by at least a thousandth of the model's largest gradient.
    """
    pairs = [
        (n, p.grad, q.grad)
        for (n, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True)
    ]
    assert all((a is None) == (b is None) for _, a, b in pairs)
    pairs = [pair for pair in pairs if pair[1] is not None]
    floor = 1e-3 * max(b.norm() for _, _, b in pairs)
    for name, a, b in pairs:
        error = (a - b).norm() / torch.maximum(b.norm(), floor)
        assert error < 1e-4, f"{name}: relative error {error:.2g}"
