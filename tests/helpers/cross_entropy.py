"""What the tests of masked cross-entropy share: labels, torch's own loss, the comparison with float64."""

import torch
import torch.nn.functional as F

from fastenc.ops import masked_cross_entropy
from fastenc.reference import masked_cross_entropy as reference
from fastenc.testing import assert_within_budget


def labels_for(rows, vocabulary, share=0.3):
    labels = torch.randint(vocabulary, (rows,))
    return torch.where(torch.rand(rows) < share, labels, -100)


def plain_loss(logits, labels, label_smoothing, z_loss, reduction):
    """torch's own cross-entropy in the dtype given, with the z-loss added by its definition."""
    keep = labels != -100
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * torch.where(keep, torch.logsumexp(logits, 1).square(), 0)
    if reduction == "none":
        return losses
    return losses.sum() / (keep.sum() if reduction == "mean" else 1)


def check_loss_and_gradient(logits, labels, impl, **options):
    """Both within the budget; the logits are unchanged."""
    logits = logits.detach().requires_grad_()
    before = logits.detach().clone()
    loss = masked_cross_entropy(logits, labels, impl=impl, **options)
    plain = plain_loss(logits, labels, **options)
    wide = logits.detach().double().requires_grad_()
    truth = reference.masked_cross_entropy(wide, labels, **options)
    torch.testing.assert_close(truth, plain_loss(wide, labels, **options), rtol=1e-12, atol=1e-12)
    # The loss is float32 for any dtype of the logits, so it has float32's budget.
    assert loss.dtype == torch.float32
    plain32 = plain_loss(logits.float(), labels, **options)
    assert_within_budget(loss, plain32, truth, "loss")
    upstream = torch.randn_like(loss)
    (ours,) = torch.autograd.grad(loss, logits, upstream)
    (theirs,) = torch.autograd.grad(plain, logits, upstream.to(plain.dtype))
    (exact,) = torch.autograd.grad(truth, wide, upstream.double())
    assert_within_budget(ours, theirs, exact, "dlogits")
    assert torch.equal(logits.detach(), before), "the caller's logits were changed"


def check_ignored_rows_are_never_read(labels):
    """A NaN in an ignored row reaches neither the loss nor a gradient."""
    logits, ignored = torch.randn(len(labels), 100), labels == -100
    expected = F.cross_entropy(logits, labels)
    logits[ignored] = float("nan")
    logits.requires_grad_()
    loss = masked_cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert torch.equal(logits.grad[ignored], torch.zeros(int(ignored.sum()), 100))
    assert logits.grad.isfinite().all()
