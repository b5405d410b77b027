"""Forward and backward of a small T5 (v1.1, 4 + 4 layers of width 512) on a CPU: fastenc and transformers in float32.

"real lengths": 16 pairs whose lengths follow log-normal distributions, padded by transformers to the longest; "equal
lengths": 16 pairs of 64 and 32 tokens, without padding. Both models have the same weights and dropout 0.1. Before
anything is timed, the losses without dropout must agree.

    python -m benchmarks.studies.seq2seq_step [threads]
"""

import random
import sys

import torch

from benchmarks._harness import compare, read_cases, write
from benchmarks.studies._t5 import VOCABULARY, fastencs, hugging_face, mask_of, padded
from fastenc.packing import pack_sequences, pack_targets

RESULT, PAIRS = "seq2seq_step", 16


def real_lengths() -> list[tuple[int, int]]:
    generator = random.Random(0)
    draw = lambda mean, spread, most: min(most, int(generator.lognormvariate(mean, spread)) + 3)
    return [(draw(3.7, 0.8, 256), draw(2.5, 0.6, 64)) for _ in range(PAIRS)]


def batches(lengths: list[tuple[int, int]]):
    """(transformers' arguments, ours) for pairs of random tokens."""
    draw = lambda length: [*torch.randint(5, VOCABULARY - 5, (length - 1,)).tolist(), 1]
    pairs = [(draw(source), draw(target)) for source, target in lengths]
    sources, targets = zip(*pairs, strict=True)
    arguments = {
        "input_ids": padded(sources),
        "attention_mask": mask_of(sources),
        "labels": padded(targets, -100),
    }
    return arguments, (pack_sequences(sources), *pack_targets(targets, 0))


def main() -> None:
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.set_num_threads(threads)
    theirs = hugging_face(layers=4, heads=6)
    ours = fastencs(theirs)
    for name, lengths in {
        "real lengths": real_lengths(),
        "equal lengths": [(64, 32)] * PAIRS,
    }.items():
        arguments, packed = batches(lengths)
        with torch.no_grad():
            losses = [theirs.eval()(**arguments).loss.item(), ours.eval()(*packed).loss.item()]
        if abs(losses[0] - losses[1]) > 1e-4:
            raise SystemExit(f"the losses differ, nothing was timed: {losses}")
        theirs.train()
        ours.train()

        def step(model, arguments, named):
            model.zero_grad(set_to_none=True)
            (model(**arguments) if named else model(*arguments)).loss.backward()

        rows = compare(
            {
                "transformers": lambda a=arguments: step(theirs, a, True),
                "fastenc": lambda a=packed: step(ours, a, False),
            },
            baseline="transformers",
            seconds=15,
        )
        write(RESULT, read_cases(RESULT) | {f"{name}, threads={threads}": rows})


if __name__ == "__main__":
    main()
