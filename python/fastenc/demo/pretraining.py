"""Part two: a small BERT pretrained on docstrings."""

from pathlib import Path

import torch

from fastenc.data import full_sentence_blocks, train_tokenizer
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.objectives import MlmCollator
from fastenc.tasks import evaluate_masked_lm
from fastenc.train import TrainConfig, Trainer
from fastenc.train.log import read_log

BLOCK, STEPS = 128, 300


def run(texts: list[str], folder: Path) -> dict:
    """Train a tokenizer, then 300 steps of masked LM; one text in twenty is held out.

    Returns: the log's lines, held-out loss before and after, and the folder of the model.
    """
    held_out, training = texts[::20], [t for place, t in enumerate(texts) if place % 20]
    tokenizer = train_tokenizer(training, vocab_size=8000)
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        num_layers=4,
        num_heads=6,
        intermediate_size=768,
        max_positions=BLOCK,
    )
    model = MaskedLM(config)
    model.tokenizer = tokenizer
    blocks = full_sentence_blocks(training, tokenizer, BLOCK)
    held_out_blocks = full_sentence_blocks(held_out, tokenizer, BLOCK)[:100]
    held_out_collator = MlmCollator(tokenizer, seed=1)
    evaluate = lambda m: evaluate_masked_lm(m, held_out_blocks, held_out_collator)
    before = evaluate(model)
    settings = TrainConfig(
        str(folder),
        max_steps=STEPS,
        batch_size=16,
        learning_rate=1.5e-3,
        eval_every=100,
        warmup=0.1,
    )
    lengths = [len(block) for block in blocks]
    trainer = Trainer(model, settings, blocks, lengths, MlmCollator(tokenizer), evaluate=evaluate)
    after = trainer.train()
    return {
        "log": read_log(folder / "log.jsonl"),
        "before": before,
        "after": after,
        "folder": folder,
    }
