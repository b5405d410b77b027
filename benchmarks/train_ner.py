"""MiniLM fine-tuned on entities and parts of speech, and by transformers' Trainer with the same settings.

python -m benchmarks.train_ner [--epochs N] [--seed S] [--limit N]    (needs FASTENC_DATA and seqeval)

WNUT-17 (entity F1 by seqeval) and the English Web Treebank (accuracy of UPOS), chosen on dev, measured on test.
Batches and their order, learning rate, warm-up, weight decay and clipping are the same, dropout and the classifier's
first weights are each library's own. Each run has a process of its own, whose time (training with its evaluations)
and peak memory are reported beside the scores. With --limit only so many sentences of each file are read, and nothing
is written.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks._harness import write
from benchmarks._trainer import transformers_trainer
from fastenc.data import TaggedData
from fastenc.demo.checkpoint import minilm_folder
from fastenc.tasks import TokenClassification
from fastenc.tasks.metrics import tagging_metrics
from fastenc.train import TrainConfig, fine_tuning_rate, task_trainer

MAX_LENGTH = 256  # no sentence is longer
SETS = {
    "WNUT-17, entity F1": ("wnut17", "conll", "f1"),
    "UD English EWT, UPOS accuracy": ("ud_english_ewt", "conllu", "accuracy"),
}
PROVIDERS = ("fastenc", "fastenc, CRF", "transformers Trainer")


def ours(train, dev, test, metric: str, config: TrainConfig, crf: bool) -> dict:
    torch.manual_seed(config.seed)
    task = TokenClassification(max_length=MAX_LENGTH, crf=crf)
    model = task.load(minilm_folder(), train)
    begin = time.perf_counter()
    metrics = task_trainer(task, model, train, config, dev=dev, metric=metric).train()
    seconds = time.perf_counter() - begin
    measured = task.evaluate(model, test, task.encode(test, model))
    return {"dev": metrics[metric], "test": measured[metric], "seconds": seconds}


def theirs(train, dev, test, metric: str, config: TrainConfig) -> dict:
    import transformers

    transformers.set_seed(config.seed)
    names = train.label_names
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        minilm_folder(),
        id2label=dict(enumerate(names)),
        label2id={name: place for place, name in enumerate(names)},
    )

    def rows(data: TaggedData) -> list[dict]:
        words = [each.words for each in data.sentences]
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=MAX_LENGTH)
        examples = []
        for place, (ids, each) in enumerate(zip(encoded["input_ids"], data.sentences, strict=True)):
            of_token = encoded.word_ids(place)
            labels = [
                -100 if w is None or w == before else names.index(each.tags[w])
                for w, before in zip(of_token, [None, *of_token], strict=False)
            ]
            examples.append({"input_ids": ids, "labels": labels})
        return examples

    def score(prediction) -> dict[str, float]:
        found, gold = [], []
        for logits, labels in zip(prediction.predictions, prediction.label_ids, strict=True):
            real = labels != -100
            found.append([names[tag] for tag in logits.argmax(-1)[real]])
            gold.append([names[tag] for tag in labels[real]])
        return {metric: tagging_metrics(found, gold, entities=metric == "f1")[metric]}

    collate = transformers.DataCollatorForTokenClassification(tokenizer)
    trainer = transformers_trainer(model, config, rows(train), rows(dev), collate, score, metric)
    begin = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begin
    measure = lambda data: trainer.evaluate(data)[f"eval_{metric}"]
    return {"dev": measure(rows(dev)), "test": measure(rows(test)), "seconds": seconds}


def one_run(case: str, provider: str, options: argparse.Namespace) -> dict:
    """A provider's figures; peak memory is of this process or, on a GPU, of torch's allocator."""
    name, suffix, metric = SETS[case]
    folder = Path(os.environ["FASTENC_DATA"]) / name
    task = TokenClassification()
    train = task.read(folder / f"train.{suffix}.gz")
    dev, test = (task.read(folder / f"{part}.{suffix}.gz", train) for part in ("dev", "test"))
    train, dev, test = (
        replace(data, sentences=data.sentences[: options.limit]) for data in (train, dev, test)
    )
    scratch = tempfile.mkdtemp()
    rate = fine_tuning_rate(384)
    config = TrainConfig(scratch, epochs=options.epochs, seed=options.seed, learning_rate=rate)
    data = (train, dev, test, metric, config)
    figures = ours(*data, "CRF" in provider) if provider != PROVIDERS[-1] else theirs(*data)
    shutil.rmtree(scratch)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # Linux counts KiB
    return {**figures, "peak_MiB": peak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    if options.run:
        print("\n" + json.dumps(one_run(*options.run, options)))
        return
    cases = {}
    for case in SETS:
        rows = {}
        for provider in PROVIDERS:
            command = [sys.executable, "-m", "benchmarks.train_ner", *sys.argv[1:]]
            done = subprocess.run(
                [*command, "--run", case, provider], stdout=subprocess.PIPE, check=True
            )
            rows[provider] = json.loads(done.stdout.splitlines()[-1])
            shown = "  ".join(f"{name} {value:.4g}" for name, value in rows[provider].items())
            print(f"{case}  {provider:22} {shown}", flush=True)
        cases[f"{case}, {options.epochs} epochs, seed {options.seed}"] = rows
    if options.limit is None:
        write("train_ner", cases)


if __name__ == "__main__":
    main()
