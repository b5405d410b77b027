"""Runs the same checkpoint with transformers, with ``fastenc.patch`` and with ``fastenc.Encoder``."""

import statistics
import time
from collections.abc import Callable

import torch

import fastenc
from fastenc._base.extras import require
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder
from fastenc.packing import pack_sequences

BATCH, ROUNDS, TEXTS = 32, 3, 256


def run(texts: list[str]) -> dict:
    """Encode texts in the given order, in batches of 32, with each provider.

    Returns: sentences per second of each provider; largest absolute difference of a hidden state from transformers',
        padding excluded; numbers of texts, tokens and tokens with padding.
    Raises: RuntimeError if a difference is 1e-4 or more.
    """
    transformers = require("transformers", extra="demo")
    transformers.logging.disable_progress_bar()
    folder = minilm_folder()
    hugging_face = transformers.AutoModel.from_pretrained(folder).eval()
    patched = fastenc.patch(transformers.AutoModel.from_pretrained(folder).eval())
    native = Encoder.from_pretrained(folder)
    ids = [encoding.ids[:256] for encoding in native.own_tokenizer().encode_batch(texts)]
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    padded = [_pad(batch) for batch in batches]
    packed = [pack_sequences(batch) for batch in batches]

    def padded_run(model) -> Callable[[], torch.Tensor]:
        return lambda: torch.cat(
            [model(**batch).last_hidden_state[batch["attention_mask"].bool()] for batch in padded]
        )

    providers = {
        "Hugging Face": padded_run(hugging_face),
        "fastenc.patch": padded_run(patched),
        "fastenc.Encoder": lambda: torch.cat([native(batch).last_hidden_state for batch in packed]),
    }
    with torch.inference_mode():
        truth = providers["Hugging Face"]()
        differences = {name: (run() - truth).abs().max().item() for name, run in providers.items()}
        if not max(differences.values()) < 1e-4:
            raise RuntimeError(
                f"outputs must differ from transformers' by less than 1e-4, got {differences}"
            )
        times: dict[str, list[float]] = {name: [] for name in providers}
        # The providers take turns, so that a change of the machine's speed affects all alike.
        for _ in range(ROUNDS):
            for name, run in providers.items():
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    return {
        "sentences_per_s": {name: len(ids) / statistics.median(t) for name, t in times.items()},
        "differences": differences,
        "tokens": sum(map(len, ids)),
        "padded_tokens": sum(batch["input_ids"].numel() for batch in padded),
        "sentences": len(ids),
    }


def _pad(batch: list[list[int]]) -> dict[str, torch.Tensor]:
    length = max(map(len, batch))
    return {
        "input_ids": torch.tensor([row + [0] * (length - len(row)) for row in batch]),
        "attention_mask": torch.tensor(
            [[1] * len(row) + [0] * (length - len(row)) for row in batch]
        ),
    }
