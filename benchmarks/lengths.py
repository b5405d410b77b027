"""Real lengths: how many texts of four data sets have how many tokens, in lengths.json.

FASTENC_DATA=... python -m benchmarks.lengths    makes the file anew

Tokens of BERT's lower-cased WordPiece vocabulary with special tokens, cut at 512. Only the counts are stored, so the
benchmarks need no data. Sources: SST-2 (Socher et al. 2013), training phrases; SNLI (Bowman et al. 2015), a sample of
1,666 training pairs; WNUT-17 (Derczynski et al. 2017), training sentences; English Wikipedia, paragraphs.
"""

import gzip
import json
import os
import random
from collections import Counter
from itertools import islice
from pathlib import Path

FILE = Path(__file__).with_name("lengths.json")
LONGEST, MOST = 512, 20000


def lengths(name: str, tokens: int) -> list[int]:
    """Lengths with about ``tokens`` tokens together: drawn from a data set's, or all 512 for "full"; always the
    same."""
    if name == "full 512":
        return [LONGEST] * max(1, tokens // LONGEST)
    counts = {int(n): c for n, c in json.loads(FILE.read_text())[name].items()}
    draw = random.Random(0)
    drawn: list[int] = []
    while sum(drawn) < tokens:
        drawn += draw.choices(list(counts), list(counts.values()))
    return drawn


NAMES = ("SST-2", "SNLI", "WNUT-17", "Wikipedia", "full 512")


def texts(folder: Path) -> dict[str, list]:
    """The first texts of each data set."""
    read = lambda path: gzip.decompress((folder / path).read_bytes()).decode().splitlines()
    table = lambda path: [line.split("\t") for line in read(path)]
    sst2, snli = table("sst2/train.tsv.gz"), table("snli_cad/original_train.tsv.gz")
    sentence = sst2[0].index("sentence")
    first = snli[0].index("sentence1")
    second = snli[0].index("sentence2")
    words = "\n".join(read("wnut17/train.conll.gz")).split("\n\n")
    paragraphs = (line for line in read("wikipedia_en/train.txt.gz") if len(line.split()) > 5)
    return {
        "SST-2": [row[sentence] for row in sst2[1 : MOST + 1]],
        "SNLI": [(row[first], row[second]) for row in snli[1 : MOST + 1]],
        "WNUT-17": [
            " ".join(line.split("\t")[0] for line in sentence.splitlines())
            for sentence in words[:MOST]
        ],
        "Wikipedia": list(islice(paragraphs, MOST)),
    }


def main() -> None:
    from tokenizers import Tokenizer

    from fastenc.demo.checkpoint import minilm_folder

    tokenizer = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    histograms = {}
    for name, chosen in texts(Path(os.environ["FASTENC_DATA"])).items():
        sizes = (min(len(e.ids), LONGEST) for e in tokenizer.encode_batch(chosen))
        histograms[name] = dict(sorted(Counter(sizes).items()))
    FILE.write_text(json.dumps(histograms) + "\n")
    for name, counts in histograms.items():
        total = sum(counts.values())
        print(f"{name}: {total} texts, mean {sum(n * c for n, c in counts.items()) / total:.1f}")


if __name__ == "__main__":
    main()
