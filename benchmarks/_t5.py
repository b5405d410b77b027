"""The T5 that benchmarks and studies time: in transformers, in fastenc, and its padded batches."""

import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from fastenc.models import Seq2Seq

VOCABULARY = 32128  # T5's


def hugging_face(layers: int, heads: int, width: int = 512, inner: int = 1024):
    """A T5 v1.1 of ``layers`` + ``layers`` layers with random weights, whose dropout is 0.1."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=64,
        d_ff=inner,
        num_layers=layers,
        num_heads=heads,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )
    return T5ForConditionalGeneration(config)


def fastencs(theirs) -> Seq2Seq:
    """The same model in fastenc."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return Seq2Seq.from_pretrained(folder)


def padded(rows: Sequence[Sequence[int]], value: int = 0) -> Tensor:
    """(rows, longest) int64, with ``value`` after the end of each row."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def mask_of(rows: Sequence[Sequence[int]]) -> Tensor:
    """The attention mask of :func:`padded`."""
    return padded([[1] * len(row) for row in rows])
