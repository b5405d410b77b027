"""What the commands before pretraining do: tokenizer, tokens, prepare and clean."""

import json
from collections.abc import Iterable
from pathlib import Path

from fastenc._extras import require
from fastenc._files import write_atomically
from fastenc.data import (
    language_files,
    measure_fertility,
    read_languages,
    sample_lines,
    train_tokenizer,
    write_store,
)
from fastenc.data.clean_files import clean_files
from fastenc.data.cleaning import Cleaner
from fastenc.data.fertility import Fertility, plot_fertility
from fastenc.data.languages import Chained, text_files
from fastenc.data.readers import FileTexts, numbered_lines
from fastenc.models import load_tokenizer, save_tokenizer

Arguments = list[str] | None


def tokenizer(
    texts: Arguments,
    languages: Arguments,
    column: str | None,
    output: Path,
    kind: str,
    vocab_size: int,
    lowercase: bool | None,
    *,
    alpha: float,
    seed: int,
) -> None:
    files = _files(texts, languages)
    documents = {language: FileTexts(paths, column) for language, paths in files.items()}
    if languages:
        drawn = sample_lines(documents, alpha=alpha, seed=seed)
        lowercase = bool(lowercase)
        for language, own in drawn.items():
            print(f"{language}: {own.characters:,} characters, drawn {own.drawn:,}")
        lines: Iterable[str] = Chained(drawn.values())
    else:
        lines = documents[""]
    trained = train_tokenizer(lines, kind=kind, vocab_size=vocab_size, lowercase=lowercase)
    save_tokenizer(trained, output)
    print(f"{trained.get_vocab_size()} tokens in {output}")


def tokens(tokenizers: list[str], languages: Arguments, column: str | None, output: Path) -> None:
    if not languages:
        raise ValueError("tokens are counted by language: give --language name=file, got none")
    documents = read_languages(language_files(languages), column)
    results: dict[str, dict[str, Fertility]] = {}
    for folder in tokenizers:
        loaded = load_tokenizer(folder)
        results[folder] = {
            language: measure_fertility(loaded, own) for language, own in documents.items()
        }
    output.mkdir(parents=True, exist_ok=True)
    plot_fertility(results, output / "tokens.png")
    content = {
        name: {language: counts.as_json() for language, counts in own.items()}
        for name, own in results.items()
    }
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_atomically(output / "tokens.json", lambda path: path.write_text(text, encoding="utf-8"))
    table = require("rich.table", extra="train").Table(title="Tokens per word, by language")
    for heading in ("language", "tokenizer", "words", "tokens/word", "characters/token", "unknown"):
        table.add_column(
            heading, justify="left" if heading in ("language", "tokenizer") else "right"
        )
    for language in documents:
        for name, own in results.items():
            counts = own[language]
            per_word = "-" if counts.tokens_per_word is None else f"{counts.tokens_per_word:.3f}"
            words = "-" if counts.words is None else f"{counts.words:,}"
            row = (words, per_word, f"{counts.characters_per_token:.2f}")
            table.add_row(language, name, *row, f"{counts.unknown_share:.2%}")
    require("rich.console", extra="train").Console().print(table)
    print(f"tokens.json and tokens.png in {output}")


def prepare(
    texts: Arguments,
    languages: Arguments,
    column: str | None,
    output: Path,
    tokenizer_folder: str,
    processes: int,
    shard_characters: int,
    resume: bool,
) -> None:
    streams = {
        language: FileTexts(paths, column) for language, paths in _files(texts, languages).items()
    }
    store = write_store(
        output,
        streams,
        load_tokenizer(tokenizer_folder),
        processes=processes,
        shard_characters=shard_characters,
        resume=resume,
    )
    empty = store.manifest["empty documents"]
    print(
        f"{store.tokens:,} tokens in {len(store.shards)} shards in {output}; {empty} documents were empty"
    )


def clean(
    texts: Arguments,
    languages: Arguments,
    column: str | None,
    output: Path,
    steps: list[str],
    threshold: float,
    english: bool,
    bad_words: Path | None,
    resume: bool,
) -> None:
    files = _files(texts, languages)
    listed = set() if bad_words is None else {line for _, line in numbered_lines(bad_words) if line}
    settings = {
        "steps": steps,
        "threshold": threshold,
        "english": english,
        "bad words": sorted(listed),
    }
    cleaner = Cleaner(steps, threshold=threshold, english=english, bad_words=listed)
    streams = {language: FileTexts(paths, column) for language, paths in files.items()}
    report = clean_files(cleaner, streams, output, settings, resume=resume)
    for why, number in report["dropped"].items():
        print(f"{number:>9,}  {why}   e.g. {report['examples'][why][0][:60]!r}")
    print(f"{report['documents']['kept']:,} of {report['documents']['read']:,} documents kept")


def _files(texts: Arguments, languages: Arguments) -> dict[str, list[str]]:
    """{language: files}, "" for text of no particular one."""
    if bool(texts) == bool(languages):
        raise ValueError("give texts, or --language name=file for each of several; one of the two")
    if languages:
        return language_files(languages)
    return {"": [file for path in texts or [] for file in text_files(path)]}
