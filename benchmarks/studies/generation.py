"""Tokens per second of generate: fastenc's Seq2Seq, transformers, and transformers patched by fastenc, in float32;
Seq2Seq frozen, in float32 and in 8 bits.

A T5 v1.1 of 6 + 6 layers of width 512, and a Marian of OPUS-MT's size, with random weights. Sources of 24 to 64 tokens;
greedy search and 4 beams for 1 source and for 16. Before anything is timed, float32 must give the tokens of
transformers. The logits in 8 bits of these tokens may differ by a tenth of the norm of the exact logits.

    python -m benchmarks.studies.generation [threads]
"""

import copy
import sys
from functools import partial

import torch

import fastenc
from benchmarks._compare import compare
from benchmarks._results import read_cases, write
from benchmarks._t5 import VOCABULARY, fastencs, hugging_face, mask_of, padded
from fastenc.models import Seq2Seq
from fastenc.packing import PackedBatch, pack_sequences, pack_targets

RESULT, NEW_TOKENS = "generation", 24
IN_8_BITS = "fastenc, int8"
MOST_ERROR = 0.1  # of its logits


def opus_mt():
    """A Marian of the size of most of OPUS-MT's."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    sizes = {"layers": 6, "attention_heads": 8, "ffn_dim": 2048}
    of_both = {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in sizes.items()}
    config = MarianConfig(d_model=512, activation_function="swish", scale_embedding=True, **of_both)
    return MarianMTModel(config)


def tokens_of(rows: torch.Tensor, end: int) -> list[list[int]]:
    """transformers' targets without the start token and without what follows the end token."""
    targets = [row[1:] for row in rows.tolist()]
    return [row[: row.index(end) + 1] if end in row else row for row in targets]


def logits_error(in_8_bits: Seq2Seq, exact: Seq2Seq, batch: PackedBatch, targets: list) -> float:
    """|logits in 8 bits - exact logits| / |exact logits| for the same targets."""
    target, _ = pack_targets(targets, exact.decoder_start_token_id)
    in_8_bits, exact = (model(batch, target).logits for model in (in_8_bits, exact))
    return float((in_8_bits - exact).norm() / exact.norm())


def wrong(expected: list, logits_error: float, provider: str, tokens: list) -> str | None:
    """What is wrong with a provider's tokens, or in 8 bits with its logits; None: nothing."""
    if provider == IN_8_BITS:
        return None if logits_error < MOST_ERROR else f"logits that differ by {logits_error:.3f}"
    return None if tokens == expected else "other tokens than transformers'"


def main() -> None:
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.set_num_threads(threads)
    measure("", hugging_face(layers=6, heads=8).eval(), threads)
    measure("OPUS-MT, ", opus_mt().eval(), threads)


@torch.inference_mode()
def measure(prefix: str, theirs, threads: int) -> None:
    ours, frozen, in_8_bits = (fastencs(theirs) for _ in range(3))
    fastenc.freeze(frozen)
    fastenc.freeze(in_8_bits, dtype="int8")
    patched = fastenc.patch(copy.deepcopy(theirs))
    draw = torch.Generator().manual_seed(0)
    for count in (1, 16):
        lengths = torch.randint(24, 65, (count,), generator=draw).tolist()
        sources = [torch.randint(5, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]
        batch = {"input_ids": padded(sources), "attention_mask": mask_of(sources)}
        packed = pack_sequences(sources)
        for beams in (1, 4):
            options = {"max_new_tokens": NEW_TOKENS, "num_beams": beams}
            theirs_of = lambda model, options=options, batch=batch: tokens_of(
                model.generate(**batch, **options, do_sample=False), theirs.config.eos_token_id
            )
            ours_of = lambda model, options=options, packed=packed: model.generate_ids(
                packed, **options
            )
            expected = theirs_of(theirs)
            made = sum(map(len, expected))
            error = logits_error(in_8_bits, ours, packed, expected)
            rows = compare(
                {
                    "transformers": partial(theirs_of, theirs),
                    "transformers, patched": partial(theirs_of, patched),
                    "fastenc": partial(ours_of, ours),
                    "fastenc, frozen": partial(ours_of, frozen),
                    IN_8_BITS: partial(ours_of, in_8_bits),
                },
                baseline="transformers",
                check=partial(wrong, expected, error),
                seconds=4,
                min_rounds=3,
            )
            for row in rows.values():
                if "median_ms" in row:
                    row["tokens_per_s"] = made / row["median_ms"] * 1e3
            rows[IN_8_BITS]["logits_error"] = error
            name = f"{prefix}sources={count} beams={beams} threads={threads}"
            write(RESULT, read_cases(RESULT) | {name: rows})


if __name__ == "__main__":
    main()
