"""fastenc pretrain."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from fastenc._base.options import argument, group, option
from fastenc.cli.options import Command, values_of
from fastenc.cli.training import INSTEAD, check_other_folder, run_trainer
from fastenc.data import TokenStore, is_store, read_texts
from fastenc.data.languages import ALPHA
from fastenc.models import MaskedLM
from fastenc.models.pretrained import PretrainedModel
from fastenc.tasks.shared_options import QUOTING
from fastenc.train import NewModel, ObjectiveOptions, PretrainConfig, objective_trainer
from fastenc.train.checkpoint import open_output
from fastenc.train.model_card import Origin
from fastenc.train.processes import process_state
from fastenc.train.recipe import read_recipe, write_recipe

OF_A_TOKENIZER = ("tokenizer", "vocab_size", "lowercase")


@dataclass(frozen=True, kw_only=True)
class Pretrain(Command):
    """Pretrain an encoder or an encoder-decoder on texts with one of nine objectives.

    Without --from, a tokenizer is trained on the texts first, and then a new model of the given size. The result is a
    folder that transformers loads.

    Objectives: mlm (masked LM), mlm+nsp (masked LM and next-sentence prediction, BERT), mlm+sop (masked LM and
    sentence-order prediction, ALBERT), span (span masking and the span-boundary objective, SpanBERT), electra
    (replaced-token detection, ELECTRA), distill (distillation from --teacher into a student with --layers layers,
    DistilBERT); for encoder-decoders span-corruption (sentinels replace spans, T5), ul2 (a mixture of span corruptions
    and a prefix LM, UL2), denoise (spans are masked and sentences permuted, BART).

    Examples:
    fastenc pretrain wiki.txt.gz -o runs/small
    fastenc pretrain wiki.txt.gz -o runs/base --layers 12 --hidden 768 --precision bf16 --accumulation 16
    fastenc pretrain wiki.txt.gz --objective mlm+sop -o runs/pairs
    fastenc pretrain wiki.txt.gz --objective span-corruption -o runs/t5
    fastenc pretrain wiki.txt.gz --objective distill --teacher runs/base --layers 6 -o runs/half
    fastenc pretrain books.txt.gz --recipe roberta-base --global-batch-size 256 --max-steps 50000 -o runs/books
    fastenc pretrain more.txt --from runs/small -o runs/adapted --lr 1e-4 --whole-word
    fastenc pretrain store/ --batch-tokens 16384 -o runs/large
    fastenc pretrain wiki.txt.gz --config runs/base/recipe.toml -o runs/again
    torchrun --nproc-per-node 8 -m fastenc pretrain wiki.txt.gz --parallel fsdp -o runs/r
    """

    instead: ClassVar[dict[str, str]] = INSTEAD

    train: tuple[str, ...] = argument(
        "Texts: .txt with empty lines between documents, .tsv, .csv, .jsonl (also .gz), or a data set; or a store of "
        "`fastenc prepare`."
    )
    training: PretrainConfig = group("Training")
    recipe: str | None = option(
        None,
        "Name of published settings (`fastenc recipes` lists them). Other options override them.",
    )
    dev: str | None = option(
        None,
        "Held-out texts. Default: one in twenty documents, or the store's held-out examples.",
    )
    text: str | None = option(None, "Column of the text in a table. Default: text.", "-t")
    quoting: str | None = option(None, QUOTING)
    from_: str | None = option(
        None,
        "Checkpoint folder, or name on the hub, whose weights and tokenizer are trained further.",
    )
    objective: ObjectiveOptions = group("Objective")
    teacher: str | None = option(
        None, "Masked LM for --objective distill: checkpoint folder, or name on the hub."
    )
    new: NewModel = group("A new model")
    resume: bool = option(False, "Continue from the newest checkpoint in the output folder.")
    overwrite: bool = option(
        False, "Delete the run that the output folder has, when the new one starts."
    )

    @classmethod
    def presets(cls, given: dict[str, Any]) -> dict[str, Any]:
        if any(map(is_store, given.get("train", ()))):
            for name in OF_A_TOKENIZER:
                if name in given:
                    raise ValueError(
                        "a store already has the tokenizer that it was prepared with, got "
                        f"--{name.replace('_', '-')}: leave it out, or prepare the texts with another tokenizer"
                    )
        recipe = given.get("recipe")
        return {} if recipe is None else read_recipe(recipe).values

    def run(self) -> None:
        if (self.teacher is None) != (self.objective.definition.student is None):
            raise ValueError(
                f"--objective distill needs --teacher, and no other objective takes it, got {self.teacher} for "
                f"{self.objective.objective}: {'give' if self.teacher is None else 'leave out'} --teacher"
            )
        if self.objective.alpha != ALPHA and not any(map(is_store, self.train)):
            raise ValueError(
                f"--alpha is for the languages of a store, got {self.objective.alpha} for {' '.join(self.train)}: "
                "leave it out, or prepare the texts with fastenc prepare --language"
            )
        check_other_folder(self.training.output, self.from_)
        self.new.mask_decoder_option(self.objective.definition)  # its error comes before any work
        if self.from_ is None and self.objective.definition.student is None:
            self.new.check(self.objective.definition)
        process_state(self.training.device)
        with open_output(
            Path(self.training.output), self.resume, self.overwrite
        ) as checkpoint_folder:
            self._run(checkpoint_folder)

    def _run(self, checkpoint_folder: Path | None) -> None:
        store = _store(self.train)
        documents = [] if store else _documents(self.train, self.text, self.quoting)
        dev = None if self.dev is None else _documents([self.dev], self.text, self.quoting)
        model = self._model(checkpoint_folder, store, documents)
        if store:
            store.check_tokenizer(
                model.own_tokenizer(),
                str(checkpoint_folder or self.from_ or self.teacher or "the model"),
            )
        trainer = objective_trainer(
            self.objective,
            model,
            store or documents,
            self.training,
            dev=dev,
            settings={
                "teacher": self.teacher,
                **({"mask_decoder": self.new.mask_decoder} if self.from_ else asdict(self.new)),
            },
            origin=Origin(self.from_ or self.teacher, self.train, self.dev),
        )
        if trainer.accelerator.is_main_process and checkpoint_folder is None:
            write_recipe(
                trainer.output_dir / "recipe.toml",
                self._recipe(store is not None),
                f"fastenc pretrain {' '.join(self.train)}",
            )
        run_trainer(trainer, self.resume, self.overwrite)

    def _model(
        self, checkpoint_folder: Path | None, store: TokenStore | None, documents: list[str]
    ) -> PretrainedModel:
        """The model of the checkpoint to resume, of --from, a student of the teacher, or a new model."""
        # For the first values of weights that the checkpoint or the teacher lacks.
        torch.manual_seed(self.training.seed)
        objective = self.objective.definition
        teacher = None if self.teacher is None else MaskedLM.from_pretrained(self.teacher)
        # A resumed run has its tokenizer in the checkpoint.
        if folder := checkpoint_folder or self.from_:
            given: dict[str, Any] = {} if teacher is None else {"teacher": teacher}
            given |= self.new.mask_decoder_option(objective)
            return _with_tokenizer(objective.model.from_pretrained(folder, **given), folder)
        if objective.student is not None:
            return _with_tokenizer(objective.student(teacher, self.new.layers), self.teacher)  # type: ignore[arg-type]
        tokenizer = store.tokenizer() if store else self.new.make_tokenizer(documents, objective)
        return self.new.make(self.objective, tokenizer, self.training.seed)

    def _recipe(self, of_store: bool) -> dict[str, Any]:
        """All options of this run, except its data and output, for a file that repeats it."""
        dropped = {"train", "output", "config", "recipe", "resume", "overwrite"}
        if of_store:
            dropped |= {name.replace("_", "-") for name in OF_A_TOKENIZER}
        return {key: value for key, value in values_of(self).items() if key not in dropped}


def _store(train: tuple[str, ...]) -> TokenStore | None:
    """The store to train on; None if texts are given."""
    if not any(map(is_store, train)):
        return None
    if len(train) > 1:
        raise ValueError(
            f"a token store must be the only training data, got {' '.join(train)}: give the store alone"
        )
    return TokenStore(train[0])


def _documents(
    paths: tuple[str, ...] | list[str], column: str | None, quoting: str | None
) -> list[str]:
    """The documents that are not empty. The number of empty ones is printed."""
    read = [document for path in paths for document in read_texts(path, column, quoting)]
    documents = [document for document in read if document.strip()]
    if not documents:
        raise ValueError(
            f"{' '.join(paths)}: there must be documents with text, got {len(read):,} empty ones: give other files"
        )
    if len(documents) < len(read) and process_state().is_main_process:
        print(f"{len(read) - len(documents):,} of {len(read):,} documents were empty")
    return documents


def _with_tokenizer(model: PretrainedModel, name: str | Path | None) -> PretrainedModel:
    """``model`` itself. Raises: ValueError if it has no tokenizer."""
    if model.tokenizer is None:
        raise ValueError(
            f"{name} must have a tokenizer.json, got none: add the tokenizer that it was trained with"
        )
    return model
