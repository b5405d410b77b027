"""Writes a token store: several processes tokenise the shards, and each shard is renamed into place when complete."""

import hashlib
import json
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from fastenc._extras import require
from fastenc._files import write_atomically, write_folder
from fastenc._progress import progress_bar
from fastenc.data.sentences import tokenize_documents
from fastenc.data.store import (
    FORMAT,
    MANIFEST,
    SETTINGS,
    SHARD,
    TokenStore,
    file_checksum,
    fingerprint,
)
from fastenc.models.tokenizers import load_tokenizer, save_tokenizer, special_tokens

SHARD_CHARACTERS = 2**25
NO_TEXT = "there is no text to prepare: every document is empty"


class _Piece(NamedTuple):
    """The texts of one shard."""

    number: int
    language: str
    documents: list[str]

    @property
    def name(self) -> str:
        return f"shard-{self.number:05d}"

    def checksum(self) -> str:
        digest = hashlib.sha256(self.language.encode())
        for document in self.documents:
            digest.update(document.encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()


def write_store(
    folder: str | Path,
    texts: Mapping[str, Iterable[str]],
    tokenizer: Any,
    *,
    processes: int = 1,
    shard_characters: int = SHARD_CHARACTERS,
    resume: bool = False,
    show_progress: bool | None = None,
) -> TokenStore:
    """Tokenise documents into shards of about ``shard_characters`` characters.

    A killed writer loses the shards that it was writing. ``resume`` reads the texts again, keeps every finished shard
    whose texts and files have not changed, and writes the others. The result depends neither on the number of
    processes nor on kills. Memory: the texts of a few shards.

    Args:
        texts: {language: documents}; {"": documents} if languages do not matter.
        tokenizer: its tokens are stored, 2 bytes each for vocabularies up to 65,536, else 4.
        processes: number of processes that tokenise; 1 tokenises in this process.
    Raises: ValueError if the folder is not empty and ``resume`` is False, if the tokenizer, the settings or the texts
        are not those that the store was begun with, or if there is no text; then no folder is left behind.
    """
    folder = Path(folder)
    for name, value in (("processes", processes), ("shard_characters", shard_characters)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if tokenizer.get_vocab_size() <= len(special_tokens(tokenizer).all):
        raise ValueError(
            "the tokenizer must have tokens beside its special ones, got a vocabulary of "
            f"{tokenizer.get_vocab_size()}: train or load a larger one"
        )
    settings = {
        "format": FORMAT,
        "tokenizer": fingerprint(tokenizer),
        "vocab_size": tokenizer.get_vocab_size(),
        "shard_characters": shard_characters,
        "languages": list(texts),
    }
    _check_begun(folder, settings, resume)
    counted = {"empty documents": 0}
    pieces = _pieces(texts, shard_characters, counted)
    if (first := next(pieces, None)) is None:
        raise ValueError(NO_TEXT)
    _begin(folder, settings, tokenizer)
    bar = progress_bar(chain([first], pieces), "preparing", "shard", show_progress)
    shards = list(_write_shards(folder, bar, tokenizer, processes))
    if not sum(entry["tokens"] for entry in shards):  # such as text of control characters only
        shutil.rmtree(folder)
        raise ValueError(NO_TEXT)
    for path in folder.glob("shard-*"):
        if path.name not in {entry["name"] for entry in shards}:
            raise ValueError(
                f"{path} holds a shard of text that is no longer there: give the texts it was begun with, or another "
                "output"
            )
    text = json.dumps({**settings, **counted, "shards": shards}, indent=1)
    manifest = folder / MANIFEST
    if not (manifest.is_file() and manifest.read_text(encoding="utf-8") == text):
        shutil.rmtree(folder / "packed", ignore_errors=True)  # it indexes other shards
    write_atomically(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))
    return TokenStore(folder)


def _check_begun(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / SETTINGS).is_file():
        raise ValueError(f"{folder} must be an empty folder or a store, got one with files")
    if not resume:
        raise ValueError(f"{folder} holds a store: resume it, or give another output")
    begun = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    for name, value in settings.items():
        if begun.get(name) != value:
            raise ValueError(
                f"{folder} was begun with {name}={begun.get(name)!r}, now it is {value!r}: use the same, or "
                "another output"
            )


def _begin(folder: Path, settings: dict[str, Any], tokenizer: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(settings, indent=1)
    write_atomically(folder / SETTINGS, lambda path: path.write_text(text, encoding="utf-8"))
    save_tokenizer(tokenizer, folder)


def _pieces(
    texts: Mapping[str, Iterable[str]], shard_characters: int, counted: dict[str, int]
) -> Iterator[_Piece]:
    number = 0
    for language, documents in texts.items():
        piece, size = _Piece(number, language, []), 0
        for document in documents:
            if not document.strip():
                counted["empty documents"] += 1
                continue
            piece.documents.append(document)
            size += len(document)
            if size >= shard_characters:
                yield piece
                number += 1
                piece, size = _Piece(number, language, []), 0
        if piece.documents:
            yield piece
            number += 1


def _write_shards(
    folder: Path, pieces: Iterable[_Piece], tokenizer: Any, processes: int
) -> Iterator[dict[str, Any]]:
    """The manifest's entries of the shards in order. At most two more shards than processes are in work."""
    if processes == 1:
        for piece in pieces:
            yield _kept(folder, piece) or _write_shard(folder, piece, tokenizer)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    waiting: deque = deque()
    with ProcessPoolExecutor(processes, context, _start_worker, (folder,)) as workers:
        try:
            for piece in pieces:
                kept = _kept(folder, piece)
                waiting.append(kept or workers.submit(_work, folder, piece))
                if len(waiting) >= processes + 2:
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        finally:
            workers.shutdown(cancel_futures=True)


def _result(entry: Any) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else entry.result()


def _kept(folder: Path, piece: _Piece) -> dict[str, Any] | None:
    """The entry of a shard that is finished. A shard with damaged files is removed.

    Raises: ValueError when it was written from other texts.
    """
    shard = folder / piece.name
    if not shard.is_dir():
        return None
    try:
        entry = json.loads((shard / SHARD).read_text(encoding="utf-8"))
        sound = all(
            file_checksum(shard / f"{part}.npy") == checksum
            for part, (_, checksum) in entry["files"].items()
        )
    except (OSError, ValueError):
        sound = False
    if not sound:
        shutil.rmtree(shard)
        return None
    if entry["source"] != piece.checksum():
        raise ValueError(
            f"{shard} was written from other texts than those given now: give the same texts in the same order, or "
            "another output"
        )
    return entry


def _write_shard(folder: Path, piece: _Piece, tokenizer: Any) -> dict[str, Any]:
    numpy = require("numpy", extra="train")
    text = tokenize_documents(piece.documents, tokenizer, show_progress=False)
    small = tokenizer.get_vocab_size() <= 2**16
    arrays = {
        "tokens": numpy.asarray(text.tokens, dtype=numpy.uint16 if small else numpy.uint32),
        "sentences": numpy.asarray(text.sentence_ends, dtype=numpy.int64),
        "documents": numpy.asarray(text.document_ends, dtype=numpy.int64),
    }
    entry = {
        "name": piece.name,
        "language": piece.language,
        "documents": len(text.document_ends),
        "sentences": len(text.sentence_ends),
        "tokens": len(text.tokens),
        "source": piece.checksum(),
    }

    def write(hidden: Path) -> None:
        files = {}
        for part, values in arrays.items():
            path = hidden / f"{part}.npy"
            numpy.save(path, values)
            files[part] = path.stat().st_size, file_checksum(path)
        entry["files"] = files
        (hidden / SHARD).write_text(json.dumps(entry, indent=1), encoding="utf-8")

    write_folder(folder / piece.name, write)
    return json.loads(json.dumps(entry))


_tokenizer: Any = None  # a worker's own


def _start_worker(folder: Path) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _tokenizer = load_tokenizer(folder)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent cannot tell its workers to stop; they would wait for work for ever."""
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def _work(folder: Path, piece: _Piece) -> dict[str, Any]:
    return _write_shard(folder, piece, _tokenizer)
