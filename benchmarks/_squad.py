"""Questions and paragraphs of SQuAD, for benchmarks of retrieval."""

import gzip
import json
import os
from pathlib import Path
from random import Random


def questions_and_paragraphs(count: int) -> list[tuple[str, str]]:
    """A question of each paragraph, in an order that is random and always the same. FASTENC_DATA names the folder."""
    path = Path(os.environ["FASTENC_DATA"]) / "squad_v1.1_dev" / "train_articles.json.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        articles = json.load(file)["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    Random(0).shuffle(paragraphs)
    return [(each["qas"][0]["question"].strip(), each["context"]) for each in paragraphs[:count]]
