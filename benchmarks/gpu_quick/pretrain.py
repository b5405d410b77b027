"""One pretraining run on real text, as users start it: tokens a second and the loss."""

import json
import os
import random
import shutil
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks._cases import Case
from benchmarks._device import ON_GPU
from benchmarks.gpu_quick.problems import Size
from fastenc._base.files import write_text_atomically

LIMIT = 120
SOURCE = "FASTENC_VISIT_TEXT"  # a file of texts, instead of the installed packages' docstrings
MODEL = ["--layers", "12", "--hidden", "768", "--heads", "12", "--precision", "bf16"]
RUN = [*MODEL, "--batch-tokens", "65536", "--max-steps", "150", "--eval-every", "150"]
SMALL = ["--layers", "1", "--hidden", "64", "--vocab-size", "300", "--batch-tokens", "256"]
SMALL_RUN = [*SMALL, "--max-steps", "2", "--eval-every", "2", "--block-size", "64"]
CHARACTERS = 8_000_000 if ON_GPU else 30_000
FOLDER = Path(os.environ.get("FASTENC_VISIT_FOLDER", "build/visit"))


def cases(size: Size) -> Iterator[Case]:
    options = RUN if ON_GPU else SMALL_RUN
    yield " ".join(["fastenc pretrain", *options]), partial(pretrain, options)


def texts(path: Path) -> Path:
    """A file with a document in each paragraph: the file that the environment names, or docstrings (half a minute to
    read)."""
    if named := os.environ.get(SOURCE):
        return Path(named)
    if not path.is_file():
        from fastenc.demo.corpus import docstrings

        path.parent.mkdir(parents=True, exist_ok=True)
        passages, count = [], 0
        folders = [sysconfig.get_path(name) for name in ("stdlib", "purelib")]
        for document in (d for folder in folders for d in docstrings(Path(folder), 20_000)):
            passages.append(" ".join(document.text.split()))
            count += len(passages[-1])
            if count > CHARACTERS:
                break
        random.Random(0).shuffle(passages)
        text = "\n\n".join(dict.fromkeys(passages)) + "\n"
        write_text_atomically(path, text)
    return path


def pretrain(options: list[str]) -> dict:
    from fastenc.cli import main

    source, output = texts(FOLDER / "texts.txt"), FOLDER / "pretrained"
    shutil.rmtree(output, ignore_errors=True)
    start = time.perf_counter()
    try:
        main(["pretrain", str(source), "-o", str(output), *options])
    except SystemExit as error:
        raise RuntimeError(f"fastenc pretrain ended with code {error.code}") from error
    seconds = time.perf_counter() - start
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    shutil.rmtree(output, ignore_errors=True)
    rates = sorted(line["tokens_per_s"] for line in lines if "tokens_per_s" in line)
    row = {"text": source.name, "characters": source.stat().st_size, "seconds": seconds}
    row |= {"tokens_per_s": rates[len(rates) // 2], "log": lines}
    print(f"  {row['tokens_per_s']:,.0f} tokens/s in the median; {seconds:.0f} s with everything")
    return row
