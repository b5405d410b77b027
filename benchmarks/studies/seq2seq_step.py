"""Forward and backward of a small T5 (v1.1, 4 + 4 layers of width 512) on a CPU: fastenc and transformers in float32.

"real lengths": 16 pairs whose lengths follow log-normal distributions, padded by transformers to the longest; "equal
lengths": 16 pairs of 64 and 32 tokens, without padding. Both models have the same weights and dropout 0.1. Before
anything is timed, the losses without dropout must agree.

    python -m benchmarks.studies.seq2seq_step [threads]
"""

import random
import sys
import tempfile

import torch

from benchmarks._harness import compare
from fastenc.models import Seq2Seq
from fastenc.packing import pack_sequences, pack_targets

VOCABULARY, PAIRS = 32128, 16


def hugging_face():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=4,
        num_heads=6,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )
    return T5ForConditionalGeneration(config)


def real_lengths() -> list[tuple[int, int]]:
    generator = random.Random(0)
    draw = lambda mean, spread, most: min(most, int(generator.lognormvariate(mean, spread)) + 3)
    return [(draw(3.7, 0.8, 256), draw(2.5, 0.6, 64)) for _ in range(PAIRS)]


def batches(lengths: list[tuple[int, int]]):
    """(transformers' arguments, ours) for pairs of random tokens."""
    draw = lambda length: [*torch.randint(5, VOCABULARY - 5, (length - 1,)).tolist(), 1]
    pairs = [(draw(source), draw(target)) for source, target in lengths]
    pad = lambda rows, value: torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=value
    )
    sources, targets = zip(*pairs, strict=True)
    padded = {
        "input_ids": pad(sources, 0),
        "attention_mask": pad([[1] * len(row) for row in sources], 0),
        "labels": pad(targets, -100),
    }
    return padded, (pack_sequences(sources), *pack_targets(targets, 0))


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    theirs = hugging_face()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = Seq2Seq.from_pretrained(folder)
    for name, lengths in {
        "real lengths": real_lengths(),
        "equal lengths": [(64, 32)] * PAIRS,
    }.items():
        padded, packed = batches(lengths)
        with torch.no_grad():
            losses = [theirs.eval()(**padded).loss.item(), ours.eval()(*packed).loss.item()]
        if abs(losses[0] - losses[1]) > 1e-4:
            raise SystemExit(f"the losses differ, nothing was timed: {losses}")
        theirs.train()
        ours.train()

        def step(model, arguments, named):
            model.zero_grad(set_to_none=True)
            (model(**arguments) if named else model(*arguments)).loss.backward()

        rows = compare(
            {
                "transformers": lambda a=padded: step(theirs, a, True),
                "fastenc": lambda a=packed: step(ours, a, False),
            },
            baseline="transformers",
            seconds=15,
        )
        for provider, row in rows.items():
            print(f"{name}: {provider} {row['median_ms']:.0f} ms, {row['speedup']:.2f}x")


if __name__ == "__main__":
    main()
