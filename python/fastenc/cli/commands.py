"""The commands by name. A command's module is imported when the command is called, so ``fastenc --help`` is fast."""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import fastenc
from fastenc.cli.options import Command, in_options_words, options_of

# name: module, class, first sentence of the class's docstring
COMMANDS = {
    "pretrain": (
        "pretrain",
        "Pretrain",
        "Pretrain an encoder or an encoder-decoder on texts with one of nine objectives.",
    ),
    "finetune": ("finetune", "Finetune", "Fine-tune an encoder, or an encoder-decoder, on a task."),
    "predict": ("predict", "Predict", "Predict with a fine-tuned model."),
    "evaluate": ("evaluate", "Evaluate", "Measure a fine-tuned model on labelled data."),
    "embed": ("embed", "Embed", "Compute a vector for each text, or for each word of the texts."),
    "rerank": ("rerank", "Rerank", "Rank documents for each query with a cross-encoder."),
    "mine": ("mine", "Mine", "Mine hard negatives for pairs of queries and documents."),
    "analyze": ("analyze", "Analyze", "Show what an encoder's vectors, layers and heads encode."),
    "neighbours": (
        "neighbours",
        "Neighbours",
        "Compare a word's nearest words in different sentences with those of its static vector.",
    ),
    "tokenizer": ("corpus", "Tokenizer", "Train a tokenizer on texts of one or several languages."),
    "tokens": (
        "corpus",
        "Tokens",
        "Count how many tokens tokenizers need for a word, by language.",
    ),
    "clean": ("corpus", "Clean", "Drop duplicates and bad documents, and report why."),
    "prepare": ("corpus", "Prepare", "Tokenise texts into a store that `fastenc pretrain` reads."),
    "lengthen": (
        "lengthen",
        "Lengthen",
        "Convert a RoBERTa to a Longformer, which reads longer texts.",
    ),
    "samples": ("samples", "Samples", "Write small files for the commands of the documents."),
    "recipes": ("recipes", "Recipes", "List the published settings for `pretrain --recipe`."),
    "profile": (
        "measure",
        "Profile",
        "Measure the time of each op and kernel in a step of a model.",
    ),
    "bench": ("measure", "Bench", "Run the benchmarks of a clone of the repository."),
    "info": ("info", "Info", "Show what is installed and which implementation each op uses."),
}
USAGE = """usage: fastenc COMMAND [options]

Pretrain, fine-tune and run bidirectional transformer encoders, without paying for padding.

Commands:
{commands}

fastenc COMMAND --help lists a command's options. They can also be given in a .toml or .yaml file (--config).
fastenc --version prints the version."""


def run(arguments: Sequence[str]) -> None:
    """Run ``fastenc`` with these arguments. Raises: ValueError for an unknown command or option."""
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        print(
            USAGE.format(commands="\n".join(f"  {n:{width}}  {c[2]}" for n, c in COMMANDS.items()))
        )
        return
    if name == "--version":
        print(f"fastenc {fastenc.__version__}")
        return
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f" (is it {near[0]}?)" if near else ""
        raise ValueError(
            f"there is no command {name!r}{hint}: fastenc knows {', '.join(COMMANDS)}; fastenc --help explains"
        )
    command = command_named(name)
    try:
        command.from_arguments(name, rest).run()
    except ValueError as error:
        raise ValueError(in_options_words(str(error), options_of(command))) from error
    except (OSError, KeyboardInterrupt) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (in_options_words(error.args[0], options_of(command)),)
        raise


def command_named(name: str) -> type[Command]:
    """The class of a command, whose module is imported here."""
    module, class_name, _ = COMMANDS[name]
    return getattr(import_module(f"fastenc.cli.{module}"), class_name)
