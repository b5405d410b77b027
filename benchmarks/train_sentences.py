"""MiniLM trained as a sentence encoder on small public sets: the metric before and after.

python -m benchmarks.train_sentences [SET ...] [--epochs N] [--limit N]    (needs FASTENC_DATA)

stsb: scored pairs, Spearman correlation on the test set. nli: premises with an entailed hypothesis and a contradicted
one as hard negative, made of SNLI's counterfactual revisions; Spearman correlation on STS-B's test set. tatoeba: German
sentences and their English translations, every fifth pair held out; mean reciprocal rank.
"""

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from fastenc.data.pairs import TextPairs
from fastenc.data.readers import numbered_rows
from fastenc.demo.checkpoint import minilm_folder
from fastenc.tasks import SentenceEmbedding
from fastenc.train import TrainConfig, fine_tuning_lr, task_trainer

STSB = SentenceEmbedding(similarity="score", max_length=128)
PAIRS = SentenceEmbedding(max_length=128)


def stsb(folder: Path) -> tuple[SentenceEmbedding, TextPairs, SentenceEmbedding, TextPairs]:
    train = STSB.read(folder / "stsb" / "en_train.tsv.gz")
    return STSB, train, STSB, STSB.read(folder / "stsb" / "en_test.tsv.gz", train)


def nli(folder: Path) -> tuple[SentenceEmbedding, TextPairs, SentenceEmbedding, TextPairs]:
    hypotheses: dict[str, dict[str, list[str]]] = {}
    for part in ("original", "revised"):
        rows = numbered_rows(folder / "snli_cad" / f"{part}_train.tsv.gz", ["gold_label"])
        for _, row in rows:
            kinds = hypotheses.setdefault(row["sentence1"], {})
            kinds.setdefault(row["gold_label"], []).append(row["sentence2"])
    triples: list[tuple[str, ...]] = [
        (premise, entailed, contradicted)
        for premise, kinds in hypotheses.items()
        for entailed, contradicted in zip(
            kinds.get("entailment", []), kinds.get("contradiction", []), strict=False
        )
    ]
    *_, test = stsb(folder)
    return PAIRS, TextPairs(triples, []), STSB, test


def tatoeba(folder: Path) -> tuple[SentenceEmbedding, TextPairs, SentenceEmbedding, TextPairs]:
    file = folder / "tatoeba" / "pairs.tsv.gz"
    pairs = [
        (row["sentence"], row["english"])
        for _, row in numbered_rows(file, ["lang", "sentence", "english"])
        if row["lang"] == "deu"
    ]
    train = [pair for index, pair in enumerate(pairs) if index % 5]
    task = replace(PAIRS, symmetric=True)
    return task, TextPairs(train, []), task, TextPairs(pairs[::5], [])


SETS = {"stsb": stsb, "nli": nli, "tatoeba": tatoeba}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sets", nargs="*", default=list(SETS), metavar="SET")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--limit", type=int, help="training pairs")
    options = parser.parse_args()
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    for name in options.sets:
        task, train, judge, test = SETS[name](Path(os.environ["FASTENC_DATA"]))
        if options.limit:
            train = replace(
                train, texts=train.texts[: options.limit], scores=train.scores[: options.limit]
            )
        torch.manual_seed(0)
        model = task.load(minilm_folder(), train)
        show = lambda stage: print(
            f"{name}, {len(train)} pairs, {stage}: "
            + ", ".join(
                f"{k} {v:.4f}"
                for k, v in judge.score(model, test, judge.predict(model, test)).items()
            ),
            flush=True,
        )
        show("before")
        with tempfile.TemporaryDirectory() as scratch:
            config = TrainConfig(scratch, epochs=options.epochs, learning_rate=fine_tuning_lr(384))
            task_trainer(task, model, train, config).train()
        show("after")


if __name__ == "__main__":
    main()
