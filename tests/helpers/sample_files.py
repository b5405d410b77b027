"""The files that the commands of the documents name, small."""

import gzip
from pathlib import Path
from random import Random

WORDS = "the a river bank film book town people story good dull fine long said saw made new old day"


def write_sample_files(folder: Path) -> None:
    rng = Random(0)
    sentence = lambda words=9: " ".join(rng.choices(WORDS.split(), k=words)).capitalize() + "."
    document = lambda: "\n".join(sentence() for _ in range(12))
    text = "\n\n".join(document() for _ in range(40))
    with gzip.open(folder / "wiki.txt.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    for language in ("en", "mt"):
        (folder / language).mkdir()
        (folder / language / "texts.txt").write_text(text, encoding="utf-8")
    (folder / "texts.txt").write_text("A short text.\nAnd a much longer one.\n", encoding="utf-8")
    table = lambda name, header, rows: (folder / name).write_text(
        "\n".join("\t".join(row) for row in (header, *rows)) + "\n", encoding="utf-8"
    )
    labelled = [(sentence(), ("negative", "positive")[i % 2]) for i in range(16)]
    for name in ("train.tsv", "dev.tsv", "test.tsv"):
        table(name, ("sentence", "label"), labelled)
    table("new.tsv", ("sentence",), [(text,) for text, _ in labelled])
    table("reviews.tsv", ("sentence", "label"), [(sentence(150), label) for _, label in labelled])
    pairs = [(sentence(), sentence()) for _ in range(16)]
    table("pairs.tsv", ("sentence1", "sentence2"), pairs)
    scored = [(*pair, str(i / 16)) for i, pair in enumerate(pairs)]
    table("stsb.tsv", ("sentence1", "sentence2", "score"), scored)
    (folder / "data").mkdir()
    table("data/stsb.tsv", ("sentence1", "sentence2", "score"), scored)
    uses = [("bank", "1", "shore", "the bank of the river"), ("bank", "1", "money", "a bank lends")]
    table("senses.tsv", ("word", "index", "sense", "sentence"), uses * 4)
    tagged = "Ada B-PER O\nmet O O\nBerlin B-ORG B-LOC\nUniversity I-ORG O\n\n" * 8
    (folder / "german.conll").write_text(tagged, encoding="utf-8")
    for name in ("train.conll", "dev.conll"):
        (folder / name).write_text(
            tagged.replace(" O\n", "\n").replace(" B-LOC\n", "\n"), encoding="utf-8"
        )
