import random

import pytest
import torch

from fastenc.models.next_tokens import TokenRules, next_tokens

VOCABULARY = 12


def by_a_table(logits, targets, rules, count):
    """From the table of all log-probabilities, token by token."""
    table = torch.log_softmax(logits, -1)
    for row, target in enumerate(targets.tolist()):
        history, size = [rules.start, *target], rules.no_repeat_ngram_size
        seen = {tuple(history[i : i + size]) for i in range(len(history) - size + 1)}
        for token in range(VOCABULARY):
            repeats = size > 0 and (*history[len(history) - size + 1 :], token) in seen
            too_early = token in rules.ends and len(target) < rules.min_new_tokens
            if repeats or too_early or token in rules.left_out:
                table[row, token] = -torch.inf
    if rules.renormalize:
        table = torch.log_softmax(table, -1)
    return table.topk(count)


@pytest.mark.parametrize("seed", range(40))
def test_they_are_those_of_the_table(seed):
    draw = random.Random(seed)
    rules = TokenRules(
        start=0,
        ends=tuple(draw.sample(range(VOCABULARY), draw.randint(1, 2))),
        min_new_tokens=draw.choice([0, 4]),
        no_repeat_ngram_size=draw.choice([0, 1, 2, 3]),
        left_out=tuple(draw.sample(range(VOCABULARY), draw.choice([0, 3]))),
        renormalize=draw.choice([False, True]),
    )
    targets = torch.randint(0, 4, (5, draw.randint(0, 8)))
    logits, count = 2 * torch.randn(5, VOCABULARY), draw.choice([1, 4, VOCABULARY])
    scores, tokens = next_tokens(logits, targets, rules, count)
    expected, expected_tokens = by_a_table(logits, targets, rules, count)
    torch.testing.assert_close(scores, expected)
    may_follow = expected > -torch.inf
    assert torch.equal(tokens[may_follow], expected_tokens[may_follow])


def test_a_forced_token_is_the_only_one():
    rules = TokenRules(start=0, ends=(1,), forced={2: 7})
    scores, tokens = next_tokens(torch.randn(3, VOCABULARY), torch.zeros(3, 2).long(), rules, 4)
    assert torch.equal(tokens[:, 0], torch.full((3,), 7)) and not scores[:, 0].any()
    assert (scores[:, 1:] == -torch.inf).all()


def test_of_few_tokens_all_are_taken():
    rules = TokenRules(start=0, ends=(1,))
    scores, tokens = next_tokens(torch.randn(3, VOCABULARY), torch.zeros(3, 2).long(), rules, 99)
    assert scores.shape == (3, VOCABULARY) and tokens.sort().values.tolist() == 3 * [[*range(12)]]
