"""PackedBatch refuses fields that contradict each other. Ops and encoders can compute every batch that it accepts."""

from functools import cache
from random import Random

import torch

from fastenc import ops
from fastenc.models import Encoder, EncoderConfig
from fastenc.packing import PackedBatch
from tests.fuzz.broken_calls import REFUSED, spoilt
from tests.fuzz.op_calls import batch_of


@cache
def encoder() -> Encoder:
    return Encoder(EncoderConfig(50, 16, 1, 2, 24, 16)).eval()


def check(rng: Random) -> None:
    fields = dict(vars(batch_of(rng)))
    names = [name for name in fields if name != "hidden"]
    for name in rng.sample(names, rng.randint(0, 2)):
        left_out = (2, 3) if name == "padded_shape" else torch.arange(5)
        fields[name] = left_out if fields[name] is None else spoilt(fields[name], rng)
    try:
        batch = PackedBatch(**fields)
        if batch.max_seqlen > 10**6:  # allowed, but a padded batch would fill the memory
            return
        values = torch.randn(batch.total_tokens, 4)
        padded = ops.unpack(values, batch)
        again = ops.pack(padded, batch)
        with torch.inference_mode():
            hidden = encoder()(batch).last_hidden_state
    except REFUSED as error:
        assert str(error)
        return
    assert torch.equal(again, values)
    assert padded.count_nonzero() == values.count_nonzero()
    assert hidden.shape == (batch.total_tokens, 16) and hidden.isfinite().all()
