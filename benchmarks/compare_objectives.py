"""Pretraining objectives at equal compute: small encoders pretrained on wikipedia_en, then fine-tuned.

python -m benchmarks.compare_objectives [OBJECTIVE ...] [--seeds 0 1] [--tflop N] [--folder FOLDER]
(needs FASTENC_DATA; a TFLOP is about 20 seconds of a core)

Encoders of 4 layers, 128 wide, with one WordPiece vocabulary of 8,000, pretrained for the same FLOPs: those of matrix
products in forward and backward, counted on real batches, of everything that an objective runs (ELECTRA's generator,
the heads, the teacher's forward). FLOPs and not seconds, because seconds depend on what else the machine does; both
are written. Each encoder, and a randomly initialised one, is then fine-tuned with the same settings.

"distill" needs a teacher of the student's vocabulary and width, with a masked-LM head: that is the encoder that "mlm"
gave with the same seed. Its own training is not counted. The student begins with random weights like all others.
"distill-minilm" is what DistilBERT did: the student begins with three of MiniLM's six layers, so it is 384 wide and has
MiniLM's vocabulary. MiniLM has no masked-LM head: one is trained first for as many FLOPs, the encoder frozen.

Between them, the peak memory of training steps with vocabularies of 8,000 and of 32,000 entries. Each run has a process
of its own. Runs whose results are there already are not run again; encoders are kept in FOLDER.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._harness import read_cases, write
from benchmarks._process import Stopwatch, isolated
from benchmarks._training import BLOCK, small_config, wikipedia
from benchmarks.plots import draw_curves
from benchmarks.task_sets import SETS
from benchmarks.train_tasks import ours
from fastenc.adapt import freeze_encoder
from fastenc.data import train_tokenizer
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import EncoderConfig, MaskedLM, load_tokenizer
from fastenc.models.checkpoint import read_config
from fastenc.models.pretrained import PretrainedModel
from fastenc.models.tokenizers import save_tokenizer
from fastenc.objectives import OBJECTIVES, Collator, token_ids
from fastenc.objectives.distill import DistilledLM
from fastenc.objectives.loss_terms import loss_terms, weighted_sum
from fastenc.profiling.costs import CountWork
from fastenc.train import ObjectiveOptions, TrainConfig, fine_tuning_lr, objective_trainer
from fastenc.train.optimizer import build_optimizer

RESULT = "compare_objectives"
RANDOM, TEACHER, MINILM = "random start", "mlm", "distill-minilm"
FROM_NOTHING = ("mlm", "mlm+nsp", "span", "electra", "distill")
NAMES = (*FROM_NOTHING, MINILM)
MINILM_LAYERS = 3
TASKS = {
    "sst2": replace(SETS["sst2"], title="SST-2, 8,000 phrases", most=8000),
    "cola": SETS["cola"],
    "rte": SETS["rte"],
}
WIDTH, VOCABULARY, BATCH, EPOCHS = 128, 8000, 8, 2
EVALUATIONS, HELD_OUT = 6, 20  # of each pretraining; articles
VOCABULARIES, MEMORY_BATCH = (8000, 32000), 32


def make_tokenizer(folder: Path) -> dict:
    documents, _ = wikipedia()
    save_tokenizer(train_tokenizer(documents, vocab_size=VOCABULARY), folder)
    return {}


def new_model(name: str, vocabulary: int, seed: int, teacher: MaskedLM | None) -> PretrainedModel:
    """A model with random weights; ``teacher`` is used by an objective that has one."""
    objective = OBJECTIVES[name]
    torch.manual_seed(seed)
    config = small_config(vocabulary, WIDTH, family=objective.family)
    return objective.model(config, **({"teacher": teacher} if objective.student else {}))


def first_model(name: str, seed: int, folder: Path) -> PretrainedModel:
    """What an objective begins with, its tokenizer with it."""
    if name == MINILM:
        teacher = MaskedLM.from_pretrained(folder / "minilm-teacher")
        return DistilledLM.from_teacher(teacher, MINILM_LAYERS)
    teacher = None
    if OBJECTIVES[name].student:
        teacher = MaskedLM.from_pretrained(encoder_folder(folder, TEACHER, seed))
    model = new_model(name, VOCABULARY, seed, teacher)
    model.tokenizer = load_tokenizer(folder.parent)
    return model


def examples_of(
    name: str, tokenizer: Any, documents: list[str], seed: int
) -> tuple[list, Collator]:
    options = objective_options(name)
    examples = options.pack(documents, tokenizer)
    return examples, options.collator(tokenizer, examples, seed)


def objective_options(name: str) -> ObjectiveOptions:
    return ObjectiveOptions("distill" if name == MINILM else name, block_size=BLOCK)


def step_flops(model: PretrainedModel, examples: Sequence[Any], collator: Collator) -> float:
    """FLOPs of an optimiser step's forward and backward, the mean of four batches."""
    with CountWork() as count:
        for step in range(4):
            arguments = collator(examples[step * BATCH : (step + 1) * BATCH], step)
            weighted_sum(loss_terms(model(**arguments))).backward()
    model.zero_grad(set_to_none=True)
    return sum(call.work.flops for call in count.calls) / 4


def make_minilm_teacher(folder: Path, tflop: float) -> dict:
    """MiniLM with a masked-LM head, which alone is trained."""
    model = MaskedLM.from_pretrained(minilm_folder())
    freeze_encoder(model)
    return train(TEACHER, model, 0, folder / "minilm-teacher", tflop)


def pretrain(name: str, seed: int, folder: Path, tflop: float) -> dict:
    """See :func:`train`; writes the encoder."""
    return train(
        name, first_model(name, seed, folder), seed, encoder_folder(folder, name, seed), tflop
    )


def train(name: str, model: PretrainedModel, seed: int, output: Path, tflop: float) -> dict:
    """{"curve": [(step, held-out loss)], "steps", "tokens", "TFLOP", times} of an objective."""
    documents, held_out_documents = wikipedia()
    options = objective_options(name)
    examples, collator = examples_of(name, model.tokenizer, documents, seed)
    a_step = step_flops(model, examples, collator)
    steps = round(tflop * 1e12 / a_step)
    config = TrainConfig(
        str(output),
        max_steps=steps,
        batch_size=BATCH,
        learning_rate=5e-4
        if name == MINILM
        else 1e-3,  # DistilBERT's, for weights that are trained
        warmup=0.1,
        seed=seed,
        eval_every=-(-steps // EVALUATIONS),
        keep_checkpoints=1,
    )
    shutil.rmtree(output, ignore_errors=True)  # going on with a part would measure the rest alone
    trainer = objective_trainer(
        options, model, documents, config, dev=held_out_documents[:HELD_OUT]
    )
    first = trainer.evaluate(model)["loss"]
    with Stopwatch() as watch:
        trainer.train()
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    later = [(line["step"], line["eval_loss"]) for line in log if "eval_loss" in line]
    tokens = steps * BATCH * sum(len(token_ids(each)) for each in examples) / len(examples)
    work = {"steps": steps, "tokens": round(tokens), "TFLOP": steps * a_step / 1e12}
    return {"curve": [(0, first), *later], **work, **watch.times}


def encoder_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}-{seed}"


def fine_tune(name: str, task: str, seed: int, folder: Path) -> dict:
    """{"metric", "dev", "test" (where there is one), times} of an encoder on a data set."""
    start = encoder_folder(folder, name, seed)
    if name == RANDOM:
        model = new_model(TEACHER, VOCABULARY, seed, None)
        model.tokenizer = load_tokenizer(folder.parent)
        model.save_pretrained(start)
    chosen = TASKS[task]
    rate = fine_tuning_lr(EncoderConfig.from_hf(read_config(start)).hidden_size)
    with tempfile.TemporaryDirectory() as scratch:
        config = TrainConfig(scratch, epochs=EPOCHS, seed=seed, learning_rate=rate)
        result = ours(chosen.task, *chosen.read(), chosen.metric, config, start)
    return {"metric": chosen.metric, **result}


def step_memory(name: str, vocabulary: int, folder: Path) -> dict:
    """Three training steps of a model with so many entries in its vocabulary, on the same batches."""
    _, documents = wikipedia()
    examples, collator = examples_of(name, load_tokenizer(folder), documents, 0)
    model = new_model(name, vocabulary, 0, new_model(TEACHER, vocabulary, 0, None).eval())
    optimizer = build_optimizer(model, TrainConfig("unused"))
    for step in range(3):
        arguments = collator(examples[:MEMORY_BATCH], step)
        weighted_sum(loss_terms(model(**arguments))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"tokens": arguments["batch"].total_tokens, "parameters": parameters}


def run_once(case: str, key: str, function: Any, *arguments: Any, made: Path | None = None) -> None:
    """``function(*arguments)`` in its own process, written at once; nothing where its result, and the file that it
    makes, are there."""
    if key in read_cases(RESULT).get(case, {}) and (made is None or made.exists()):
        return
    row = isolated(function, *arguments)
    cases = read_cases(RESULT)
    cases.setdefault(case, {})[key] = row
    write(RESULT, cases)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("objectives", nargs="*", metavar="OBJECTIVE", help=", ".join(NAMES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tflop", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path("build/compare_objectives"))
    options = parser.parse_args()
    names, folder, tflop = options.objectives or NAMES, options.folder, options.tflop
    if unknown := set(names) - set(NAMES):
        parser.error(f"OBJECTIVE must be of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    budget = f"{tflop:g} TFLOP"
    encoders = folder / budget
    if not (folder / "tokenizer.json").exists():
        isolated(make_tokenizer, folder)
    for seed in options.seeds:
        for name in names:
            if name == MINILM and not (encoders / "minilm-teacher/model.safetensors").exists():
                isolated(make_minilm_teacher, encoders, tflop)
            case = f"{name}: pretraining, {budget}"
            made = encoder_folder(encoders, name, seed) / "model.safetensors"
            run_once(case, f"seed {seed}", pretrain, name, seed, encoders, tflop, made=made)
    for name in (name for name in names if name in FROM_NOTHING):
        for vocabulary in VOCABULARIES:
            case = f"{name}: memory of steps"
            run_once(case, f"vocabulary {vocabulary}", step_memory, name, vocabulary, folder)
    for seed in options.seeds:
        for task, chosen in TASKS.items():
            for name in (RANDOM, *names):
                case = f"{name}: {chosen.title}, {budget}"
                run_once(case, f"seed {seed}", fine_tune, name, task, seed, encoders)
    draw_curves(write(RESULT, read_cases(RESULT)))


if __name__ == "__main__":
    main()
