"""MiniLM fine-tuned by fastenc and by transformers' Trainer with the same settings: score, time and memory.

python -m benchmarks.train_tasks [SET ...] [--seeds 0 1 2] [--epochs N] [--limit N]    (needs FASTENC_DATA)

Batches and their order, learning rate, warm-up, weight decay and clipping are the same; dropout and the classifier's
first weights are each library's own. The epoch is chosen on dev, the score is of test where there is one. Each run has
a process of its own, whose time (training with its evaluations) and peak memory are reported beside the score. Runs
whose results are there already are not run again; with --limit only so many examples of each file are read, and
nothing is written.
"""

import argparse
import os
import shutil
import tempfile
from dataclasses import replace
from typing import Any

import torch

from benchmarks._harness import read_cases, write
from benchmarks._process import Stopwatch, isolated
from benchmarks._trainer import transformers_trainer
from benchmarks.task_sets import SETS, TaskSet
from fastenc.data import TaggedData
from fastenc.demo.checkpoint import minilm_folder
from fastenc.tasks import Task, TokenClassification
from fastenc.tasks.metrics import classification_metrics, regression_metrics, tagging_metrics
from fastenc.train import TrainConfig, fine_tuning_rate, task_trainer

OURS, OURS_CRF, THEIRS = "fastenc", "fastenc, CRF", "transformers Trainer"


def providers(chosen: TaskSet) -> tuple[str, ...]:
    tags = isinstance(chosen.task, TokenClassification)
    return (OURS, OURS_CRF, THEIRS) if tags and chosen.metric == "f1" else (OURS, THEIRS)


def one_run(name: str, provider: str, seed: int, epochs: int, limit: int | None) -> dict:
    """{"dev", "test" (where there is one), "seconds"} of a provider on a set."""
    chosen = SETS[name]
    train, dev, test = chosen.read(limit)
    scratch = tempfile.mkdtemp()
    rate = fine_tuning_rate(384)
    config = TrainConfig(scratch, epochs=epochs, seed=seed, learning_rate=rate)
    if provider == THEIRS:
        result = theirs(chosen.task, train, dev, test, chosen.metric, config)
    else:
        task = replace(chosen.task, crf=True) if provider == OURS_CRF else chosen.task
        result = ours(task, train, dev, test, chosen.metric, config)
    shutil.rmtree(scratch)
    return result


def ours(task: Task, train, dev, test, metric: str, config: TrainConfig) -> dict:
    torch.manual_seed(config.seed)
    model = task.load(minilm_folder(), train)
    trainer = task_trainer(task, model, train, config, dev=dev, metric=metric)
    with Stopwatch() as watch:
        result = {"dev": trainer.train()[metric]}
    if test is not None:
        result["test"] = task.evaluate(model, test, task.encode(test, model))[metric]
    return result | {"seconds": watch.seconds}


def theirs(task: Any, train, dev, test, metric: str, config: TrainConfig) -> dict:
    import transformers

    transformers.set_seed(config.seed)
    tags = isinstance(task, TokenClassification)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    if tags:
        kind, collator = "TokenClassification", transformers.DataCollatorForTokenClassification
        rows = lambda data: _tagged_rows(data, tokenizer, task.max_length, train.label_names)
        score = lambda p: _tagging_score(p, train.label_names, metric)
    else:
        kind, collator = "SequenceClassification", transformers.DataCollatorWithPadding
        rows = lambda data: _text_rows(data, tokenizer, task.max_length)
        score = _regression_score if task.regression else _label_score
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        minilm_folder(),
        num_labels=len(train.label_names) or 1,
        problem_type=None if tags else task.problem_type,
    )
    arguments = (model, config, rows(train), rows(dev), collator(tokenizer), score, metric)
    trainer = transformers_trainer(*arguments)
    with Stopwatch() as watch:
        trainer.train()
    result = {"dev": trainer.evaluate()[f"eval_{metric}"]}
    if test is not None:
        result["test"] = trainer.evaluate(rows(test))[f"eval_{metric}"]
    return result | {"seconds": watch.seconds}


def _text_rows(data, tokenizer, max_length: int) -> list[dict]:
    texts = [text if isinstance(text, tuple) else (text,) for text in data.texts]
    columns = [list(column) for column in zip(*texts, strict=True)]
    encoded = tokenizer(*columns, truncation=True, max_length=max_length)
    return [
        {**{name: encoded[name][i] for name in encoded}, "labels": label}
        for i, label in enumerate(data.labels)
    ]


def _tagged_rows(data: TaggedData, tokenizer, max_length: int, names: list[str]) -> list[dict]:
    words = [each.words for each in data.sentences]
    encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
    examples = []
    for place, (ids, each) in enumerate(zip(encoded["input_ids"], data.sentences, strict=True)):
        of_token = encoded.word_ids(place)
        labels = [
            -100 if word is None or word == before else names.index(each.tags[word])
            for word, before in zip(of_token, [None, *of_token], strict=False)
        ]
        examples.append({"input_ids": ids, "labels": labels})
    return examples


def _label_score(prediction) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    return classification_metrics(logits.argmax(1).tolist(), labels.tolist(), logits.shape[1])


def _regression_score(prediction) -> dict[str, float]:
    return regression_metrics(prediction.predictions[:, 0].tolist(), prediction.label_ids.tolist())


def _tagging_score(prediction, names: list[str], metric: str) -> dict[str, float]:
    found, gold = [], []
    for logits, labels in zip(prediction.predictions, prediction.label_ids, strict=True):
        real = labels != -100
        found.append([names[tag] for tag in logits.argmax(-1)[real]])
        gold.append([names[tag] for tag in labels[real]])
    return tagging_metrics(found, gold, entities=metric == "f1")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}; all if none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    if unknown := set(options.sets) - set(SETS):
        parser.error(f"SET must be of {', '.join(SETS)}, got {', '.join(sorted(unknown))}")
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    cases = {} if options.limit else read_cases("train_tasks")
    for seed in options.seeds:
        for name in options.sets or SETS:
            case = f"{SETS[name].title}, {options.epochs} epochs, seed {seed}"
            rows = cases.setdefault(case, {})
            for provider in providers(SETS[name]):
                if provider in rows:
                    continue
                row = isolated(one_run, name, provider, seed, options.epochs, options.limit)
                rows[provider] = {"metric": SETS[name].metric, **row}
                if options.limit is None:
                    write("train_tasks", cases)
                shown = "  ".join(f"{key} {value:.4g}" for key, value in row.items())
                print(f"{case}  {provider:22} {shown}", flush=True)


if __name__ == "__main__":
    main()
