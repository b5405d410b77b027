"""NaN and infinity in a text stay in this text through all layers of a model in 8 bits."""

import pytest
import torch

import fastenc
from fastenc.models import Encoder
from fastenc.ops import int8_products
from tests.helpers.checkpoints import packed, save
from tests.helpers.families import model, padded_batch

pytestmark = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
FAMILIES = (
    "bert",
    "mbart",  # pre-norm
    "nomic_bert",  # gated, rotary
    "modernbert",  # pre-norm, gated, rotary, windows
    "gemma3",  # RMS, norms of heads and of sublayers
    "esmc",  # norms of all heads together
    "embedding_gemma2",  # layer vectors, norms of values
    "mpnet",  # relative bias
    "t5-gated",  # pre-norm, gated, relative bias
    "deberta-v2",  # relative positions
    "big_bird-sparse",  # blocks
)
SPOILT, PLACE = 90, 20  # a token whose embedding is not finite, and where it is in the first text
# Threads share out the columns of few rows; of many they share out texts and rows.
LENGTHS = {"few rows": (30, 5, 17, 1), "many rows": (30, 5, 17, 1, 36, 9) * 5}


def own(family, folder):
    """An encoder of ours, what computes the states of a batch's tokens, and the embeddings of tokens."""
    encoder = Encoder.from_pretrained(save(model(family), folder))
    return encoder, lambda b: encoder(packed(b)).last_hidden_state, encoder.embeddings.word.weight


def patched(family, folder):
    theirs = fastenc.patch(model(family))
    states = lambda batch: theirs(**batch)[0][batch["attention_mask"].bool()]
    return theirs, states, theirs.get_input_embeddings().weight


def batch_with_one_spoilt(family, lengths):
    batch = padded_batch(family, lengths)
    ids = batch["input_ids"]
    ids[ids == SPOILT] = SPOILT - 1
    ids[0, PLACE] = SPOILT
    return batch


@pytest.mark.parametrize("made", [own, patched])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_is_not_finite_stays_in_its_text(family, made, tmp_path):
    ours, states, embeddings = made(family, tmp_path)
    batches = [batch_with_one_spoilt(family, lengths) for lengths in LENGTHS.values()]
    exact = [*map(states, batches)]
    fastenc.freeze(ours, dtype="int8")
    before, threads = embeddings[SPOILT].clone(), torch.get_num_threads()
    try:
        for lengths, batch, floats in zip(LENGTHS.values(), batches, exact, strict=True):
            for number in (1, 2):
                torch.set_num_threads(number)
                embeddings[SPOILT] = before
                clean = states(batch)
                assert clean.isfinite().all() and not torch.equal(clean, floats)
                for value in (torch.nan, torch.inf, -torch.inf):
                    embeddings[SPOILT, 3] = value
                    spoilt = states(batch)
                    assert not spoilt[PLACE].isfinite().any()
                    assert torch.equal(spoilt[lengths[0] :], clean[lengths[0] :])
    finally:
        torch.set_num_threads(threads)
