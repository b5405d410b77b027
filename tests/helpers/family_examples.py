"""A batch and labels for a model of any family and task, and the comparison of all results with transformers'."""

import copy
from pathlib import Path

import torch

import fastenc
from fastenc.models import Encoder, MaskedLM, QuestionAnswerer, SequenceClassifier, TokenClassifier
from fastenc.models.pretrained import PretrainedModel
from fastenc.packing import pack
from tests.helpers.families import ANSWERERS, config, in_float64, padded_batch

MODEL_CLASSES = {
    "Model": Encoder,
    "ForMaskedLM": MaskedLM,
    "ForSequenceClassification": SequenceClassifier,
    "ForTokenClassification": TokenClassifier,
    "ForQuestionAnswering": QuestionAnswerer,
}
# Families with a class for questions. Longformer's wants three separators in each text, as an example has.
WITH_QUESTIONS = (*ANSWERERS, "longformer")
# The gradient of such a bias is the mean of softmax minus one-hot, terms that cancel. Their mean size is about this.
BIASES_OF_HEADS = ("classifier.bias", "qa_outputs.bias")
TERMS_OF_HEADS = 0.5


class Example:
    """A batch of texts of several lengths, its labels, and a model's outputs and loss in either library.

    For question answering all texts have one length, because transformers' softmax includes padding. With
    ``global_tokens`` some tokens are global.
    """

    def __init__(self, family, task, seed=0, global_tokens=False):
        self.task = task
        lengths = (12, 12, 12) if task == "ForQuestionAnswering" else (5, 17, 1, 30)
        self.padded = padded_batch(family, lengths, seed)
        if family == "longformer" and task == "ForQuestionAnswering":
            for row, ids in enumerate(self.padded["input_ids"]):
                ids[[row + 2, row + 3, -1]] = config(family).sep_token_id
        self.mask = self.padded["attention_mask"].bool()
        draw = torch.Generator().manual_seed(seed + 1)
        if global_tokens:
            chosen = torch.rand(self.mask.shape, generator=draw) < 0.2
            self.padded["global_attention_mask"] = (chosen & self.mask).long()
        self.packed = pack(**self.padded)
        rows, length = self.mask.shape
        self.weight = torch.randn(rows, length, 32, generator=draw)[self.mask]
        self.sequences = torch.randint(2, (rows,), generator=draw)
        self.answers = torch.randint(length, (rows, 2), generator=draw)
        chosen = (torch.rand(rows, length, generator=draw) < 0.5) & self.mask
        high = 97 if task == "ForMaskedLM" else 2
        self.tokens = torch.randint(high, (rows, length), generator=draw).where(chosen, -100)

    def theirs(self, model):
        """(outputs of real tokens or of sequences, loss) of a transformers model."""
        if self.task == "Model":
            hidden = model(**self.padded).last_hidden_state[self.mask]
            return hidden, self.weighted(hidden)
        if self.task == "ForSequenceClassification":
            output = model(**self.padded, labels=self.sequences)
            return output.logits, output.loss
        if self.task == "ForQuestionAnswering":
            starts, ends = self.answers.T.clone()  # transformers' RemBERT changes them
            output = model(**self.padded, start_positions=starts, end_positions=ends)
            return torch.stack([output.start_logits, output.end_logits], -1)[self.mask], output.loss
        output = model(**self.padded, labels=self.tokens)
        return output.logits[self.mask], output.loss

    def weighted(self, hidden):
        """A weighted sum of the real tokens' states, of up to 64 numbers."""
        return (hidden * self.weight.repeat(1, 2)[:, : hidden.shape[1]].to(hidden)).sum()

    def ours(self, model):
        if self.task == "Model":
            hidden = model(self.packed).last_hidden_state
            return hidden, self.weighted(hidden)
        labels = {
            "ForSequenceClassification": self.sequences,
            "ForQuestionAnswering": self.answers,
        }.get(self.task, self.tokens[self.mask])
        output = model(self.packed, labels)
        logits = model(self.packed).logits if output.logits is None else output.logits
        return logits, output.loss


def gradients(model):
    """The gradients of a model of either library, by transformers' names; a tied weight has several names."""
    if not isinstance(model, PretrainedModel):
        named = model.named_parameters(remove_duplicate=False)
        return {name: p.grad for name, p in named if p.grad is not None}
    own, grads = dict(model.named_parameters()), {}
    for name, several in model.family_names(with_prefix=not isinstance(model, Encoder)).items():
        if name in own and own[name].grad is not None:  # a buffer has none
            grads |= zip(several, model.parts(name, own[name].grad, len(several)), strict=True)
    return grads


def several_names(model):
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def in_dtype(model, dtype):
    """Like from_pretrained; Module.to would round the frequencies of rotary angles too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("embed_positions.weights"):  # M2M100's
            buffer.data = buffer.data.to(dtype)
    return model


def within(ours, plain, exact, scale, what, dtype):
    """The error, as a norm, is at most twice transformers' own plus half a rounding step of ``dtype``, the models'.

    In float32 it is four times, because there the models differ only in the order of a sum's terms. ``scale``: the size
    of a sum's terms.
    """
    error = lambda x: float((x.double() - exact).norm())
    step = torch.finfo(dtype).eps / 2 * max(float(exact.norm()), scale)
    factor = 4 if dtype == torch.float32 else 2
    assert error(ours) <= factor * (error(plain) + step), what


def assert_same_results(theirs, example, dtype=torch.float32, folder: Path | None = None) -> None:
    """Outputs, loss and every gradient of the patched model, and of the one loaded from ``folder`` if that is given."""
    models = {"patched": (fastenc.patch(copy.deepcopy(theirs)), example.theirs)}
    if folder is not None:
        loaded = MODEL_CLASSES[example.task].from_pretrained(folder, dtype=dtype)
        models["loaded"] = (loaded, example.ours)
    exact = in_float64(theirs)
    plain, wanted = example.theirs(theirs), example.theirs(exact)
    for loss in (plain[1], wanted[1]):
        loss.backward()
    plain_gradients, exact_gradients = gradients(theirs), gradients(exact)
    # For the bare encoder, the loss is a sum over all outputs.
    terms = float(wanted[0].detach().abs().sum()) if example.task == "Model" else 0.0
    # Some gradients are sums that cancel. For example, a key's bias cannot change a softmax. That of a bias or norm is
    # a sum over all tokens. With two labels its error is mostly that of one number, the mean of softmax minus one-hot,
    # which in one draw of weights is small in one library and not in the other. Over 60 draws of ERNIE in bfloat16,
    # the root mean square of our errors is 0.2 to 1.1 times that of transformers', for every gradient.
    largest = max(float(gradient.norm()) for gradient in exact_gradients.values())
    sums = 0.1 * largest
    floor = sums if dtype == torch.float32 else 1e-3 * largest
    for which, (ours, compute) in models.items():
        outputs, loss = compute(ours)
        three = (x.detach() for x in (outputs, plain[0], wanted[0]))
        within(*three, 0.0, f"{which}: outputs", dtype)
        three = (x.detach() for x in (loss, plain[1], wanted[1]))
        within(*three, terms, f"{which}: loss", dtype)
        loss.backward()
        grads = gradients(ours)
        for name, gradient in grads.items():
            three = (gradient, plain_gradients[name], exact_gradients[name])
            size = sums if gradient.dim() == 1 else floor
            size = max(floor, TERMS_OF_HEADS) if name.endswith(BIASES_OF_HEADS) else size
            within(*three, size, f"{which}: {name}", dtype)
        for parameter, names in several_names(exact).items():
            read = parameter.grad is not None and parameter.grad.any()
            assert not read or any(name in grads for name in names), names
