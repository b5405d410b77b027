"""Saved transformers models, their packed batches, and the tolerance of the comparison with them."""

import torch

from fastenc.packing import pack


def packed(batch):
    return pack(batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids"))


def save(hf_model, folder):
    hf_model.save_pretrained(folder)
    return folder


def close(a, b, **options):
    torch.testing.assert_close(a, b, **{"rtol": 0, "atol": 1e-5, **options})
