"""fastenc tokenizer, tokens, clean and prepare."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastenc._extras import require
from fastenc._files import write_atomically
from fastenc._options import REQUIRED, argument, option
from fastenc.cli.options import Command
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
from fastenc.data.readers import FileTexts, numbered_lines
from fastenc.data.store_writer import SHARD_CHARACTERS
from fastenc.models import load_tokenizer, save_tokenizer
from fastenc.tasks.base import QUOTING

TEXTS = "Texts: .txt, .tsv, .csv, .jsonl (.gz), folders of them, or a data set."
LANGUAGE = "name=file or name=folder, once or more for each of several languages."
COLUMN = "Column of the text in a table. Default: text."


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Command):
    """Train a tokenizer on texts of one language or several.

    With --language the lines of each are drawn with probability p^alpha / sum p^alpha, p being its share of all
    characters, so that small languages get more of the vocabulary.

    Examples:
    fastenc tokenizer wiki.txt.gz -o tokenizer
    fastenc tokenizer --language en=en.txt.gz --language mt=maltese/ --kind unigram -o tokenizer
    """

    texts: tuple[str, ...] = argument(TEXTS, default=())
    output: Path = option(REQUIRED, "Folder for the tokenizer.", "-o")
    language: tuple[str, ...] = option((), LANGUAGE)
    column: str | None = option(None, COLUMN)
    quoting: str | None = option(None, QUOTING)
    kind: str = option("wordpiece", "wordpiece, bpe or unigram.")
    vocab_size: int = option(16000, "Tokens of the vocabulary.")
    lowercase: bool | None = option(
        None,
        "Small letters without accents alone. Default: for wordpiece of one language.",
    )
    alpha: float = option(ALPHA, "Smoothing of the languages' shares; 1 keeps their sizes.")
    seed: int = option(0, "Seed of the languages' lines.")

    def run(self) -> None:
        files = _files(self.texts, self.language)
        documents = {
            language: FileTexts(paths, self.column, self.quoting)
            for language, paths in files.items()
        }
        lowercase = self.lowercase
        if self.language:
            drawn = sample_lines(documents, alpha=self.alpha, seed=self.seed)
            lowercase = bool(lowercase)
            for language, lines_of in drawn.items():
                print(f"{language}: {lines_of.characters:,} characters, drawn {lines_of.drawn:,}")
            lines: Iterable[str] = Chained(drawn.values())
        else:
            lines = documents[""]
        trained = train_tokenizer(
            lines, kind=self.kind, vocab_size=self.vocab_size, lowercase=lowercase
        )
        save_tokenizer(trained, self.output)
        print(f"{trained.get_vocab_size()} tokens in {self.output}")


@dataclass(frozen=True, kw_only=True)
class Tokens(Command):
    """Count the tokens that tokenizers make of several languages.

    Tokens per word, and characters per token. A word is a run of letters, marks and digits by Unicode's default word
    boundaries (UAX 29). Scripts without spaces (Han, Kana, Thai, Lao, Tibetan, Myanmar, Khmer) have characters per
    token only.

    Examples:
    fastenc tokens tokenizer other --language en=en.txt --language th=th.txt
    """

    tokenizers: tuple[str, ...] = argument(
        "Folders with a tokenizer.json, of tokenizers or models."
    )
    language: tuple[str, ...] = option((), LANGUAGE)
    column: str | None = option(None, COLUMN)
    output: Path = option(Path("tokens"), "Folder for tokens.json and tokens.png.", "-o")

    def run(self) -> None:
        if not self.language:
            raise ValueError("tokens are counted by language: give --language name=file, got none")
        documents = read_languages(language_files(list(self.language)), self.column)
        results: dict[str, dict[str, Fertility]] = {}
        for folder in self.tokenizers:
            loaded = load_tokenizer(folder)
            results[folder] = {
                language: measure_fertility(loaded, texts) for language, texts in documents.items()
            }
        output = self.output
        output.mkdir(parents=True, exist_ok=True)
        plot_fertility(results, output / "tokens.png")
        content = {
            name: {language: counts.as_json() for language, counts in found.items()}
            for name, found in results.items()
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_atomically(
            output / "tokens.json", lambda path: path.write_text(text, encoding="utf-8")
        )
        _print_fertility(results, list(documents))
        print(f"tokens.json and tokens.png in {output}")


def _print_fertility(results: dict[str, dict[str, Fertility]], languages: list[str]) -> None:
    table = require("rich.table", extra="train").Table(title="Tokens per word, by language")
    for heading in ("language", "tokenizer", "words", "tokens/word", "characters/token", "unknown"):
        table.add_column(
            heading, justify="left" if heading in ("language", "tokenizer") else "right"
        )
    for language in languages:
        for name, found in results.items():
            counts = found[language]
            per_word = "-" if counts.tokens_per_word is None else f"{counts.tokens_per_word:.3f}"
            words = "-" if counts.words is None else f"{counts.words:,}"
            row = (words, per_word, f"{counts.characters_per_token:.2f}")
            table.add_row(language, name, *row, f"{counts.unknown_share:.2%}")
    require("rich.console", extra="train").Console().print(table)


@dataclass(frozen=True, kw_only=True)
class Prepare(Command):
    """Tokenise texts into a store that `fastenc pretrain` reads.

    Training reads the store from the disk, without loading it.

    Examples:
    fastenc prepare corpus/ --tokenizer tokenizer --processes 8 -o store
    fastenc prepare --language en=en/ --language mt=mt/ --tokenizer tokenizer -o store
    """

    texts: tuple[str, ...] = argument(TEXTS, default=())
    output: Path = option(REQUIRED, "Folder for the store.", "-o")
    tokenizer: str = option(REQUIRED, "Folder with a tokenizer.json.")
    language: tuple[str, ...] = option((), LANGUAGE)
    column: str | None = option(None, COLUMN)
    quoting: str | None = option(None, QUOTING)
    processes: int = option(1, "Processes that tokenise.")
    shard_characters: int = option(SHARD_CHARACTERS, "Characters of text in a shard.")
    resume: bool = option(False, "Go on with a store that was begun in the output folder.")

    def run(self) -> None:
        files = _files(self.texts, self.language)
        store = write_store(
            self.output,
            {
                language: FileTexts(paths, self.column, self.quoting)
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

    A datatrove pipeline; each file is a task, and --processes run at once. A corpus that outgrows a machine is cleaned
    by the same pipeline on Slurm or Ray: --script prints a program for it.

    Examples:
    fastenc clean crawl.jsonl.gz -o clean --english
    fastenc clean --language en=en/ --language mt=mt/ --steps exact,near --processes 8 -o clean
    fastenc clean --language en=en/ -o clean --script slurm > clean.py
    """

    texts: tuple[str, ...] = argument(TEXTS, default=())
    output: Path = option(
        REQUIRED, "Folder for a folder of texts a language and report.json.", "-o"
    )
    language: tuple[str, ...] = option((), LANGUAGE)
    column: str | None = option(None, COLUMN)
    quoting: str | None = option(None, QUOTING)
    steps: str = option("gopher,c4,fineweb,exact,near", "Some of these steps, with commas between.")
    english: bool = option(
        False, "Also ask for marks at the end of lines (C4) and two English stop words (Gopher)."
    )
    bad_words: Path | None = option(None, "File of words, one a line, that drop a document.")
    processes: int = option(1, "Files that are cleaned at once.")
    resume: bool = option(False, "Go on with a cleaning that was killed.")
    script: str | None = option(None, "slurm or ray: print a program that cleans there, and stop.")

    def run(self) -> None:
        require("datatrove", extra="clean")
        from fastenc.data.cleaning import cleaning_stages, executor_script, run_locally

        bad = [] if self.bad_words is None else [line for _, line in numbered_lines(self.bad_words)]
        settings: dict[str, Any] = {
            "files": _files(self.texts, self.language),
            "steps": self.steps.split(","),
            "english": self.english,
            "bad_words": sorted({word for word in bad if word}),
            "column": self.column,
            "quoting": self.quoting,
        }
        if self.script is not None:
            print(executor_script(self.script, str(self.output), settings), end="")
            return
        stages = cleaning_stages(str(self.output), **settings)
        report = run_locally(stages, self.output, settings, self.processes, self.resume)
        for why, number in report["dropped"].items():
            print(f"{number:>9,}  {why}")
        documents = report["documents"]
        print(f"{documents['kept']:,} of {documents['read']:,} documents kept in {self.output}")


def _files(texts: tuple[str, ...], languages: tuple[str, ...]) -> dict[str, list[str]]:
    """{language: files}, "" for text of no particular one."""
    if bool(texts) == bool(languages):
        raise ValueError("give texts, or --language name=file for each of several; one of the two")
    if languages:
        return language_files(list(languages))
    return {"": [file for path in texts for file in text_files(path)]}
