"""Inputs and the plain likelihood of a CRF."""

import torch

from fastenc.ops import crf_log_likelihood
from tests.helpers.attention_cases import offsets_of

LENGTHS = (1, 0, 40, 2, 13)
NAMES = ("emissions", "start", "end", "transitions")


def inputs(num_tags, lengths=LENGTHS, scale=1.0):
    emissions = scale * torch.randn(sum(lengths), num_tags)
    values = (
        emissions,
        *(torch.randn(num_tags) for _ in range(2)),
        torch.randn(num_tags, num_tags),
    )
    tags = torch.randint(num_tags, (sum(lengths),))
    return [value.requires_grad_() for value in values], tags, offsets_of(lengths)


def likelihood(values, tags, cu_seqlens, function=crf_log_likelihood, **options):
    emissions, start, end, transitions = values
    return function(emissions, tags, cu_seqlens, start, end, transitions, **options)


def forbid(values, cells, score):
    with torch.no_grad():
        for row, column in cells:
            values[3][row, column] = score
