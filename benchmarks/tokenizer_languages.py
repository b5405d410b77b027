"""Tokens per word by language, of tokenizers trained with the corpus's own shares and with smoothed ones.

python -m benchmarks.tokenizer_languages    (needs FASTENC_DATA; a few minutes)

32 languages of very different sizes share one vocabulary. The lines it is learnt from are drawn with alpha = 1 (as the
texts are) and alpha = 0.3; the counts are of each language's held-out lines. A vocabulary is small on purpose:
languages compete for it.
"""

import json
import os
from dataclasses import fields
from pathlib import Path

from benchmarks._harness import write
from fastenc.data import measure_fertility, read_texts, sample_lines, train_tokenizer
from fastenc.data.fertility import Fertility, plot_fertility

VOCABULARY, SMALLEST = 16000, 5
KINDS = ("wordpiece", "bpe", "unigram")


def main() -> None:
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    folder = Path(os.environ["FASTENC_DATA"]) / "multilingual_text"
    languages = sorted(path.name.split(".")[0] for path in folder.glob("*.train.txt.gz"))
    texts = lambda part: {name: read_texts(folder / f"{name}.{part}.txt.gz") for name in languages}
    train, held_out = texts("train"), texts("valid")
    size = {name: sum(map(len, own)) for name, own in train.items()}
    languages.sort(key=size.__getitem__)
    cases: dict = {}
    for kind in KINDS:
        results: dict[str, dict[str, Fertility]] = {}
        for alpha in (1.0, 0.3):
            lines = [line for own in sample_lines(train, alpha=alpha).values() for line in own]
            tokenizer = train_tokenizer(lines, kind=kind, vocab_size=VOCABULARY, lowercase=False)
            results[f"alpha {alpha:g}"] = {
                name: measure_fertility(tokenizer, held_out[name]) for name in languages
            }
        cases[kind] = {
            name: {language: counts.as_json() for language, counts in own.items()}
            for name, own in results.items()
        }
    cases["characters"] = {"train": {name: size[name] for name in languages}}
    draw(write("tokenizer_languages", cases))


def draw(path: Path) -> None:
    """A picture for each kind of tokenizer, of the results' JSON alone."""
    names = [field.name for field in fields(Fertility)]
    for kind, rows in json.loads(path.read_text())["cases"].items():
        if kind in KINDS:
            results = {
                name: {
                    language: Fertility(**{field: counts[field] for field in names})
                    for language, counts in own.items()
                }
                for name, own in rows.items()
            }
            plot_fertility(results, path.with_name(f"{path.stem}_{kind}.png"))


if __name__ == "__main__":
    main()
