"""Word vectors of 20,000 sentences from MiniLM's last four layers, and the cost of head statistics in a forward.

python -m benchmarks.studies.word_vectors [sentences] [vectors] [heads]    (needs FASTENC_DATA; minutes)

The sentences are those of UD English EWT, then of SemCor. Peer: transformers with output_hidden_states on batches of 32
sorted by length; the mean of four layers, and of a word's tokens by index_add. Both sides tokenise. The sentences go in
ten slices through each side by turns, in one process. transformers, which takes several times as long, reads only the
first three slices. Times are sums over the slices that a side reads; the ratio is the median over the slices that both
read. CPU time stands beside elapsed time, because other work on the machine hardly changes it. Stored results of other
cases are kept.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks._results import read_cases, write
from fastenc.analysis import read_trees, visit_heads
from fastenc.data.senses import read_senses
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder
from fastenc.models.embedding.word_vectors import LAYERS
from fastenc.packing import pack_sequences

SLICES, PEER_SLICES, BATCH = 10, 3, 32


def sentences(count: int) -> list[list[str]]:
    data = Path(os.environ["FASTENC_DATA"])
    word_lists: list[list[str]] = []
    for name in ("train", "dev", "test"):
        trees = read_trees(data / "ud_english_ewt" / f"{name}.conllu.gz")
        word_lists += [tree.words for tree in trees]
    if len(word_lists) < count:
        word_lists += read_senses(data / "wsd_allwords" / "semcor_all_words.tsv.gz").sentences
    return word_lists[:count]


class Transformers:
    """Word vectors as users of transformers compute them."""

    def __init__(self) -> None:
        import transformers

        transformers.logging.disable_progress_bar()
        self.model = transformers.AutoModel.from_pretrained(minilm_folder()).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())

    @torch.inference_mode()
    def __call__(self, texts: Sequence[list[str]]) -> torch.Tensor:
        options = {"is_split_into_words": True, "truncation": True, "max_length": 512}
        encoded = self.tokenizer(list(texts), **options)
        order = sorted(range(len(texts)), key=lambda i: len(encoded["input_ids"][i]), reverse=True)
        vectors: list = [None] * len(texts)
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            rows = {"input_ids": [encoded["input_ids"][i] for i in chosen]}
            padded = self.tokenizer.pad(rows, return_tensors="pt")
            states = self.model(**padded, output_hidden_states=True).hidden_states
            mean = torch.stack([states[layer] for layer in LAYERS]).mean(0)
            for row, i in enumerate(chosen):
                words = [-1 if word is None else word for word in encoded.word_ids(i)]
                word_of_token = torch.tensor(words)
                inside = word_of_token >= 0
                sums = torch.zeros(len(texts[i]), mean.shape[2])
                sums.index_add_(0, word_of_token[inside], mean[row, : len(words)][inside])
                vectors[i] = sums / word_of_token[inside].bincount(minlength=len(texts[i]))[:, None]
        return torch.cat(vectors)


def compare(
    sides: dict[str, Callable], slices: Sequence, first_slices: int = SLICES
) -> dict[str, dict]:
    """{name: {sentences, seconds, cpu_seconds, ratios}}. The ratio divides the first side's time by each side's; it is
    the median over the slices that the first side reads, ``first_slices`` of them."""
    for embed in sides.values():
        embed(slices[0][:64])
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    first = next(iter(sides))
    for number, texts in enumerate(slices):
        for name, embed in sides.items():
            if name == first and number >= first_slices:
                continue
            begin = time.perf_counter(), time.process_time()
            embed(texts)
            seconds[name].append(time.perf_counter() - begin[0])
            cpu[name].append(time.process_time() - begin[1])
    ratio = lambda times, name: statistics.median(
        a / b for a, b in zip(times[first], times[name], strict=False)
    )
    return {
        name: {
            "sentences": sum(map(len, slices[: len(seconds[name])])),
            "seconds": sum(seconds[name]),
            "cpu_seconds": sum(cpu[name]),
            "times_as_fast": ratio(seconds, name),
            "times_as_fast_cpu": ratio(cpu, name),
        }
        for name in sides
    }


def main() -> None:
    threads = int(os.environ.get("OMP_NUM_THREADS", 2))
    noun = "thread" if threads == 1 else "threads"
    torch.set_num_threads(threads)
    count = next((int(argument) for argument in sys.argv[1:] if argument.isdigit()), 20_000)
    wanted = [argument for argument in sys.argv[1:] if not argument.isdigit()]
    chosen = sentences(count)
    slices = [chosen[i::SLICES] for i in range(SLICES)]
    encoder = Encoder.from_pretrained(minilm_folder())
    cases = read_cases("word_vectors")
    if not wanted or "vectors" in wanted:
        peer = Transformers()
        ours = lambda texts: encoder.embed_words(texts, show_progress=False).vectors
        difference = (ours(slices[0][:200]) - peer(slices[0][:200])).abs().max().item()
        if not difference < 1e-4:
            raise SystemExit(f"the word vectors differ by {difference}")
        name = f"word vectors of {count:,} sentences, last four layers, {threads} {noun}"
        cases[name] = compare({"transformers": peer, "fastenc": ours}, slices, PEER_SLICES)
    if not wanted or "heads" in wanted:
        cases[f"heads of {count:,} sentences, {threads} {noun}"] = compare(heads(encoder), slices)
    write("word_vectors", cases)


def heads(encoder: Encoder) -> dict[str, Callable]:
    """A forward without head statistics, and one with the statistics of every head."""

    def run(texts: Sequence[list[str]], look: Callable) -> None:
        encoded = encoder.tokenizer.encode_batch(texts, is_pretokenized=True)
        ids = sorted((e.ids[: encoder.positions] for e in encoded), key=len, reverse=True)
        with torch.inference_mode():
            for start in range(0, len(ids), BATCH):
                look(pack_sequences(ids[start : start + BATCH]))

    every = lambda batch: visit_heads(encoder, batch, lambda layer, head_statistics: None)
    return {
        "fastenc, forward": lambda texts: run(texts, encoder),
        "fastenc, forward and statistics of heads": lambda texts: run(texts, every),
    }


if __name__ == "__main__":
    main()
