"""Lookup tables of the corruption."""

import torch

from fastenc.objectives.mlm_corruption import alias_table


def tables(vocabulary=50, special=(0, 3)):
    is_special = torch.zeros(vocabulary, dtype=torch.bool)
    is_special[list(special)] = True
    weights = torch.arange(vocabulary, dtype=torch.float64)
    weights[is_special] = 0
    return is_special, *alias_table(weights)
