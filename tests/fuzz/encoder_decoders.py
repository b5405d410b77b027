"""Whole encoder-decoders: edits of patched ones, and checkpoints of theirs with a wrong value."""

from pathlib import Path
from random import Random

import torch
from torch import Tensor

from fastenc.models import Seq2Seq
from fastenc.packing import pack_targets
from tests.fuzz import surgery, weights
from tests.fuzz.checkpoints import sound
from tests.fuzz.configs import check_config
from tests.fuzz.patched_models import check_edits_of
from tests.helpers.checkpoints import packed
from tests.helpers.families import ENCODER_DECODERS, WHOLE, padded_batch

EDITS = {**weights.EDITS, **surgery.EDITS}
TARGETS = ([5, 6, 7], [8], [9, 10], [11, 12])


def check_edits(rng: Random) -> None:
    check_edits_of(rng.choice(ENCODER_DECODERS), WHOLE, EDITS, rng)


def check_config_of_whole(rng: Random) -> None:
    family = rng.choice(ENCODER_DECODERS)

    def logits(folder: Path) -> Tensor:
        loaded = Seq2Seq.from_pretrained(folder)
        batch = packed(padded_batch(family))
        with torch.inference_mode():
            loaded.generate_ids(batch, max_new_tokens=2, decoder_start_token_id=3, num_beams=2)
            return loaded(batch, pack_targets(TARGETS, None)[0]).logits

    check_config(sound(family, WHOLE), rng, logits, (sum(map(len, TARGETS)), 97))
