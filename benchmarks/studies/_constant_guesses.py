"""The loss of each term of an objective for the best guess that does not read the text."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.models import Seq2Seq
from fastenc.models.heads.masked_lm import MaskedLM
from fastenc.objectives import DistilledLM, Electra
from fastenc.objectives.distill import TEMPERATURE
from fastenc.objectives.electra import sample_tokens
from fastenc.objectives.mlm import special_mask
from fastenc.ops.labelled import IGNORED


@torch.inference_mode()
def constant_guesses(
    model: Any, teacher: MaskedLM | None, examples: Iterable[dict[str, Any]], counts: Tensor
) -> dict[str, float]:
    """{term: loss of the guess}, over the collator's examples.

        mlm, sbo: mean of -log((count + 1) / (sum of counts + number of tokens that occur)) of the tokens to predict
        target: the same, where which special token comes is known, but not when: their share has its entropy
        pair: entropy of the share of wrong pairs
        rtd: entropy of the share of tokens that the present generator replaces, among those that are ever masked; the
            guess knows the others, which count in the mean
        kl: T^2 times the mean divergence of the teacher's distributions from their mean
        cosine: 1 - the length of the mean of the teacher's hidden states, each scaled to length 1

    Args: counts: (vocabulary,), how often each token occurs in training; 0 for a token that is never masked.
    """
    kinds = counts.count_nonzero()
    surprise = ((counts.sum() + kinds) / (counts + 1.0)).log()
    special = None
    if isinstance(model, Seq2Seq):
        special = special_mask(model.own_tokenizer())
        surprise[special] = 0
    tokens, of_special, spans, wrong, maskable, replaced, goals, states = ([] for _ in range(8))
    for example in examples:
        labels = example["labels"]
        tokens.append(surprise[labels[labels != IGNORED]])
        if special is not None:
            of_special.append(special[labels[labels != IGNORED]])
        if "spans" in example:
            spans.append(surprise[labels[example["spans"][:, 0]]])
        if "pair_labels" in example:
            wrong.append(example["pair_labels"])
        if isinstance(model, Electra):
            original = torch.where(labels == IGNORED, example["batch"].input_ids, labels)
            maskable.append(counts[original] > 0)
            replaced.append(replaced_tokens(model.generator, example))
        if isinstance(model, DistilledLM) and teacher is not None:
            encoded, table = teacher.encode(example["batch"])
            hidden = encoded.last_hidden_state
            logits = teacher.logits(hidden[labels != IGNORED], table)
            goals.append((logits / TEMPERATURE).softmax(1))
            states.append(F.normalize(hidden, dim=1))
    guesses = {"mlm": torch.cat(tokens).mean().item()}
    if isinstance(model, Seq2Seq):
        return {"target": guesses["mlm"] + entropy(torch.cat(of_special))}
    if spans:
        guesses["sbo"] = torch.cat(spans).mean().item()
    if wrong:
        guesses["pair"] = entropy(torch.cat(wrong))
    if replaced:
        known = torch.cat(maskable)
        guesses["rtd"] = entropy(torch.cat(replaced)[known]) * known.double().mean().item()
    if goals:
        distributions = torch.cat(goals)
        uncertainty = lambda p: -torch.special.xlogy(p, p).sum(-1).mean().item()
        mean = distributions.mean(0)
        guesses["kl"] = TEMPERATURE**2 * (uncertainty(mean) - uncertainty(distributions))
        guesses["cosine"] = 1 - torch.cat(states).mean(0).norm().item()
    return guesses


def replaced_tokens(generator: MaskedLM, example: dict[str, Any]) -> Tensor:
    """bool (total_tokens,): whether the token that the generator samples differs from the text's."""
    labels, samples = example["labels"], example["uniform_samples"]
    encoded, table = generator.encode(example["batch"])
    rows = generator.labelled(encoded.last_hidden_state, labels, len(samples))
    sampled = sample_tokens(rows.hidden, table, generator.head.bias, samples)
    selected = labels != IGNORED
    return torch.zeros_like(selected).masked_scatter(selected, sampled != labels[selected])


def entropy(chosen: Tensor) -> float:
    """Entropy of the share of true values, in nats."""
    share = chosen.double().mean().item()
    return -sum(p * math.log(p) for p in (share, 1 - share) if p)
