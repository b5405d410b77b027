"""How far rounding carries the losses of T5's first training steps apart: fastenc, transformers, and transformers with
each batch's texts in reverse order, which changes nothing but the order of float32's sums.

python -m benchmarks.studies.rounding_in_training [STEPS]    (needs FASTENC_DATA; minutes of one core)

The T5 of train_objectives.py: 2 + 2 layers, 128 wide, span corruption of Wikipedia, learning rate 3e-3, no dropout. All
runs have the same first weights and batches. Every tenth of the steps the held-out loss is compared with that of
transformers in float64, whose norms compute in float64 too. If the formulas were different, fastenc in float64 would
leave it from the first steps on.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._results import read_cases, write
from benchmarks.studies._objective_peers import PEERS
from benchmarks.studies.train_objectives import wikipedia
from fastenc.data import train_tokenizer
from fastenc.models import Seq2Seq
from fastenc.packing import pack_sequences
from fastenc.train import NewModel, ObjectiveOptions, PretrainConfig
from fastenc.train.optimizer import build_optimizer, lr_factor

RESULT, OBJECTIVE = "rounding_in_training", "span-corruption"
ARTICLES, HELD_OUT, BATCH, WARM_UP = 600, 10, 32, 150
Example = dict[str, Any]
Loss = Callable[[Example], Tensor]


def reversed_texts(example: Example) -> Example:
    """The same batch with its sequences in reverse order."""

    def parts(values: Tensor, name: str) -> list[Tensor]:
        return [*values.split(example[name].cu_seqlens.diff().tolist())][::-1]

    packed = {
        name: pack_sequences([ids.tolist() for ids in parts(example[name].input_ids, name)])
        for name in ("batch", "target")
    }
    return {**packed, "labels": torch.cat(parts(example["labels"], "target"))}


def in_float64(model: nn.Module) -> nn.Module:
    """transformers' model in float64; its own norms would compute the variance in float32."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "T5LayerNorm":
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model.double()


def train(
    model: nn.Module,
    loss_of: Loss,
    batches: Sequence[Example],
    held_out: Sequence[Example],
    config: PretrainConfig,
) -> list[tuple[int, float]]:
    """(step, held-out loss) of a run over the batches."""
    optimizer, curve = build_optimizer(model, config), []
    for step, example in enumerate([*batches, None]):
        if step % max(1, len(batches) // 10) == 0:
            with torch.no_grad():
                losses = [loss_of(each).double() for each in held_out]
            curve.append((step, torch.stack(losses).mean().item()))
        if example is None:
            return curve
        loss_of(example).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * lr_factor(step, WARM_UP, 10 * WARM_UP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return curve


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    documents, others = wikipedia(HELD_OUT)
    documents = documents[:ARTICLES]
    options = ObjectiveOptions(OBJECTIVE, block_size=64)
    tokenizer = train_tokenizer(documents, model_type="t5", vocab_size=2000)
    model = NewModel(layers=2, hidden=128, dropout=0.0).make(options, tokenizer)
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    examples = options.pack(documents, tokenizer)
    collator = options.collator(tokenizer, examples, 0, start_id=model.decoder_start_token_id)
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
    batches = [
        collator([examples[order[(step * BATCH + i) % len(order)]] for i in range(BATCH)], step)
        for step in range(steps)
    ]
    held_out = [collator(options.pack(others, tokenizer)[:BATCH], steps)]
    config = PretrainConfig(folder, max_steps=steps, learning_rate=3e-3)

    def ours(wide: bool) -> tuple[nn.Module, Loss]:
        own = Seq2Seq.from_pretrained(folder, dtype=torch.float64 if wide else torch.float32)
        return own.train(), lambda example: own(**example).loss

    def theirs(wide: bool, change: Callable[[Example], Example]) -> tuple[nn.Module, Loss]:
        peer = PEERS[OBJECTIVE](folder, None)
        if wide:
            in_float64(peer.model)
        return peer.model.train(), lambda example: peer.terms(change(example))["target"].mean

    same = lambda example: example
    runs = {
        "transformers, float64": lambda: theirs(True, same),
        "fastenc, float64": lambda: ours(True),
        "transformers": lambda: theirs(False, same),
        "transformers, texts reversed": lambda: theirs(False, reversed_texts),
        "fastenc": lambda: ours(False),
    }
    curves = {name: train(*make(), batches, held_out, config) for name, make in runs.items()}
    exact = curves["transformers, float64"]
    rows = {
        name: {
            "curve": curve,
            "differences": [
                (step, loss - true) for (step, loss), (_, true) in zip(curve, exact, strict=True)
            ],
        }
        for name, curve in curves.items()
    }
    write(RESULT, read_cases(RESULT) | {f"{OBJECTIVE}, {steps} steps": rows})


if __name__ == "__main__":
    main()
