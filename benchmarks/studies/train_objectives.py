"""Every pretraining objective on wikipedia_en, beside transformers and the best guesses that do not read the text.

python -m benchmarks.studies.train_objectives [OBJECTIVE ...] [--steps N] [--peer-steps N] [--folder FOLDER]
(needs FASTENC_DATA; takes one core minutes for each objective)

fastenc's objective_trainer trains a BERT of 2 layers, 128 wide, with 4,000 word pieces. "mlm+sop" starts from the
encoder that "mlm" trained, and "distill" trains a student of 1 layer from it. "span-corruption" and "ul2" train a T5,
and "denoise" a BART, of 2 + 2 layers with 2,000 word pieces and T5's sentinels. So small a model does not learn
"mlm+nsp" and "electra" in this time, so these start from the encoder of MiniLM (6 layers, 384 wide). No model has
dropout. The peer is transformers, or plain PyTorch on its encoder: the same initial weights, batches and AdamW in a
plain loop, for fewer steps of the same schedule. Each term of the loss is measured on held-out articles, and compared
with the loss of the best constant guess (_constant_guesses.py). A run that was stopped goes on from its last
checkpoint in FOLDER; finished runs are not repeated.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from benchmarks._results import read_cases, write
from benchmarks.plots import draw_curves
from benchmarks.studies._constant_guesses import constant_guesses
from benchmarks.studies._objective_peers import NAMES_OF_PEERS, PEERS, Peer
from fastenc.data import BatchSampler, read_texts, train_tokenizer
from fastenc.data.tokenizer_training import T5_LAST
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder, MaskedLM
from fastenc.models.pretrained import PretrainedModel
from fastenc.objectives import OBJECTIVES, Objective, count_tokens, token_ids
from fastenc.objectives.loss_terms import count_items, weighted_sum
from fastenc.objectives.mlm import special_mask
from fastenc.text import load_tokenizer
from fastenc.text.tokenizer_files import save_tokenizer
from fastenc.train import NewModel, ObjectiveOptions, PretrainConfig, objective_trainer
from fastenc.train.interruption import TrainingInterrupted
from fastenc.train.log import read_log
from fastenc.train.optimizer import build_optimizer, lr_factor

RESULT, OURS, GUESS = "train_objectives", "fastenc", "constant guess"
LAYERS, STUDENT_LAYERS, WIDTH, BATCH = 2, 1, 128, 32
EVALUATIONS = 10  # of each run
Curves = dict[str, list[tuple[int, float]]]  # of each term: (step, held-out loss)


@dataclass(frozen=True)
class Study:
    """How an objective is trained.

    Fields:
        peer_steps: how many of the ``steps`` the peer makes.
        held_out: number of articles.
        start: "random" weights, or the encoder that "mlm" trained, or that of "MiniLM".
        vocabulary: number of word pieces of a model with random weights.
    """

    steps: int
    peer_steps: int
    learning_rate: float = 3e-3
    block_size: int = 64
    held_out: int = 100
    start: str = "random"
    vocabulary: int = 4000


STUDIES = {
    "mlm": Study(2500, 500),
    "mlm+nsp": Study(300, 30, learning_rate=3e-4, held_out=30, start="MiniLM"),
    "mlm+sop": Study(800, 80, learning_rate=1e-3, block_size=256, start="mlm"),
    "span": Study(1200, 120, learning_rate=1e-3, start="mlm"),
    "electra": Study(100, 10, learning_rate=3e-4, held_out=30, start="MiniLM"),
    "distill": Study(1000, 100),
    "span-corruption": Study(1500, 500, held_out=30, vocabulary=2000),
    "ul2": Study(1500, 500, held_out=30, vocabulary=2000),
    "denoise": Study(1500, 500, learning_rate=2e-3, held_out=30, vocabulary=2000),
}


class Run:
    """One objective: its initial weights in ``folder/first``, and a trainer that resumes from the folder."""

    def __init__(self, name: str, study: Study, folder: Path):
        documents, held_out = wikipedia(study.held_out)
        options = ObjectiveOptions(name, block_size=study.block_size)
        self.name, self.study, self.folder = name, study, folder / name
        self.teacher, self.teacher_folder = None, str(folder / "mlm")
        if make_student := OBJECTIVES[name].student:
            self.teacher = MaskedLM.from_pretrained(self.teacher_folder)
            model = make_student(self.teacher, STUDENT_LAYERS)
        elif study.start != "random":
            start = minilm_folder() if study.start == "MiniLM" else folder / study.start
            model = with_new_head(start, options.definition)
        else:
            pieces = folder / f"{study.vocabulary} pieces"
            if not (pieces / "tokenizer.json").exists():
                save_tokenizer(train_tokenizer(documents, vocab_size=study.vocabulary), pieces)
            new = NewModel(layers=LAYERS, hidden=WIDTH, dropout=0.0)
            tokenizer = load_tokenizer(pieces)
            if options.definition.has_decoder:
                tokenizer.add_special_tokens(T5_LAST)
            model = new.make(options, tokenizer)
        model.save_pretrained(self.folder / "first")
        self.every = -(-study.steps // EVALUATIONS)
        self.config = PretrainConfig(
            str(self.folder),
            max_steps=study.steps,
            batch_size=BATCH,
            learning_rate=study.learning_rate,
            warmup=0.1,
            eval_every=self.every,
            keep_checkpoints=1,
        )
        self.trainer = objective_trainer(options, model, documents, self.config, dev=held_out)
        tokenizer = model.tokenizer
        held_out_blocks = options.pack(held_out, tokenizer)
        start_id = model.decoder_start_token_id if options.definition.has_decoder else None
        seed = self.config.seed + 1
        collator = options.collator(tokenizer, held_out_blocks, seed, start_id=start_id)
        batches = BatchSampler([1] * len(held_out_blocks), 32, shuffle=False).epoch(0)
        # The same as in evaluate_objective.
        self.held_out = [
            collator([held_out_blocks[index] for index in indices], step)
            for step, indices in enumerate(batches)
        ]
        counts = count_tokens(map(token_ids, self.trainer.examples), tokenizer.get_vocab_size())
        self.counts = counts.masked_fill(special_mask(tokenizer), 0)

    def train(self) -> dict[str, dict]:
        """The rows of fastenc and of the constant guess, as far as the run came."""
        losses = self.trainer.evaluate
        guesses = lambda model: constant_guesses(model, self.teacher, self.held_out, self.counts)
        self.trainer.evaluate = lambda model: {
            **losses(model),
            **{f"{GUESS} {term}": loss for term, loss in guesses(model).items()},
        }
        first = {f"eval_{n}": v for n, v in self.trainer.evaluate(self.trainer.model).items()}
        begin = time.process_time()
        try:
            self.trainer.train(resume=True)
        except TrainingInterrupted as stop:
            print(stop, flush=True)
        lines = [{"step": 0, **first}, *read_log(self.folder / "log.jsonl")]
        curve = lambda name: [(line["step"], line[name]) for line in lines if name in line]
        guessed = {n.rpartition(" ")[2]: curve(n) for n in first if n.startswith(f"eval_{GUESS}")}
        # In the log, the only term of the objective mlm has no name.
        ours = {t: curve(f"eval_{t}" if f"eval_{t}" in first else "eval_loss") for t in guessed}
        spent = {"cpu_seconds": time.process_time() - begin}
        return {OURS: {"curves": ours, **spent}, GUESS: {"curves": guessed}}

    def train_peer(self) -> Iterator[dict]:
        """The peer's row so far, after each evaluation."""
        torch.manual_seed(self.config.seed)
        peer = PEERS[self.name](str(self.folder / "first"), self.teacher_folder)
        trainer, config, last = self.trainer, self.config, self.study.peer_steps
        optimizer = build_optimizer(peer.model, config)
        batches = chain.from_iterable(map(trainer.schedule.sampler.epoch, count()))
        curves: Curves = {}
        begin = time.process_time()
        for step, indices in enumerate(batches):
            if step % self.every == 0 or step == last:
                for term, loss in held_out_losses(peer, self.held_out, trainer.collate).items():
                    curves.setdefault(term, []).append((step, loss))
                yield {"curves": curves, "cpu_seconds": time.process_time() - begin}
            if step == last:
                return
            peer.model.train()
            example = trainer.collate([trainer.examples[index] for index in indices], step)
            weighted_sum(peer.terms(example)).backward()
            torch.nn.utils.clip_grad_norm_(peer.model.parameters(), config.max_grad_norm)
            for group in optimizer.param_groups:
                factor = lr_factor(step, trainer.warmup_steps, trainer.total_steps)
                group["lr"] = config.learning_rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def with_new_head(folder: Path, objective: Objective) -> PretrainedModel:
    """The objective's model, without dropout: a checkpoint's encoder, with random weights where it has none."""
    encoder = Encoder.from_pretrained(folder)
    stored = {n: w for n, w in encoder.state_dict().items() if n not in encoder.first_weights}
    torch.manual_seed(0)
    config = encoder.config.replace(
        family=objective.family, hidden_dropout_p=0.0, attention_dropout_p=0.0
    )
    model = objective.model(config)
    inner = getattr(model, "discriminator", model).encoder
    inner.load_state_dict(stored, strict=False)  # ELECTRA has no pooler; a masked LM stores none
    model.tokenizer = encoder.tokenizer
    return model


@torch.inference_mode()
def held_out_losses(peer: Peer, examples: list[dict[str, Any]], collator: Any) -> dict[str, float]:
    """The mean of each term over all of its items."""
    peer.model.eval()
    total: dict[str, float] = {}
    items: dict[str, int] = {}
    for example in examples:
        counts = count_items(collator, example)
        for name, (mean, _) in peer.terms(example).items():
            number = counts.get(name, counts.get("loss"))
            total[name] = total.get(name, 0.0) + mean.item() * number
            items[name] = items.get(name, 0) + number
    return {name: total[name] / items[name] for name in total}


def wikipedia(held_out: int) -> tuple[list[str], list[str]]:
    """Articles to train on, and ``held_out`` others."""
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    folder = Path(os.environ["FASTENC_DATA"]) / "wikipedia_en"
    return read_texts(folder / "train.txt.gz"), read_texts(folder / "valid.txt.gz")[:held_out]


def keep(name: str, rows: dict[str, dict]) -> dict[str, dict]:
    """Write an objective's rows to the stored results, and draw all of them."""
    cases = read_cases(RESULT)
    cases[name] = cases.get(name, {}) | rows
    draw_curves(write(RESULT, cases))
    return cases[name]


def reached(row: dict | None) -> int:
    """The last step of a row; -1 without one."""
    return next(iter(row["curves"].values()))[-1][0] if row else -1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("objectives", nargs="*", metavar="OBJECTIVE", help=", ".join(STUDIES))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--peer-steps", type=int)
    parser.add_argument("--folder", type=Path, default=Path("build/train_objectives"))
    options = parser.parse_args()
    if unknown := set(options.objectives) - set(STUDIES):
        parser.error(f"OBJECTIVE must be of {', '.join(STUDIES)}, got {', '.join(sorted(unknown))}")
    given = {"steps": options.steps, "peer_steps": options.peer_steps}
    for name in options.objectives or STUDIES:
        study = replace(STUDIES[name], **{n: v for n, v in given.items() if v is not None})
        rows = read_cases(RESULT).get(name, {})
        finished = reached(rows.get(OURS)), reached(rows.get(NAMES_OF_PEERS[name]))
        if finished == (study.steps, study.peer_steps):
            continue
        run = Run(name, study, options.folder)
        if finished[0] < study.steps:
            rows = keep(name, run.train())
        if reached(rows[OURS]) < study.steps:  # it was stopped by a signal
            return
        for row in run.train_peer():
            keep(name, {NAMES_OF_PEERS[name]: row})


if __name__ == "__main__":
    main()
