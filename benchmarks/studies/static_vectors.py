"""Static vectors compared with MiniLM's vectors of single words: similarity of words, and Google's analogies.

python -m benchmarks.studies.static_vectors QUESTIONS    (needs FASTENC_DATA and fastenc[static]; minutes)

QUESTIONS: word2vec's questions-words.txt; gensim's package has it in test/test_data. word2vec: gensim's skip-gram on
wikipedia_en (4.9 million words), 200 dimensions, window 5, 5 negative samples, 3 epochs, words that occur at least 5
times. distilled: MiniLM's static model (fastenc.analysis.distill_static) on the same words. Every row has the items
whose words word2vec knows; the candidates of an analogy are the words of all questions.
"""

import gzip
import os
import re
import sys
from pathlib import Path

import torch

from benchmarks._results import write
from fastenc.analysis import (
    StaticComparison,
    StaticVectors,
    compare_analogies,
    compare_pairs,
    distill_static,
    read_analogies,
    read_scored_pairs,
    train_word2vec,
)
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder

SETTINGS = {"vector_size": 200, "window": 5, "min_count": 5, "sg": 1, "negative": 5, "epochs": 3}


def main() -> None:
    data = Path(os.environ["FASTENC_DATA"])
    with gzip.open(data / "wikipedia_en" / "train.txt.gz", "rt", encoding="utf-8") as file:
        lines = [line for line in file if len(line) > 20]
    encoder = Encoder.from_pretrained(minilm_folder())
    words = [re.findall(r"\w+", line.lower()) for line in lines]
    word2vec = train_word2vec(words, workers=1, seed=0, **SETTINGS)
    static = distill_static(encoder, lines[:20_000])
    distilled = StaticVectors.of(word2vec.words, torch.as_tensor(static.encode(word2vec.words)))
    sections = read_analogies(sys.argv[1])
    cases: dict = {}
    for path in sorted((data / "word_similarity").glob("*.tsv.gz")):
        pairs = read_scored_pairs(path)
        compared = [compare_pairs(encoder, vectors, pairs) for vectors in (word2vec, distilled)]
        cases[path.name.split(".")[0]] = row(*compared)
    compared = [compare_analogies(encoder, vectors, sections) for vectors in (word2vec, distilled)]
    for section in compared[0]:
        cases[f"analogies, {section}"] = row(*(each[section] for each in compared))
    write("static_vectors", cases)


def row(word2vec: StaticComparison, distilled: StaticComparison) -> dict[str, float]:
    best = max(word2vec.layers)
    return {
        "word2vec": word2vec.static,
        "distilled": distilled.static,
        "MiniLM, last layer": word2vec.layers[-1],
        "MiniLM, best layer": best,
        "best layer": word2vec.layers.index(best),
        "items": word2vec.asked,
        "share of items": word2vec.asked / word2vec.items,
    }


if __name__ == "__main__":
    main()
