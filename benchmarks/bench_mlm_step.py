"""One masked-LM training step of a 6-layer, 384-wide model: batch 16 x 128 tokens, vocabulary 30,522, no padding.

Forward, backward and AdamW. Hugging Face computes logits for every token; fastenc for the labelled ones.
Both start from the same weights and see the same tokens and labels; the losses must agree before anything is timed
(dropout is off in that comparison and on while timing).
"""

import tempfile
import warnings

import torch

from benchmarks._harness import compare, write
from fastenc.models import MaskedLM
from fastenc.packing import pack

BATCH, LENGTH, VOCABULARY = 16, 128, 30522


def hugging_face():
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    return BertForMaskedLM(config)


def main() -> None:
    theirs = hugging_face()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = MaskedLM.from_pretrained(folder)
    input_ids = torch.randint(1000, VOCABULARY, (BATCH, LENGTH))
    labels = torch.where(torch.rand(BATCH, LENGTH) < 0.15, input_ids, -100)
    batch, packed_labels = pack(input_ids), labels.flatten()

    def step_of(model, loss_of):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(autocast: bool):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    loss_theirs = lambda: theirs(input_ids=input_ids, labels=labels).loss
    loss_ours = lambda: ours(batch, packed_labels).loss
    for model in (theirs, ours):
        model.eval()
    first = {"fastenc": loss_ours().item(), "Hugging Face sdpa": loss_theirs().item()}
    if abs(first["fastenc"] - first["Hugging Face sdpa"]) > 1e-4:
        raise SystemExit(f"the losses differ, nothing was timed: {first}")
    for model in (theirs, ours):
        model.train()
    step_theirs, step_ours = step_of(theirs, loss_theirs), step_of(ours, loss_ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = compare(
            {
                "Hugging Face sdpa": lambda: step_theirs(False),
                "fastenc": lambda: step_ours(False),
                "Hugging Face sdpa, bf16 autocast": lambda: step_theirs(True),
                "fastenc, bf16 autocast": lambda: step_ours(True),
            },
            baseline="Hugging Face sdpa",
            seconds=60,
        )
    for row in rows.values():
        row["tokens_per_s"] = BATCH * LENGTH / row["median_ms"] * 1e3
    write("mlm_step", {"6 x 384, batch 16 x 128, fp32 weights": rows})


if __name__ == "__main__":
    main()
