"""A million short texts through `fastenc predict`, compared with the encoder alone on texts already tokenised.

python -m benchmarks.studies.predict_throughput [--texts N] [--threads N]    (needs FASTENC_DATA)

The texts are pieces of two to seven words of wikipedia_en; the model is MiniLM with a classifier. CPU time stands
beside elapsed time, because other work on the machine hardly changes it. Probabilities of every thousandth text are
compared with transformers'. Memory is that of the whole process after a twentieth of the texts, and its peak.
"""

import argparse
import gzip
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from benchmarks._process import Stopwatch, isolated
from benchmarks._results import write
from fastenc.data import LabelledData
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import SequenceClassifier
from fastenc.tasks import SequenceClassification
from fastenc.tasks.prediction import PART

SAMPLE = 3 * PART  # the texts of a part are sorted by length together


def pieces(train: Path) -> Iterator[str]:
    draw = random.Random(0)
    with gzip.open(train, "rt", encoding="utf-8") as file:
        for line in file:
            words = line.split()
            while words:
                length = draw.randint(2, 7)
                yield " ".join(words[:length])
                words = words[length:]


def encoder_alone(folder: str, inputs: str, threads: int) -> dict:
    """{"texts_per_second", "texts_per_cpu_second"} of the model's forward on batches made beforehand."""
    torch.set_num_threads(threads)
    task, model = SequenceClassification(), SequenceClassifier.from_pretrained(folder).eval()
    with open(inputs, encoding="utf-8") as file:
        data = LabelledData([line.rstrip("\n") for line in islice(file, SAMPLE)], [], [])
    examples, batches = task.encode(data, model), []
    for first in range(0, len(examples), PART):
        part = sorted(examples[first : first + PART], key=lambda e: len(e.input_ids))
        batches += [task.collate(part[i : i + 32]) for i in range(0, len(part), 32)]
    with torch.inference_mode():
        model(**batches[0])
        with Stopwatch() as watch:
            for batch in batches:
                model(**batch)
    return rates(len(examples), **watch.times)


def rates(texts: int, seconds: float, cpu_seconds: float) -> dict:
    return {
        "texts": texts,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "texts_per_second": texts / seconds,
        "texts_per_cpu_second": texts / cpu_seconds,
    }


def resident(pid: int) -> float:
    """MiB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def predict(folder: str, inputs: Path, output: Path, texts: int, threads: int) -> dict:
    command = [sys.executable, "-m", "fastenc", "predict", folder, str(inputs)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    begin, before, memory = time.perf_counter(), _children_cpu_seconds(), []
    process = subprocess.Popen([*command, "-o", str(output)], env=environment)
    finished = output.with_name(f"{output.name}.part.json")
    early = None
    while process.poll() is None:
        memory.append(resident(process.pid))
        if early is None and _parts(finished) >= texts / PART / 20:
            early = max(memory)
        time.sleep(1)
    if process.returncode:
        raise SystemExit(process.returncode)
    row = rates(texts, time.perf_counter() - begin, _children_cpu_seconds() - before)
    known = {} if early is None else {"early_memory": early}  # a short run may end first
    return row | known | {"peak_memory": max(memory)}


def _children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _parts(finished: Path) -> int:
    try:
        return json.loads(finished.read_text())["parts"]
    except FileNotFoundError:  # not written yet, or already removed
        return 0


def largest_difference(folder: str, inputs: Path, output: Path, texts: int) -> float:
    """Largest difference from transformers' probabilities, over every thousandth text."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    every = slice(0, None, 1000)
    with open(inputs, encoding="utf-8") as file:
        chosen = [line.rstrip("\n") for line in islice(file, *every.indices(texts))]
    with open(output, encoding="utf-8") as file:
        names = next(file).rstrip("\n").split("\t")[1:]
        rows = [line.rstrip("\n").split("\t")[1:] for line in file]
    if len(rows) != texts:
        raise SystemExit(f"{output} has {len(rows):,} predictions for {texts:,} texts")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits for text in chosen]
    expected = torch.cat(logits).softmax(1)
    scores = torch.tensor([[float(value) for value in row] for row in rows[every]])
    assert scores.shape == expected.shape, names
    return (scores - expected).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder, inputs, output = (Path(scratch) / name for name in ("model", "in.txt", "out.tsv"))
        names = ["negative", "positive"]
        task = SequenceClassification()
        task.load(minilm_folder(), LabelledData(["a", "b"], [0, 1], names)).save_pretrained(folder)
        texts = pieces(Path(os.environ["FASTENC_DATA"]) / "wikipedia_en" / "train.txt.gz")
        with open(inputs, "w", encoding="utf-8") as file:
            number = sum(1 for text in islice(texts, options.texts) if file.write(f"{text}\n"))
        alone = (str(folder), str(inputs), options.threads)
        before = isolated(encoder_alone, *alone)
        row = predict(str(folder), inputs, output, number, options.threads)
        after = isolated(encoder_alone, *alone)
        apart = largest_difference(str(folder), inputs, output, number)
        if apart > 1e-4:
            raise SystemExit(f"probabilities differ from transformers' by {apart:.1e}")
    rows = {"encoder alone, before": before, "encoder alone, after": after}
    rows["fastenc predict"] = row | {"largest_difference": apart}
    for name, figures in rows.items():
        print(name, {key: round(value, 6) for key, value in figures.items()})
    if number >= 1_000_000:
        write("predict_throughput", {f"{number:,} texts, {options.threads} threads": rows})


if __name__ == "__main__":
    main()
