"""SST-2 and STS-B as text: a small T5 is pretrained on 3,000 articles of Wikipedia, then fine-tuned on each of them.

python -m benchmarks.studies.text_to_text [--folder FOLDER]    (needs FASTENC_DATA; minutes of one core)

Every step is a command of fastenc, which is printed. SST-2's labels are written as words, as T5 does. The checkpoint is
the best on dev; scores are of dev and test. CPU seconds are those of the command, with reading, tokenising and
evaluations. Baselines: SST-2's more frequent label, and multinomial naive Bayes on words and word pairs (scikit-learn);
for STS-B, where one guess for all has no correlation, the share of words that both sentences have. A step whose folder
is complete is not repeated.
"""

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.naive_bayes import MultinomialNB

from benchmarks._results import read_cases, write
from fastenc.data.readers import iterate_texts
from fastenc.data.text_to_text import TextToTextData, read_text_to_text
from fastenc.models import Seq2Seq
from fastenc.tasks.metrics import numbers_of, regression_metrics

RESULT = "text_to_text"
PRETRAINED, ARTICLES = "t5", 3000
WORDS = {"0": "negative", "1": "positive"}
SPLITS = ("dev", "test")
PRETRAINING = (
    "--objective span-corruption --lowercase --vocab-size 4000 --layers 2 --hidden 128 --block-size 64 "
    "--batch-size 32 --max-steps 1500 --eval-every 750 --lr 3e-3 --dropout 0.0"
)
FINE_TUNING = "--task seq2seq --lr 1e-3 --batch-size 32"
OF_TASKS = {
    "SST-2": "--source sentence --target label --prefix 'sst2 sentence: ' --max-target-length 4 --epochs 1 "
    "--metric exact_match",
    "STS-B": "--source sentence1 --source sentence2 --target score --prefix 'stsb ' --round-targets 0.2 "
    "--max-target-length 8 --epochs 6 --metric pearson",
}


def tables(data: Path, folder: Path) -> dict[str, dict[str, Path]]:
    """The files of each task: "train", "dev" and "test"."""
    words = {}
    for split in ("train", *SPLITS):
        read = read_text_to_text(data / "sst2" / f"{split}.tsv.gz", ("sentence",), "label")
        words[split] = folder / f"sst2-{split}.tsv"
        rows = zip(read.sources, read.targets, strict=True)
        lines = (f"{sentence}\t{WORDS[label]}\n" for sentence, label in rows)
        words[split].write_text("sentence\tlabel\n" + "".join(lines))
    pairs = {split: data / "stsb" / f"en_{split}.tsv.gz" for split in ("train", *SPLITS)}
    return {"SST-2": words, "STS-B": pairs}


def execute(*arguments: object) -> float:
    """Run a command of fastenc. Returns: its CPU seconds."""
    words = [str(argument) for argument in arguments]
    print("fastenc", shlex.join(words), flush=True)
    used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    before = used()
    subprocess.run([sys.executable, "-m", "fastenc", *words], check=True)
    return used() - before


def trained(cases: dict, case: str, output: Path, *arguments: object) -> dict:
    """The row of a training with its CPU seconds; the stored one if the folder is complete."""
    row = cases.get(case, {}).get("fastenc", {})
    if not (row and (output / "config.json").exists()):
        row = {"cpu_seconds": execute(*arguments, "-o", output, "--overwrite")}
    return row


def baselines(task: str, train: TextToTextData, test: TextToTextData) -> dict[str, dict]:
    if task == "STS-B":
        shares = [overlap(source) for source in test.sources]
        return {"shared words": regression_metrics(shares, numbers_of(test.targets))}
    most = Counter(train.targets).most_common(1)[0][0]
    counts = CountVectorizer(ngram_range=(1, 2), token_pattern=r"\S+")
    model = MultinomialNB().fit(counts.fit_transform(train.sources), train.targets)
    guesses = model.predict(counts.transform(test.sources))
    right = lambda guessed: {
        "exact_match": sum(map(str.__eq__, map(str, guessed), test.targets)) / len(test)
    }
    return {"the frequent label": right([most] * len(test)), "naive Bayes": right(guesses)}


def overlap(source: str) -> float:
    """Of the words in "sentence1: a sentence2: b", the share that both have."""
    first, _, second = source.removeprefix("sentence1: ").partition(" sentence2: ")
    one, other = ({*text.lower().split()} for text in (first, second))
    return len(one & other) / max(1, len(one | other))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("build/text_to_text"))
    folder = parser.parse_args().folder
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    data = Path(os.environ["FASTENC_DATA"])
    folder.mkdir(parents=True, exist_ok=True)
    files, cases = tables(data, folder), read_cases(RESULT)
    start = folder / PRETRAINED
    texts = folder / "wikipedia.txt"
    articles = islice(iterate_texts(data / "wikipedia_en" / "train.txt.gz"), ARTICLES)
    texts.write_text("\n\n".join(articles))
    row = trained(cases, "pretraining", start, "pretrain", texts, *shlex.split(PRETRAINING))
    row["parameters"] = sum(p.numel() for p in Seq2Seq.from_pretrained(start).parameters())
    cases["pretraining"] = {"fastenc": row}
    write(RESULT, cases)
    for task, options in OF_TASKS.items():
        output, tables_of = folder / task.lower(), files[task]
        command = ("finetune", start, tables_of["train"], "--dev", tables_of["dev"])
        given = (*shlex.split(FINE_TUNING), *shlex.split(options))
        row = trained(cases, f"{task}, test", output, *command, *given)
        names = shlex.split(options)
        columns = [names[i + 1] for i, name in enumerate(names) if name == "--source"]
        target = names[names.index("--target") + 1]
        read = lambda split, of=tables_of, c=columns, t=target: read_text_to_text(of[split], c, t)
        for split in SPLITS:
            scores = folder / f"{task.lower()}-{split}.json"
            execute("evaluate", output, tables_of[split], "-o", scores)
            cases[f"{task}, {split}"] = {
                "fastenc": row | json.loads(scores.read_text()),
                **baselines(task, read("train"), read(split)),
            }
        write(RESULT, cases)


if __name__ == "__main__":
    main()
