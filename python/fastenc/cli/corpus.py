"""fastenc tokenizer, tokens, clean and prepare."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastenc._base.extras import require
from fastenc._base.files import write_text_atomically
from fastenc._base.options import REQUIRED, argument, option
from fastenc.cli.options import Command
from fastenc.cli.outputs import make_writable
from fastenc.data import (
    language_files,
    measure_fertility,
    read_languages,
    sample_lines,
    train_tokenizer,
    write_store,
)
from fastenc.data.fertility import Fertility, plot_fertility
from fastenc.data.languages import ALPHA, Chained, text_files
from fastenc.data.readers import FileTexts
from fastenc.data.rows import numbered_lines
from fastenc.data.store_writer import SHARD_CHARACTERS
from fastenc.models.checkpoint import CONFIG
from fastenc.tasks.shared_options import QUOTING
from fastenc.text import load_tokenizer, save_tokenizer

TEXTS = (
    "Texts: .txt with empty lines between documents, .tsv, .csv, .jsonl (also .gz), folders of these, or a data "
    "set."
)
LANGUAGE = "Texts of a language, as name=file or name=folder; may be repeated."
COLUMN = "Column of the text in a table. Default: text."


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Command):
    """Train a tokenizer on texts of one or several languages.

    With --language, lines are sampled so that a language has the share p^alpha / sum p^alpha of the characters, where p
    is its share of the characters in the files. So small languages get a larger part of the vocabulary.

    Examples:
    fastenc tokenizer wiki.txt.gz -o tokenizer
    fastenc tokenizer --language en=en.txt.gz --language mt=maltese/ --model-type unigram -o tokenizer
    """

    texts: tuple[str, ...] = argument(TEXTS, default=())
    output: Path = option(REQUIRED, "Folder for the tokenizer.", "-o")
    language: tuple[str, ...] = option((), LANGUAGE)
    text: str | None = option(None, COLUMN, "-t")
    quoting: str | None = option(None, QUOTING)
    model_type: str = option(
        "wordpiece",
        "Model of the tokenizer: wordpiece, bpe (byte-level), unigram or t5 (a unigram with T5's sentinels).",
    )
    vocab_size: int = option(16000, "Vocabulary size.")
    lowercase: bool | None = option(
        None,
        "Lower-case the texts and strip accents. Default: only for wordpiece without --language.",
    )
    alpha: float = option(
        ALPHA,
        "Exponent that smooths the languages' shares; 1 keeps their shares, 0 makes all equal.",
    )
    seed: int = option(0, "Seed of the sampled lines.")

    def run(self) -> None:
        if not self.language and (self.alpha, self.seed) != (ALPHA, 0):
            raise ValueError(
                "--alpha and --seed are for texts of several languages: leave them out, or give --language"
            )
        if (self.output / CONFIG).exists():
            raise ValueError(
                f"output must not be the folder of a model, whose tokens have other numbers, got {self.output}: give "
                "another folder"
            )
        files = _files(self.texts, self.language)
        make_writable(self.output)
        documents = {
            language: FileTexts(paths, self.text, self.quoting) for language, paths in files.items()
        }
        lowercase = self.lowercase
        if self.language:
            sampled = sample_lines(documents, alpha=self.alpha, seed=self.seed)
            lowercase = bool(lowercase)
            for language, of_language in sampled.items():
                print(
                    f"{language}: {of_language.characters:,} characters, "
                    f"{of_language.sampled_characters:,} sampled"
                )
            lines: Iterable[str] = Chained(sampled.values())
        else:
            lines = documents[""]
        trained = train_tokenizer(
            lines, model_type=self.model_type, vocab_size=self.vocab_size, lowercase=lowercase
        )
        save_tokenizer(trained, self.output)
        print(f"{trained.get_vocab_size()} tokens in {self.output}")


@dataclass(frozen=True, kw_only=True)
class Tokens(Command):
    """Count how many tokens tokenizers need for a word, by language.

    The result is a table and a plot of tokens per word (fertility) and of characters per token. A word is a run of
    letters, marks and digits by Unicode's default word boundaries (UAX 29). For scripts without spaces between words
    (Han, Kana, Thai, Lao, Tibetan, Myanmar, Khmer) only characters per token are counted.

    Examples:
    fastenc tokens tokenizer other --language en=en.txt --language th=th.txt
    """

    tokenizers: tuple[str, ...] = argument(
        "Folders with a tokenizer.json, of a tokenizer or a model."
    )
    language: tuple[str, ...] = option((), LANGUAGE)
    text: str | None = option(None, COLUMN, "-t")
    quoting: str | None = option(None, QUOTING)
    output: Path = option(Path("tokens"), "Folder for tokens.json and tokens.png.", "-o")

    def run(self) -> None:
        if not self.language:
            raise ValueError("tokens are counted by language: give --language name=file, got none")
        require("matplotlib", extra="plots")  # before the texts are read
        make_writable(self.output)
        documents = read_languages(language_files(list(self.language)), self.text, self.quoting)
        results: dict[str, dict[str, Fertility]] = {}
        for folder in self.tokenizers:
            loaded = load_tokenizer(folder)
            results[folder] = {
                language: measure_fertility(loaded, texts) for language, texts in documents.items()
            }
        output = self.output
        plot_fertility(results, output / "tokens.png")
        content = {
            name: {language: counts.as_json() for language, counts in counts_of.items()}
            for name, counts_of in results.items()
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_text_atomically(output / "tokens.json", text)
        _print_fertility(results, list(documents))
        print(f"tokens.json and tokens.png in {output}")


def _print_fertility(results: dict[str, dict[str, Fertility]], languages: list[str]) -> None:
    table = require("rich.table", extra="train").Table(title="Tokens per word, by language")
    for heading in ("language", "tokenizer", "words", "tokens/word", "characters/token", "unknown"):
        table.add_column(
            heading, justify="left" if heading in ("language", "tokenizer") else "right"
        )
    for language in languages:
        for name, counts_of in results.items():
            counts = counts_of[language]
            per_word = "-" if counts.tokens_per_word is None else f"{counts.tokens_per_word:.3f}"
            words = "-" if counts.words is None else f"{counts.words:,}"
            row = (words, per_word, f"{counts.characters_per_token:.2f}")
            table.add_row(language, name, *row, f"{counts.unknown_share:.2%}")
    require("rich.console", extra="train").Console().print(table)


@dataclass(frozen=True, kw_only=True)
class Prepare(Command):
    """Tokenise texts into a store that `fastenc pretrain` reads.

    Training reads the store from the disk, so the texts need not fit into memory.

    Examples:
    fastenc prepare corpus/ --tokenizer tokenizer --processes 8 -o store
    fastenc prepare --language en=en/ --language mt=mt/ --tokenizer tokenizer -o store
    """

    texts: tuple[str, ...] = argument(TEXTS, default=())
    output: Path = option(REQUIRED, "Folder for the store.", "-o")
    tokenizer: str = option(REQUIRED, "Folder with a tokenizer.json.")
    language: tuple[str, ...] = option((), LANGUAGE)
    text: str | None = option(None, COLUMN, "-t")
    quoting: str | None = option(None, QUOTING)
    processes: int = option(1, "Number of processes that tokenise.")
    shard_characters: int = option(
        SHARD_CHARACTERS, "About this many characters of text form a shard."
    )
    resume: bool = option(False, "Continue an unfinished store in the output folder.")

    def run(self) -> None:
        files = _files(self.texts, self.language)
        store = write_store(
            self.output,
            {
                language: FileTexts(paths, self.text, self.quoting)
                for language, paths in files.items()
            },
            load_tokenizer(self.tokenizer),
            processes=self.processes,
            shard_characters=self.shard_characters,
            resume=self.resume,
        )
        empty = store.manifest["empty documents"]
        print(
            f"{store.tokens:,} tokens in {len(store.shards)} shards in {self.output}; {empty} documents were empty"
        )


@dataclass(frozen=True, kw_only=True)
class Clean(Command):
    """Drop duplicates and bad documents, and report why.

    A datatrove pipeline cleans the files, --processes of them in parallel. The steps are: gopher (Gopher's rules on
    repetition and quality), c4 (C4's rules on lines and documents), fineweb (FineWeb's rules on lines), exact
    (duplicates with the same words) and near (near-duplicates by MinHash). The same pipeline can run on Slurm or Ray:
    --script prints a program for that.

    Examples:
    fastenc clean crawl.jsonl.gz -o clean --english
    fastenc clean --language en=en/ --language mt=mt/ --steps exact,near --processes 8 -o clean
    fastenc clean --language en=en/ -o clean --script slurm > clean.py
    """

    texts: tuple[str, ...] = argument(TEXTS, default=())
    output: Path = option(
        REQUIRED,
        "Folder for the result: a folder of texts for each language, and report.json.",
        "-o",
    )
    language: tuple[str, ...] = option((), LANGUAGE)
    text: str | None = option(None, COLUMN, "-t")
    quoting: str | None = option(None, QUOTING)
    steps: str = option("gopher,c4,fineweb,exact,near", "Steps to run, separated by commas.")
    english: bool = option(
        False,
        "Also require punctuation marks at the end of lines (C4, FineWeb) and two English stop words (Gopher).",
    )
    bad_words: Path | None = option(
        None, "File with a word on each line; documents that contain one of them are dropped."
    )
    processes: int = option(1, "Number of files that are cleaned in parallel.")
    resume: bool = option(False, "Continue an unfinished run in the output folder.")
    script: str | None = option(
        None, "slurm or ray: only print a program that runs the pipeline there."
    )

    def run(self) -> None:
        require("datatrove", extra="clean")
        from fastenc.data.cleaning import cleaning_stages, executor_script
        from fastenc.data.cleaning_run import run_locally

        lines = [] if self.bad_words is None else numbered_lines(self.bad_words)
        settings: dict[str, Any] = {
            "files": _files(self.texts, self.language),
            "steps": self.steps.split(","),
            "english": self.english,
            "bad_words": sorted({line.strip() for _, line in lines} - {""}),
            "column": self.text,
            "quoting": self.quoting,
        }
        stages = cleaning_stages(str(self.output), **settings)
        if self.script is not None:
            print(executor_script(self.script, str(self.output), settings), end="")
            return
        report = run_locally(stages, self.output, settings, self.processes, self.resume)
        for why, number in report["dropped"].items():
            print(f"{number:>9,}  {why}")
        documents = report["documents"]
        print(f"{documents['kept']:,} of {documents['read']:,} documents kept in {self.output}")


def _files(texts: tuple[str, ...], languages: tuple[str, ...]) -> dict[str, list[str]]:
    """{language: files}; the language is "" if only texts are given."""
    if bool(texts) == bool(languages):
        raise ValueError(
            f"give either texts or --language name=file, got {'both' if texts else 'neither'}"
        )
    if languages:
        return language_files(list(languages))
    return {"": [file for path in texts for file in text_files(path)]}
