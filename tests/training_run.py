"""A small masked-LM run that the training tests start, kill and resume: python training_run.py FOLDER [key=value ...]"""

import json
import sys

import torch

from fastenc.data import train_tokenizer
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.objectives import MlmCollator
from fastenc.tasks import evaluate_masked_lm
from fastenc.train import TrainConfig, Trainer

WORDS = "the a cat dog sat ran on under mat tree quickly slowly and then it was gone".split()


def build(folder, dropout=0.1, **settings):
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    texts = [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=draw))
        for n in torch.randint(4, 20, (60,), generator=draw).tolist()
    ]
    tokenizer = train_tokenizer(texts, vocab_size=80)
    sequences = [tokenizer.encode(text).ids for text in texts]
    torch.manual_seed(1)
    config = EncoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        max_positions=32,
        hidden_dropout_p=dropout,
        attention_dropout_p=dropout,
    )
    model = MaskedLM(config)
    model.tokenizer = tokenizer
    held_out = MlmCollator(tokenizer, seed=99)
    values = dict(
        epochs=3, batch_size=4, accumulation=2, learning_rate=2e-3, save_every=3, log_every=1
    )
    return Trainer(
        model,
        TrainConfig(str(folder), **(values | settings)),
        sequences[:50],
        [len(sequence) for sequence in sequences[:50]],
        MlmCollator(tokenizer, seed=5, probability=0.3),
        evaluate=lambda m: evaluate_masked_lm(m, sequences[50:], held_out, 4),
        show_progress=False,
    )


if __name__ == "__main__":
    settings = {k: json.loads(v) for k, v in (argument.split("=") for argument in sys.argv[2:])}
    resume = settings.pop("resume", False)
    print(json.dumps(build(sys.argv[1], **settings).train(resume=resume)))
