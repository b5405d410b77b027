"""Measures the peak memory of each objective's step, with small and large vocabularies and few and many tokens.

test_objectives.py runs this in a process that returns all freed memory to the system.
"""

import json

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from fastenc.objectives import OBJECTIVES, PACKINGS
from fastenc.packing import pack_sequences
from tests.helpers.resident_memory import bytes_at_peak
from tests.helpers.training_run import documents, small_model, tokenizer_of

VOCABULARIES, SEQUENCES, LENGTH = (2_000, 12_000), (8, 72), 32
EVERY_LOGIT = "every token's logits"  # which no objective may compute


def main() -> None:
    torch.set_num_threads(1)
    peaks = {
        name: [
            [peak(name, vocabulary, count) for count in SEQUENCES] for vocabulary in VOCABULARIES
        ]
        for name in (*(OBJECTIVES.keys() - {"ul2"}), EVERY_LOGIT)
    }
    print(json.dumps(peaks))


def peak(name: str, vocabulary: int, sequences: int) -> int:
    """Bytes that a step allocates at its peak, with this number of sequences beside the labelled ones."""
    objective = "mlm" if name == EVERY_LOGIT else name
    tokenizer, chosen = with_words(tokenizer_of(objective), vocabulary), OBJECTIVES[objective]
    model = small_model(objective, tokenizer).train()
    packed = PACKINGS[chosen.packings[0]](documents(20), tokenizer, LENGTH, show_progress=False)
    start = {"start_id": model.decoder_start_token_id} if chosen.has_decoder else {}
    collate = chosen.collator(tokenizer, packed, 0, **start)
    arguments = with_unlabelled(collate(packed[:6], 0), sequences)

    def step() -> None:
        model.zero_grad()
        if name == EVERY_LOGIT:
            logits = model(arguments["batch"]).logits
            F.cross_entropy(logits, arguments["labels"]).backward()
        else:
            model(**arguments).loss.backward()

    step()  # allocates what later steps reuse
    model.zero_grad()
    return bytes_at_peak(step)


def with_words(tokenizer: Tokenizer, vocabulary: int) -> Tokenizer:
    """A tokenizer with further words. Added tokens would be the same, and take seconds."""
    described = json.loads(tokenizer.to_str())
    words, first = described["model"]["vocab"], tokenizer.get_vocab_size()
    words |= {f"w{number}": number for number in range(first, vocabulary)}
    return Tokenizer.from_str(json.dumps(described))


def with_unlabelled(arguments: dict, count: int) -> dict:
    """The collated arguments, followed by sequences without labels."""
    grown = {
        "batch": with_sequences(arguments["batch"], count),
        "labels": F.pad(arguments["labels"], (0, count * LENGTH), value=-100),
    }
    if "target" in arguments:
        grown["target"] = with_sequences(arguments["target"], count)
    if "pair_labels" in arguments:
        grown["pair_labels"] = F.pad(arguments["pair_labels"], (0, count))
    return arguments | grown


def with_sequences(batch, count: int):
    """A packed batch, followed by ``count`` sequences."""
    lengths = batch.cu_seqlens.diff().tolist()
    sequences = [each.tolist() for each in batch.input_ids.split(lengths)]
    types = None
    if batch.token_type_ids is not None:
        types = [each.tolist() for each in batch.token_type_ids.split(lengths)]
        types += [[0] * LENGTH] * count
    more = [[2, *[5 + n % 13 for n in range(LENGTH - 2)], 3]] * count
    return pack_sequences([*sequences, *more], types)


if __name__ == "__main__":
    main()
