"""Pretraining on wikipedia_en: fastenc and transformers from the same weights on the same batches.

python -m benchmarks.train_objectives {mlm,electra} [--steps N] [--width N] [--batch N] [--dropout P]
(needs FASTENC_DATA; minutes on two cores)

A model of 4 layers; blocks of 128 tokens, the same masks, the same random numbers of the samples and the same AdamW.
Dropout is each model's own: with --dropout 0 both compute the same, and the curves differ by rounding alone. Writes
both held-out losses at the same steps, and draws them.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._harness import read_cases, write
from benchmarks._training import Side, corpus, padded, small_config, train_both
from benchmarks.plots import draw_curves
from fastenc.models import LossTerm
from fastenc.objectives import OBJECTIVES
from fastenc.objectives.electra import DETECTION_WEIGHT, GENERATOR_FOLDER
from fastenc.objectives.loss_terms import loss_terms
from tests.helpers.references import electra as reference


def masked_lm(folder: str) -> Side:
    """transformers' masked LM of a checkpoint."""
    import transformers

    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    return Side(model, lambda example: {"loss": LossTerm(model(**padded(example)).loss)})


def electra(folder: str) -> Side:
    """transformers' generator and discriminator, put together as the paper has them."""
    import transformers

    generator = transformers.ElectraForMaskedLM.from_pretrained(Path(folder) / GENERATOR_FOLDER)
    discriminator = transformers.ElectraForPreTraining.from_pretrained(folder)
    own, theirs = discriminator.electra.embeddings, generator.electra.embeddings
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        setattr(theirs, name, getattr(own, name))
    generator.generator_lm_head.weight = own.word_embeddings.weight

    def parts(example: dict[str, Any]) -> dict[str, LossTerm]:
        batch = padded(example)
        labelled = batch["labels"] != -100
        output = generator(**batch)
        samples = reference.sample(output.logits[labelled].detach(), example["uniform_samples"])
        read = batch["input_ids"].masked_scatter(labelled, samples)
        original = torch.where(labelled, batch["labels"], batch["input_ids"])
        mask = batch["attention_mask"]
        found = discriminator(read, attention_mask=mask, labels=(read != original).long())
        return {"mlm": LossTerm(output.loss), "rtd": LossTerm(found.loss, DETECTION_WEIGHT)}

    return Side(nn.ModuleDict({"generator": generator, "discriminator": discriminator}), parts)


THEIRS = {"mlm": masked_lm, "electra": electra}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("objective", choices=THEIRS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args()
    name, objective = arguments.objective, OBJECTIVES[arguments.objective]
    tokenizer, blocks, held_out = corpus()
    torch.manual_seed(0)
    dropout = dict.fromkeys(("hidden_dropout_p", "attention_dropout_p"), arguments.dropout)
    vocabulary = tokenizer.get_vocab_size()
    config = small_config(vocabulary, arguments.width, family=objective.family, **dropout)
    ours = objective.model(config)
    with tempfile.TemporaryDirectory() as scratch:
        ours.save_pretrained(scratch)
        theirs = THEIRS[name](scratch)
    sides = {
        "fastenc": Side(ours, lambda example: loss_terms(ours(**example))),
        "transformers": theirs,
    }
    collators = (
        objective.collator(tokenizer, some, s) for s, some in enumerate((blocks, held_out))
    )
    collator, held_out_collator = collators
    rows = train_both(
        sides, blocks, collator, held_out, held_out_collator, arguments.steps, arguments.batch
    )
    case = f"4 × {arguments.width}, batches of {arguments.batch}, dropout {arguments.dropout:g}"
    draw_curves(write(f"train_{name}", read_cases(f"train_{name}") | {case: rows}))


if __name__ == "__main__":
    main()
