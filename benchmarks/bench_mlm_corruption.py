"""Masked-LM corruption of a packed batch: the collator's, on the host, and the device's."""

import torch

from benchmarks._harness import compare, write
from fastenc.data import load_tokenizer
from fastenc.demo.checkpoint import minilm_folder
from fastenc.objectives import MlmCollator, MlmCorruption
from fastenc.packing import pack_sequences


def bytes_moved(tokens: int) -> int:
    """Ids read, ids and labels written."""
    return 3 * 8 * tokens


def main() -> None:
    tokenizer = load_tokenizer(minilm_folder())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    collator, corruption = MlmCollator(tokenizer), MlmCorruption(tokenizer).to(device)
    cases = {}
    for sequences, length in ((16, 128), (128, 512)):
        batch = pack_sequences(torch.randint(1996, 30000, (sequences, length)).tolist())
        here = batch.to(device)

        def on_host():
            ids, labels = collator.corrupt(batch.input_ids, 0)
            return ids.to(device), labels.to(device)

        def on_device():
            corrupted, labels = corruption(here)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return corrupted.input_ids, labels

        def check(_, result):
            share = (result[1] != -100).float().mean().item()
            return None if 0.12 < share < 0.18 else f"{share:.1%} of the tokens selected"

        rows = compare(
            {"MlmCollator, host": on_host, f"MlmCorruption, {device.type}": on_device},
            baseline="MlmCollator, host",
            check=check,
            seconds=2,
        )
        for row in rows.values():
            if "median_ms" in row:
                row["GB_per_s"] = bytes_moved(batch.total_tokens) / row["median_ms"] / 1e6
        cases[f"{sequences} x {length}"] = rows
    write("mlm_corruption", cases)


if __name__ == "__main__":
    main()
