"""Batches of encoder-decoders, for transformers and for us."""

import torch

from fastenc.packing import pack_sequences, pack_targets
from tests.helpers.families import START_TOKENS, config, padded_batch


def targets(family: str, lengths=(3, 1, 9, 20)) -> list[list[int]]:
    """A target for each row of :func:`padded_batch`, with an end token."""
    generator = torch.Generator().manual_seed(1)
    eos = config(family).eos_token_id
    draw = lambda n: torch.randint(5, 97, (n,), generator=generator).tolist()
    return [[*draw(length - 1), eos] for length in lengths]


def both_batches(family: str):
    """(transformers' arguments, ours) for one batch."""
    padded, labels = padded_batch(family), targets(family)
    rows = torch.full((len(labels), max(map(len, labels))), -100)
    for row, target in zip(rows, labels, strict=True):
        row[: len(target)] = torch.tensor(target)
    pairs = zip(padded["input_ids"], padded["attention_mask"], strict=True)
    batch = pack_sequences([ids[mask.bool()].tolist() for ids, mask in pairs])
    return {**padded, "labels": rows}, (batch, *pack_targets(labels, START_TOKENS[family]))
