"""Patched classifiers that read the first token alone: after its attention, the last layer computes no other token."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastenc
from tests.helpers.checkpoints import close
from tests.helpers.extension import needs_cpp
from tests.helpers.families import FAMILIES, model, padded_batch

pytestmark = needs_cpp
# Their heads read the mean of the states, or the last token.
OTHER_TOKENS = ("eurobert", "qwen3", "gemma3")
CLASSIFIER = "ForSequenceClassification"


def flops(patched, batch, **options) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        patched(**batch, **options)
    return counter.get_total_flops()


def computes_first_tokens_only(patched, batch, **options) -> bool:
    """Whether a call has fewer FLOPs than one with a hook of the encoder, which may read every token's state."""
    handle = patched.base_model.register_forward_hook(lambda *arguments: None)
    every = flops(patched, batch, **options)
    handle.remove()
    return flops(patched, batch, **options) < every


@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_family_whose_head_reads_it(family):
    patched, batch = fastenc.patch(model(family, CLASSIFIER)), padded_batch(family)
    assert computes_first_tokens_only(patched, batch) != family.startswith(OTHER_TOKENS)


def test_without_a_mask_and_as_a_tuple():
    theirs = model("bert", CLASSIFIER)
    batch = dict(input_ids=padded_batch("bert", (7, 7))["input_ids"], return_dict=False)
    patched = fastenc.patch(copy.deepcopy(theirs))
    with torch.no_grad():
        close(patched(**batch)[0], theirs(**batch)[0])
    assert computes_first_tokens_only(patched, batch)


class MeanHead(nn.Module):
    def forward(self, states):
        return states.mean(1)[:, :2]


class MeanOfStates(nn.Module):
    """A class of a user around transformers' model, which reads the states that its forward requests."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch, output_hidden_states=True).hidden_states[-1].mean(1)


def with_own_head(classifier):
    classifier.classifier = MeanHead()
    return classifier, lambda each, batch: each(**batch).logits


class MeanPooler(nn.Module):
    def forward(self, states):
        return states.mean(1)


def with_own_pooler(classifier):
    classifier.bert.pooler = MeanPooler()
    return classifier, lambda each, batch: each(**batch).logits


def with_hook_of_pooler(classifier):
    seen = []
    classifier.bert.pooler.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    return classifier, lambda each, batch: (each(**batch), seen.pop())[1].mean(1)


def with_own_forward(classifier):
    class Own(type(classifier)):
        def forward(self, **batch):
            return self.roberta(**batch).last_hidden_state.mean(1)

    Own.__name__ = type(classifier).__name__
    classifier.__class__ = Own
    return classifier, lambda each, batch: each(**batch)


def with_other_pooling(classifier):
    classifier.config.classifier_pooling = "mean"
    return classifier, lambda each, batch: each(**batch).logits


def with_states(classifier):
    return MeanOfStates(classifier), lambda each, batch: each(**batch)


def with_hook(classifier):
    seen = []
    classifier.roberta.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    return classifier, lambda each, batch: (each(**batch), seen.pop())[1].mean(1)


def with_hook_of_head(classifier):
    seen = []
    classifier.classifier.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0]) if inputs else None
    )
    return classifier, lambda each, batch: (each(**batch), seen.pop())[1].mean(1)


def alone(classifier):
    return classifier, lambda each, batch: each.roberta(**batch).last_hidden_state.mean(1)


@pytest.mark.parametrize(
    "change, family",
    [
        (with_own_head, "roberta"),
        (with_own_pooler, "bert"),
        (with_hook_of_pooler, "bert"),
        (with_own_forward, "roberta"),
        (with_other_pooling, "modernbert"),
        (with_states, "roberta"),
        (with_hook, "roberta"),
        (with_hook_of_head, "roberta"),
        (alone, "roberta"),
    ],
)
@pytest.mark.parametrize("before", [True, False], ids=["before the patch", "after it"])
def test_who_reads_other_tokens_gets_their_states(change, family, before):
    batch = padded_batch(family, (9, 9))
    theirs, read = change(model(family, CLASSIFIER))
    with torch.no_grad():
        wanted = read(theirs, batch)
    patched = model(family, CLASSIFIER)
    if not before:
        fastenc.patch(patched)(**batch)
    patched, read = change(patched)
    fastenc.patch(patched)
    with torch.no_grad():
        close(read(patched, batch), wanted)


def test_who_calls_the_patched_forward_of_the_encoder_gets_their_states():
    theirs, batch = model("roberta", CLASSIFIER), padded_batch("roberta", (9, 9))
    patched = fastenc.patch(copy.deepcopy(theirs))
    ours, seen = patched.roberta.forward, []

    def recorded(*arguments, **options):
        seen.append(ours(*arguments, **options))
        return seen[-1]

    patched.roberta.forward = recorded
    with torch.no_grad():
        close(patched(**batch).logits, theirs(**batch).logits)
        close(seen[0].last_hidden_state, theirs.roberta(**batch).last_hidden_state)


def test_a_users_class_of_the_same_name_may_take_more_than_a_configuration():
    from transformers import BertForSequenceClassification as Theirs

    class BertForSequenceClassification(Theirs):
        def __init__(self, config, weight):
            super().__init__(config)
            self.weight = weight

    batch = padded_batch("bert")
    classifier = BertForSequenceClassification(model("bert", CLASSIFIER).config, 0.5).eval()
    with torch.no_grad():
        wanted = classifier(**batch).logits
        close(fastenc.patch(classifier)(**batch).logits, wanted)


def test_gradients_of_the_last_state():
    """Of hidden_states[-1], which explanations of a decision read."""
    theirs, batch = model("bert", CLASSIFIER), padded_batch("bert", (9, 9))
    gradients = []
    for each in (theirs, fastenc.patch(copy.deepcopy(theirs))):
        output = each(**batch, output_hidden_states=True)
        gradients += torch.autograd.grad(output.logits.square().sum(), output.hidden_states[-1])
    assert gradients[0].any()
    close(*gradients)


def test_of_labelled_tokens():
    """A masked LM whose logits of labelled tokens alone are requested."""
    theirs, batch = model("bert", "ForMaskedLM"), padded_batch("bert")
    patched = fastenc.patch(theirs, labelled_logits_only=True)
    labels = torch.full_like(batch["input_ids"], -100)
    none = flops(patched, batch, labels=labels)
    every = flops(patched, batch, labels=labels, output_hidden_states=True)
    labels[:, 0] = 5
    first = flops(patched, batch, labels=labels)
    assert none < first < every


def test_a_reranker_of_sentence_transformers(tmp_path):
    from sentence_transformers import CrossEncoder

    from tests.helpers.hub_models import local_folders

    (folder,) = local_folders(tmp_path, '"cross-encoder/ms-marco-MiniLM-L6-v2"').values()
    reranker = fastenc.patch(CrossEncoder(str(folder)))
    batch = padded_batch("bert")
    assert computes_first_tokens_only(reranker.model, batch)
