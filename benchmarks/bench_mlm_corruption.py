"""Masked-LM corruption of a packed batch: the collator's, on the host, and the device's."""

import torch

from benchmarks._harness import DEVICE, Work, compare, write
from fastenc.objectives import MlmCollator, MlmCorruption
from fastenc.packing import pack_sequences

VOCABULARY = 30522


def tokenizer():
    """Of BERT's size; only the numbers of its tokens matter here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    pieces = [*special, *(f"word{place}" for place in range(VOCABULARY - len(special)))]
    return Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))


def main() -> None:
    collator, corruption = MlmCollator(tokenizer()), MlmCorruption(tokenizer()).to(DEVICE)
    cases = {}
    for sequences, length in ((16, 128), (128, 512)):
        batch = pack_sequences(torch.randint(1996, 30000, (sequences, length)).tolist())
        here = batch.to(DEVICE)

        def on_host():
            ids, labels = collator.corrupt(batch.input_ids, 0)
            return ids.to(DEVICE), labels.to(DEVICE)

        def on_device():
            corrupted, labels = corruption(here)
            return corrupted.input_ids, labels

        def check(_, result):
            share = (result[1] != -100).float().mean().item()
            return None if 0.12 < share < 0.18 else f"{share:.1%} of the tokens selected"

        cases[f"{sequences} x {length}"] = compare(
            {"MlmCollator, host": on_host, f"fastenc MlmCorruption, {DEVICE.type}": on_device},
            baseline="MlmCollator, host",
            check=check,
            work=Work(3 * 8 * batch.total_tokens),  # ids read, ids and labels written
            end_to_end=True,
            seconds=2,
        )
    write("mlm_corruption", cases)


if __name__ == "__main__":
    main()
