"""Lookup tables of the corruption, and the expected shares of tokens."""

import math

import torch

from fastenc.objectives.mlm_corruption import alias_table


def tables(vocabulary=50, special=(0, 3)):
    is_special = torch.zeros(vocabulary, dtype=torch.bool)
    is_special[list(special)] = True
    weights = torch.arange(vocabulary, dtype=torch.float64)
    weights[is_special] = 0
    return is_special, *alias_table(weights)


def within(share, expected, count):
    """Within four standard deviations of a binomial share. The seeds are fixed, so the outcome never changes."""
    return abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


def check_shares(original, ids, labels, special_tokens, vocabulary, replacement):
    """BERT's shares of selected, masked, kept and replaced tokens; original ids are special or in [1996, 5000)."""
    selected = labels != -100
    every_special = torch.tensor(sorted(special_tokens.all))
    special = torch.isin(original, every_special)
    assert not (selected & special).any() and torch.equal(labels[selected], original[selected])
    assert torch.equal(ids[~selected], original[~selected])
    candidates, chosen = int((~special).sum()), int(selected.sum())
    assert within(chosen / candidates, 0.15, candidates)
    masked, kept = ids[selected] == special_tokens.mask, ids[selected] == original[selected]
    replaced = ids[selected][~masked & ~kept]
    assert within(masked.float().mean().item(), 0.8, chosen)
    assert within(kept.float().mean().item(), 0.1, chosen)
    assert not torch.isin(replaced, every_special).any()
    common = ((replaced >= 1996) & (replaced < 5000)).float().mean().item()
    if replacement == "unigram":
        assert common == 1.0, "a token that never occurs has no unigram frequency"
    else:
        assert within(common, 3004 / (vocabulary - len(special_tokens.all)), len(replaced))
