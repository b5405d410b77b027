"""Masked-LM corruption of a packed batch: by the collator on the host, and on the device."""

from functools import partial

import torch

from benchmarks._compare import compare, compiled
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import run_groups
from fastenc.objectives import MlmCollator, MlmCorruption
from fastenc.packing import pack_sequences
from fastenc.profiling import Work
from fastenc.reference.mlm_corruption import mlm_corruption

TABLES = {"mlm_corruption": "Masked-LM corruption"}
SMALLEST = (9, 128)  # the shape that the tests measure
VOCABULARY = 30522


def tokenizer():
    """A tokenizer of BERT's size; only the number of its tokens matters here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    pieces = [*special, *(f"word{index}" for index in range(VOCABULARY - len(special)))]
    return Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))


def measure(name: str, sequences: int, length: int) -> dict[str, dict]:
    collator, corruption = MlmCollator(tokenizer()), MlmCorruption(tokenizer()).to(DEVICE)
    batch = pack_sequences(torch.randint(1996, 30000, (sequences, length)).tolist())
    here = batch.to(DEVICE)

    def on_host():
        ids, labels = collator.corrupt(batch.input_ids, 0)
        return ids.to(DEVICE), labels.to(DEVICE)

    def on_device():
        corrupted, labels = corruption(here)
        return corrupted.input_ids, labels

    def plain(ids, seed):
        tables = corruption.is_special, corruption.choices, corruption.cutoffs
        threshold = round(corruption.probability * 2**32)
        return mlm_corruption(ids, seed, *tables, corruption.mask_token_id, threshold)

    def check(_, result):
        share = (result[1] != -100).float().mean().item()
        return None if 0.12 < share < 0.18 else f"{share:.1%} of the tokens selected"

    calls = {"MlmCollator, host": on_host, f"fastenc MlmCorruption, {DEVICE.type}": on_device}
    if ON_GPU:
        fused, seed = compiled(plain), corruption.step_seed(0, 0)
        calls["torch.compile of the same formula"] = lambda: fused(here.input_ids, seed)
    rows = compare(
        calls,
        baseline="MlmCollator, host",
        check=check,
        work=Work(3 * 8 * batch.total_tokens),  # ids read, ids and labels written
        end_to_end=True,
        seconds=2,
    )
    return {name: rows}


def main() -> None:
    groups = {}
    for sequences, length in ((16, 128), (128, 512)):
        name = f"{sequences} x {length}"
        groups[name] = partial(measure, name, sequences, length)
    run_groups("mlm_corruption", groups)


if __name__ == "__main__":
    main()
