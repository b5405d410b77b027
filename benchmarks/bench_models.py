"""Whole models on real lengths: inference, and masked-LM training steps with AdamW; tokens a second, MFU, peak memory.

python -m benchmarks.bench_models [MODEL ...] [training | inference] [--no-compile]

Random weights of real sizes. On a GPU: one batch of about 16,384 real tokens, for inference also a single text;
bfloat16, in training autocast over float32 weights with dropout 0.1. On a CPU: 1,024 tokens, float32. Tokens and FLOPs
count real tokens and, in the head, labelled tokens, whatever else a provider computes. MFU divides by the rate of a
large product measured in the same run. Before anything is timed, results must agree with transformers' eager model in
float32: in inference the hidden states; in training the loss without dropout, or with it where the step is compiled or
recorded.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch

from benchmarks._compare import NOT_INSTALLED, compare, compiled, peer
from benchmarks._device import DEVICE, ON_GPU, ceilings
from benchmarks._peers import padded
from benchmarks._results import exit_if_broken, measure_groups
from benchmarks.lengths import NAMES, lengths
from fastenc import compile_inference, compile_training, patch
from fastenc.models import MaskedLM
from fastenc.ops import unpack
from fastenc.packing import pack_sequences
from fastenc.profiling import models
from fastenc.profiling.costs import encoder_flops

TOKENS = 16384 if ON_GPU else 1024
MODES = ("training", "inference")
NO_COMPILE = "--no-compile"  # leaves out torch.compile, which takes minutes
GRAPHS = ON_GPU  # only there can graphs be recorded
COMPILES = ON_GPU and NO_COMPILE not in sys.argv  # transformers' model by torch.compile too
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
AUTOCAST = ON_GPU  # training in bfloat16
TOLERANCE = 5e-2 if ON_GPU else 1e-4  # bfloat16 through up to 24 layers
WITH_DROPOUT = 5e-2
SORTED_BATCHES = 8
ONE_TEXT = "one text of 20 tokens"


def hugging_face(folder: str, attention: str, dtype: torch.dtype):
    from transformers import AutoModelForMaskedLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype)
    return model.to(DEVICE).eval()


def on_device(batch: dict) -> dict:
    return {name: value.to(DEVICE) for name, value in batch.items()}


def variants(folder: str, dtype: torch.dtype) -> dict:
    """Ways to run transformers' model: for each a model, or the reason why it is missing."""
    flash = lambda _: hugging_face(folder, "flash_attention_2", dtype)
    return {
        "Hugging Face eager": hugging_face(folder, "eager", dtype),
        "Hugging Face sdpa": hugging_face(folder, "sdpa", dtype),
        "Hugging Face flash_attention_2": peer("flash_attn", flash) if ON_GPU else "needs a GPU",
        "fastenc.patch": patch(hugging_face(folder, "sdpa", dtype), labelled_logits_only=True),
    }


def finish(rows: dict, tokens: int, flops: float) -> dict:
    """Adds tokens a second, FLOPs and MFU, the share of the products' ceiling, to the timed rows."""
    for row in rows.values():
        if "median_ms" in row:
            seconds = row["median_ms"] / 1e3
            row["tokens_per_s"] = tokens / seconds
            row["flops"] = flops
            row["MFU_percent"] = 100 * flops / seconds / ceilings().product(DTYPE)
    return rows


def inference(ours: MaskedLM, folder: str) -> dict[str, Callable[[], dict]]:
    """Groups: last hidden states of one batch, compared at real tokens only."""
    providers = {
        name: m if isinstance(m, str) else m.base_model
        for name, m in variants(folder, DTYPE).items()
    }
    exact = hugging_face(folder, "eager", torch.float32).base_model
    encoder, config = ours.encoder.to(DTYPE).eval(), ours.config
    graphs = compile_inference(encoder, max_tokens=2 * TOKENS) if GRAPHS else "needs a GPU"

    def measure(name: str) -> dict[str, dict]:
        sizes = [20] if name == ONE_TEXT else lengths(name, TOKENS)
        sequences = models.random_sequences(config, sizes)
        batch = on_device(padded(sequences, config.pad_token_id))
        real = batch["attention_mask"].bool()
        order = sorted(range(len(sizes)), key=sizes.__getitem__)
        by_length = [sequences[i] for i in order]
        step = -(-len(by_length) // SORTED_BATCHES)
        batches = [
            on_device(padded(by_length[i : i + step], config.pad_token_id))
            for i in range(0, len(by_length), step)
        ]
        packed = pack_sequences(sequences).to(DEVICE)

        def forward(model):
            return lambda: model(**batch).last_hidden_state[real]

        calls: dict = {n: m if isinstance(m, str) else forward(m) for n, m in providers.items()}
        sdpa = providers["Hugging Face sdpa"]
        masks = [each["attention_mask"].bool() for each in batches]
        by_length_name = f"Hugging Face sdpa, sorted, {SORTED_BATCHES} batches"
        calls[by_length_name] = lambda: torch.cat(
            [sdpa(**x).last_hidden_state[m] for x, m in zip(batches, masks, strict=True)]
        )
        if COMPILES:
            calls["Hugging Face sdpa, torch.compile"] = forward(compiled(sdpa))
        calls["fastenc"] = lambda: encoder(packed).last_hidden_state
        calls["fastenc.compile_inference"] = (
            graphs if isinstance(graphs, str) else lambda: graphs(packed).last_hidden_state
        )
        with torch.inference_mode():
            truth = exact(**batch).last_hidden_state[real]
            texts = truth.split(sizes)
            truth_by_length = torch.cat([texts[i] for i in order])

            def check(provider, result):
                expected = truth_by_length if provider == by_length_name else truth
                error = ((result.float() - expected).norm() / expected.norm()).item()
                return None if error < TOLERANCE else f"relative error {error:.2g}"

            rows = compare(calls, baseline="Hugging Face sdpa", check=check, end_to_end=True)
        rows = finish(rows, sum(sizes), encoder_flops(config, sizes))
        return {f"inference, {name}": rows}

    return {f"inference, {name}": partial(measure, name) for name in (*NAMES, ONE_TEXT)}


def training(ours: MaskedLM, folder: str) -> dict[str, Callable[[], dict]]:
    """Groups: forward, backward and AdamW."""
    providers = variants(folder, torch.float32)
    exact = hugging_face(folder, "eager", torch.float32)
    config = ours.config
    optimizers: dict[int, torch.optim.Optimizer] = {}
    own = torch.optim.AdamW(ours.parameters(), lr=0.0, fused=True)
    graphs = compile_training(ours, own, max_tokens=2 * TOKENS) if GRAPHS else "needs a GPU"
    dynamic = torch.compile(providers["Hugging Face sdpa"], dynamic=True) if COMPILES else None

    def measure(name: str) -> dict[str, dict]:
        sizes = lengths(name, TOKENS)
        packed = pack_sequences(models.random_sequences(config, sizes)).to(DEVICE)
        torch.manual_seed(1)
        selected = torch.rand(sum(sizes)) < models.MASKED_SHARE
        chosen, count = selected.to(DEVICE), int(selected.sum())
        labels = torch.where(chosen, packed.input_ids, -100)
        batch = {
            "input_ids": unpack(packed.input_ids, packed, config.pad_token_id),
            "attention_mask": unpack(torch.ones_like(packed.input_ids), packed),
            "labels": unpack(labels, packed, -100),
        }
        losses: dict = {
            n: m if isinstance(m, str) else lambda m=m: m(**batch).loss
            for n, m in providers.items()
        }
        owners = dict(providers)
        if COMPILES:
            # Compiling each shape by itself would take minutes, so one dynamic graph serves all batches of texts. It
            # comes first, because compiled() forgets it.
            fixed = name == NAMES[-1]
            compile_name = "Hugging Face sdpa, torch.compile" + ("" if fixed else " dynamic")
            owners[compile_name] = providers["Hugging Face sdpa"]
            fused = compiled(owners[compile_name]) if fixed else dynamic
            losses[compile_name] = lambda fused=fused: fused(**batch).loss
        owners["fastenc"] = ours
        losses["fastenc"] = lambda: ours(packed, labels, max_labels=count).loss
        truth = exact_loss(exact, batch)

        def step_of(provider):
            model, loss_of = owners[provider], losses[provider]
            if id(model) not in optimizers:
                optimizers[id(model)] = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
            optimizer = optimizers[id(model)]

            def step():
                with torch.autocast(DEVICE.type, torch.bfloat16, enabled=AUTOCAST):
                    loss = loss_of()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                return loss.detach()

            return step

        def recorded():
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=AUTOCAST):
                return graphs({"batch": packed, "labels": labels, "max_labels": count}).loss

        calls = {n: f if isinstance(f, str) else step_of(n) for n, f in losses.items()}
        calls["fastenc.compile_training"] = graphs if isinstance(graphs, str) else recorded

        # With a learning rate of 0 the weights stay, so that every step's loss can be compared with the first one's.
        def check(provider, loss):
            error = abs(loss.item() / truth - 1)
            limit = WITH_DROPOUT if "compile" in provider else TOLERANCE
            return None if error < limit else f"loss {loss.item():.4f} instead of {truth:.4f}"

        def checked(train: bool) -> dict:
            set_mode(owners, train)
            chosen = {n: forward for n, forward in calls.items() if ("compile" in n) == train}
            once = {"seconds": 0.0, "min_rounds": 1}
            return compare(chosen, baseline="", check=check, end_to_end=True, **once)

        wrong = checked(False) | checked(True)
        calls = {n: calls[n] if "median_ms" in wrong[n] else state(wrong[n]) for n in calls}
        set_mode(owners, True)
        rows = compare(calls, baseline="Hugging Face sdpa", end_to_end=True)
        rows |= {n: row for n, row in wrong.items() if "median_ms" not in row}
        flops = 3 * encoder_flops(config, sizes, count)
        return {f"training, {name}": finish(rows, sum(sizes), flops)}

    return {f"training, {name}": partial(measure, name) for name in NAMES}


@torch.no_grad()
def exact_loss(model, batch: dict) -> float:
    """Transformers' loss from the logits of the labelled rows alone: those of all rows may not fit into memory."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    chosen = batch["labels"] != -100
    hidden = model.base_model(**inputs).last_hidden_state[chosen]
    head = model.cls if hasattr(model, "cls") else model.lm_head
    return torch.nn.functional.cross_entropy(head(hidden), batch["labels"][chosen]).item()


def set_mode(owners: dict, train: bool) -> None:
    for model in owners.values():
        if not isinstance(model, str):
            model.train(train)


def state(row: dict) -> str:
    """The words for a row without a time."""
    return next(iter(row.values()), NOT_INSTALLED)


def main() -> None:
    arguments = sys.argv[1:]
    options = (*models.SIZES, *MODES, NO_COMPILE)
    if unknown := set(arguments) - set(options):
        raise SystemExit(f"give {', '.join(options)}, got {', '.join(unknown)}")
    default = list(models.SIZES) if ON_GPU else ["minilm"]
    wanted = [name for name in models.SIZES if name in arguments] or default
    broken: list[str] = []
    for name in wanted:
        for mode in [mode for mode in MODES if mode in arguments] or MODES:
            torch.manual_seed(0)
            ours = MaskedLM(models.SIZES[name])
            with tempfile.TemporaryDirectory() as folder:
                ours.save_pretrained(folder)
                run = inference if mode == "inference" else training
                groups = run(ours.to(DEVICE), folder)
            measure_groups(f"models_{name}_{mode}", groups, broken)
    exit_if_broken(broken)


if __name__ == "__main__":
    main()
