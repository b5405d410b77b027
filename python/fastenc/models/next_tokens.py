"""The most probable tokens that may follow a target in a search."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops.log_softmax_topk import log_softmax_topk


@dataclass(frozen=True)
class TokenRules:
    """Which tokens may follow a target.

    Fields:
        start: the decoder's first token.
        ends: the tokens that end a target.
        forced: position in the target → the token that is taken there.
        min_new_tokens: the least tokens of a target; before them it does not end.
        no_repeat_ngram_size: n: no n tokens in a row occur twice in a target, the start token included; 0: any may.
        left_out: tokens that no target has.
        renormalize: whether the probabilities of the tokens that may follow add up to 1, without those that must not.
    """

    start: int
    ends: tuple[int, ...]
    forced: dict[int, int] = field(default_factory=dict)
    min_new_tokens: int = 0
    no_repeat_ngram_size: int = 0
    left_out: tuple[int, ...] = ()
    renormalize: bool = False


def next_tokens(
    logits: Tensor, targets: Tensor, rules: TokenRules, count: int
) -> tuple[Tensor, Tensor]:
    """The ``count`` most probable tokens that may follow each target, best first, or all tokens if they are fewer.

    Args:
        logits: (rows, vocabulary).
        targets: (rows, tokens), the targets so far without the start token.
    Returns: log-probabilities (rows, count), and the tokens (rows, count). A forced token has 0, and a token that must
        not follow -inf.
    """
    rows, vocabulary = logits.shape
    position, count = targets.shape[1], min(count, vocabulary)
    if position in rules.forced:
        scores = torch.full((rows, count), -torch.inf, device=logits.device)
        scores[:, 0] = 0
        return scores, torch.full_like(scores, rules.forced[position], dtype=torch.int64)
    never = [*rules.left_out, *(rules.ends if position < rules.min_new_tokens else ())]
    owners, repeating = _repeating(targets, rules)
    if rules.renormalize:
        logits = logits.float().clone()
        logits[:, never] = -torch.inf
        logits[owners, repeating] = -torch.inf
        return log_softmax_topk(logits, count)
    # So many of a row's most probable tokens may turn out to be forbidden.
    spare = len(never) + (int(owners.bincount().max()) if len(owners) else 0)
    scores, tokens = log_softmax_topk(logits.float(), min(count + spare, vocabulary))
    if not spare:
        return scores, tokens
    forbidden = torch.isin(tokens, torch.tensor(never, dtype=tokens.dtype, device=tokens.device))
    first_keys = torch.arange(rows, device=tokens.device)[:, None] * vocabulary
    forbidden |= torch.isin(first_keys + tokens, owners * vocabulary + repeating)
    scores, order = scores.masked_fill(forbidden, -torch.inf).sort(descending=True, stable=True)
    return scores[:, :count], tokens.gather(1, order[:, :count])


def _repeating(targets: Tensor, rules: TokenRules) -> tuple[Tensor, Tensor]:
    """Rows and tokens that would end a sequence that the row already has."""
    size = rules.no_repeat_ngram_size
    if not size or targets.shape[1] + 1 < size:
        return targets.new_empty(0), targets.new_empty(0)
    tokens = F.pad(targets, (1, 0), value=rules.start)
    earlier = tokens.unfold(1, size, 1)
    last = tokens[:, tokens.shape[1] - size + 1 :]
    rows, positions = (earlier[:, :, :-1] == last[:, None]).all(-1).nonzero(as_tuple=True)
    return rows, earlier[rows, positions, -1]
