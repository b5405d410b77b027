"""The files that the commands of the documents name, small, so that a reader can copy these commands.

The texts are made of templates and the same in every call. They show the formats; nothing can be learnt from them about
a language.
"""

import gzip
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from fastenc._base.files import write_atomically

SUBJECTS = (
    "the teacher,a farmer,the old sailor,my sister,the mayor,a young doctor,the baker,our guest"
)
VERBS = "saw,described,remembered,praised,painted,looked for,wrote about,forgot"
OBJECTS = (
    "the river,a long letter,the town,an old film,the new bridge,a text,the harvest,the garden"
)
PLACES = (
    "near the market,in the evening,after the storm,behind the mill,before winter,at the station"
)
ENGLISH = (SUBJECTS, VERBS, OBJECTS, PLACES)
WORKS = "film,book,play,song,concert,story"
GOOD = "a delight from start to end,warm and clever,the best of the year,a joy to follow,moving and well made"
BAD = "dull and far too long,a waste of an evening,clumsy and cold,the worst of the year,empty and loud"
SHORE = (
    "the bank of the river was green",
    "they sat on the bank and fished",
    "a boat lay at the bank of the lake",
    "the bank was wet after the flood",
)
MONEY = (
    "the bank lends money to the farmer",
    "my sister works in a bank in town",
    "the bank raised its rates in winter",
    "a bank paid for the new bridge",
)
# Maltese, with subjects and verbs of one gender.
MALTESE = (
    "Ir-raġel,It-tifel,L-għalliem,Il-kelb,Il-qattus,Il-bidwi",
    "isib,ifittex,jixtieq,jiftakar",
    "il-ktieb,il-ħobż,id-dar,il-baħar,ix-xemx,it-triq",
    "fil-belt,fil-ġnien,fid-dar,illum,dalgħodu,wara l-maltempata",
)


def sample_files() -> dict[str, bytes]:
    """{path in the folder: content} of all files."""
    rng = Random(0)
    text = "\n\n".join("\n".join(_sentence(rng, ENGLISH) for _ in range(12)) for _ in range(40))
    maltese = "\n\n".join("\n".join(_sentence(rng, MALTESE) for _ in range(12)) for _ in range(40))
    senses = [
        ("bank", str(sentence.split().index("bank")), sense, sentence)
        for pair in zip(SHORE, MONEY, strict=True)
        for sense, sentence in zip(("shore", "money"), pair, strict=True)
    ]
    pairs = [_pair(rng) for _ in range(24)]
    scored = _table(("sentence1", "sentence2", "score"), pairs)
    sense_table = _table(("word", "index", "sense", "sentence"), senses)
    lines = [_sentence(rng, ENGLISH) for _ in range(24)]
    lines += ["A short text.", "And a much longer text about the river bank and the town."]
    lines += [f"{sentence.capitalize()}." for _, _, _, sentence in senses]
    files: dict[str, str | bytes] = {
        "wiki.txt.gz": gzip.compress(text.encode(), mtime=0),
        "en/texts.txt": text,
        "mt/texts.txt": maltese,
        "texts.txt": "\n".join(lines) + "\n",
        "new.tsv": _table(("sentence",), [(review,) for review, _ in _reviews(rng, 16)]),
        "pairs.tsv": _table(("sentence1", "sentence2"), [pair[:2] for pair in pairs]),
        "stsb.tsv": scored,
        "senses.tsv": sense_table,
        "data/stsb.tsv": scored,
        "data/senses.tsv": sense_table,
        "reviews.tsv": _table(("sentence", "label"), _reviews(rng, 16, length=18)),
        "german.conll": _columns(rng, nested=True),
        "train.conll": _columns(rng),
        "dev.conll": _columns(rng),
    }
    for name, number in (("train", 48), ("dev", 16), ("test", 16)):
        files[f"{name}.tsv"] = _table(("sentence", "label"), _reviews(rng, number))
    files["ranking.jsonl"] = "".join(json.dumps(_candidates(rng)) + "\n" for _ in range(24))
    files["questions.jsonl"] = "".join(json.dumps(_question(rng, i)) + "\n" for i in range(16))
    return {
        name: content if isinstance(content, bytes) else content.encode()
        for name, content in files.items()
    }


def write_samples(folder: str | Path, *, overwrite: bool = False) -> list[Path]:
    """Write :func:`sample_files` into a folder. A file with the same content stays as it is.

    Returns: the paths of all files.
    Raises: ValueError for a file with another content, unless ``overwrite`` is True, before any file is written.
    """
    folder, files = Path(folder), sample_files()
    for name, content in files.items():
        path = folder / name
        if not overwrite and path.exists() and (path.is_dir() or path.read_bytes() != content):
            raise ValueError(
                f"{path} exists with another content: give another folder, or replace it with overwrite=True"
            )
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, partial(_write, content))
    return [folder / name for name in files]


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _sentence(rng: Random, parts: Sequence[str]) -> str:
    words = " ".join(rng.choice(part.split(",")) for part in parts)
    return f"{words[0].upper()}{words[1:]}."


def _reviews(rng: Random, number: int, length: int = 1) -> list[tuple[str, str]]:
    """(review, label) of each; ``length``: number of sentences."""
    names = []
    for i in range(number):
        label, opinions = (("negative", BAD), ("positive", GOOD))[i % 2]
        sentences = [
            f"The {rng.choice(WORKS.split(','))} was {rng.choice(opinions.split(','))}."
            for _ in range(length)
        ]
        names.append((" ".join(sentences), label))
    return names


def _pair(rng: Random) -> tuple[str, str, str]:
    """Two sentences, and how many of their four parts are the same, from 0 to 5."""
    one = [rng.choice(part.split(",")) for part in ENGLISH]
    same = rng.randrange(5)
    other = [
        word if i < same else rng.choice([each for each in part.split(",") if each != word])
        for i, (word, part) in enumerate(zip(one, ENGLISH, strict=True))
    ]
    return " ".join(one), " ".join(other), str(5 * same / 4)


def _candidates(rng: Random) -> dict[str, object]:
    """A query, and four sentences of which one has its subject and verb."""
    parts = [part.split(",") for part in ENGLISH]
    subject, verb = rng.choice(parts[0]), rng.choice(parts[1])
    rest = lambda: f"{rng.choice(parts[2])} {rng.choice(parts[3])}"
    others = [name for name in parts[0] if name != subject]
    documents = [f"{subject} {verb} {rest()}"]
    documents += [f"{rng.choice(others)} {rng.choice(parts[1])} {rest()}" for _ in range(3)]
    return {
        "query": f"what {subject} {verb}",
        "document": documents,
        "label": [1] + [0] * (len(documents) - 1),
    }


def _question(rng: Random, number: int) -> dict[str, object]:
    """A sentence with a question for its object."""
    subject, verb, answer, place = (rng.choice(part.split(",")) for part in ENGLISH)
    return {
        "id": str(number),
        "question": f"what {subject} {verb}",
        "context": f"{subject} {verb} {answer} {place}",
        "answers": {"text": [answer], "answer_start": [len(f"{subject} {verb} ")]},
    }


def _columns(rng: Random, nested: bool = False) -> str:
    """Sentences with a word on each line, its tag and, if ``nested``, the tag of an entity inside another one."""
    return "\n".join(_tagged(rng, nested) for _ in range(16))


def _tagged(rng: Random, nested: bool) -> str:
    city = rng.choice(("Berlin", "Malta", "Lima", "Oslo"))
    rows = (
        (rng.choice(("Ada", "Emmy", "Alan", "Grace")), "B-PER", "O"),
        (rng.choice(("left", "praised", "joined", "visited")), "O", "O"),
        (city, "B-ORG", "B-LOC"),
        ("University", "I-ORG", "O"),
    )
    return "".join(
        f"{word} {outer} {inner}\n" if nested else f"{word} {outer}\n"
        for word, outer, inner in rows
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join("\t".join(row) + "\n" for row in (header, *rows))
