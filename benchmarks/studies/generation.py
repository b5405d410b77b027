"""Tokens per second of generate: fastenc's Seq2Seq, transformers, and transformers patched by fastenc, in float32;
Seq2Seq and the patched one frozen, in float32 and in 8 bits; CTranslate2 in both, where it is installed.

A T5 v1.1 of 6 + 6 layers of width 512, and a Marian of OPUS-MT's size, with random weights. Sources of 24 to 64 tokens;
greedy search and 4 beams for 1 source and for 16. Before anything is timed, float32 must give the tokens of
transformers. The log-probabilities of these tokens in 8 bits may differ by a tenth of the norm of the exact ones.

    python -m benchmarks.studies.generation [threads]
"""

import copy
import importlib.util
import sys
from functools import partial

import torch

import fastenc
from benchmarks._compare import compare
from benchmarks._ctranslate2 import CTranslate2
from benchmarks._results import read_cases, write
from benchmarks._t5 import VOCABULARY, fastencs, hugging_face, mask_of, padded
from fastenc.models import Seq2Seq
from fastenc.packing import PackedBatch, pack_sequences, pack_targets

RESULT, NEW_TOKENS = "generation", 24
IN_8_BITS, CTRANSLATE2_IN_8_BITS = "fastenc, int8", "CTranslate2, int8"
PATCHED_IN_8_BITS = "transformers, patched, int8"
MOST_ERROR = 0.1  # of the log-probabilities in 8 bits


def opus_mt():
    """A Marian of the size of most of OPUS-MT's. Its last token is not forced, which CTranslate2 does not do."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    sizes = {"layers": 6, "attention_heads": 8, "ffn_dim": 2048}
    of_both = {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in sizes.items()}
    of_both |= {"d_model": 512, "activation_function": "swish", "forced_eos_token_id": None}
    config = MarianConfig(scale_embedding=True, **of_both)
    return MarianMTModel(config)


def tokens_of(rows: torch.Tensor, end: int) -> list[list[int]]:
    """transformers' targets without the start token and without what follows the end token."""
    targets = [row[1:] for row in rows.tolist()]
    return [row[: row.index(end) + 1] if end in row else row for row in targets]


def log_probabilities(model: Seq2Seq, batch: PackedBatch, targets: list) -> torch.Tensor:
    """The log-probability of each token of the targets."""
    target, labels = pack_targets(targets, model.decoder_start_token_id)
    every = torch.log_softmax(model(batch, target).logits, -1)
    return every.gather(1, labels[:, None])[:, 0]


def patched_log_probabilities(model, batch: dict, targets: list) -> torch.Tensor:
    """The same of a model of transformers."""
    start = model.config.decoder_start_token_id
    ids = padded([[start, *row[:-1]] for row in targets])
    every = torch.log_softmax(model(**batch, decoder_input_ids=ids, use_cache=False).logits, -1)
    return every.gather(2, padded(targets)[..., None])[..., 0][mask_of(targets) > 0]


def wrong(expected: list, errors: dict[str, float], provider: str, tokens: list) -> str | None:
    """What is wrong with a provider's tokens, or in 8 bits with its log-probabilities; None: nothing."""
    if provider in errors:
        error = errors[provider]
        return None if error < MOST_ERROR else f"log-probabilities that differ by {error:.3f}"
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
    patched, frozen_patched, patched_in_8_bits = (
        fastenc.patch(copy.deepcopy(theirs)) for _ in range(3)
    )
    fastenc.freeze(frozen_patched)
    fastenc.freeze(patched_in_8_bits, dtype="int8")
    translators = {}
    if importlib.util.find_spec("ctranslate2"):
        translators["CTranslate2"] = CTranslate2(theirs, "float32", threads)
        translators[CTRANSLATE2_IN_8_BITS] = CTranslate2(theirs, "int8", threads)
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
            exact = log_probabilities(ours, packed, expected)
            scored = {
                IN_8_BITS: log_probabilities(in_8_bits, packed, expected),
                PATCHED_IN_8_BITS: patched_log_probabilities(patched_in_8_bits, batch, expected),
            }
            providers = {
                "transformers": partial(theirs_of, theirs),
                "transformers, patched": partial(theirs_of, patched),
                "transformers, patched and frozen": partial(theirs_of, frozen_patched),
                PATCHED_IN_8_BITS: partial(theirs_of, patched_in_8_bits),
                "fastenc": partial(ours_of, ours),
                "fastenc, frozen": partial(ours_of, frozen),
                IN_8_BITS: partial(ours_of, in_8_bits),
            }
            for provider, model in translators.items():
                providers[provider] = partial(model.generate, sources, NEW_TOKENS, beams)
            if CTRANSLATE2_IN_8_BITS in translators:
                of_tokens = translators[CTRANSLATE2_IN_8_BITS].log_probabilities(sources, expected)
                scored[CTRANSLATE2_IN_8_BITS] = torch.tensor(of_tokens)
            errors = {
                provider: float((of_tokens - exact).norm() / exact.norm())
                for provider, of_tokens in scored.items()
            }
            rows = compare(
                providers,
                baseline="transformers",
                check=partial(wrong, expected, errors),
                seconds=4,
                min_rounds=3,
            )
            for provider, row in rows.items():
                if "median_ms" in row:
                    row["tokens_per_s"] = made / row["median_ms"] * 1e3
                if provider in errors:
                    row["log_probability_error"] = errors[provider]
            name = f"{prefix}sources={count} beams={beams} threads={threads}"
            write(RESULT, read_cases(RESULT) | {name: rows})


if __name__ == "__main__":
    main()
