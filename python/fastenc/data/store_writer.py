"""Writes a token store. Several processes tokenise shards; a shard's folder gets its name when it is complete."""

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
from typing import NamedTuple

from fastenc._base.extras import require
from fastenc._base.files import write_folder, write_text_atomically
from fastenc._base.json_values import JsonObject
from fastenc._base.progress import progress_bar
from fastenc._base.resumption import check_begun_with
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
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_files import load_tokenizer, save_tokenizer
from fastenc.text.tokenizer_like import TokenizerLike

SHARD_CHARACTERS = 2**25
NO_TEXT = "there is no text to prepare, every document is empty: give documents with text"


class _ShardTexts(NamedTuple):
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
    tokenizer: TokenizerLike,
    *,
    processes: int = 1,
    shard_characters: int = SHARD_CHARACTERS,
    resume: bool = False,
    show_progress: bool | None = None,
) -> TokenStore:
    """Tokenise documents into shards of about ``shard_characters`` characters.

    A killed call loses the shards that it was writing. With ``resume``, the texts are read again, finished shards are
    kept if their texts and files have not changed, and the other shards are written. The result depends neither on the
    number of processes nor on interruptions. Memory: the texts of a few shards.

    Args:
        folder: the store to write.
        texts: {language: documents}; {"": documents} if languages do not matter.
        tokenizer: a ``tokenizers.Tokenizer``. Token ids have 2 bytes for vocabularies of at most 65,536 tokens, else 4.
        processes: number of processes that tokenise; 1 tokenises in this process.
        shard_characters: a shard ends with the document that reaches this number of characters.
        resume: continue an unfinished store.
        show_progress: None shows a bar if stderr is a terminal.
    Raises: ValueError if the folder is not empty and ``resume`` is False, if the tokenizer, the settings or the texts
        are not those that the store was begun with, or if all documents are empty. In the last case no folder is left
        behind.
    """
    folder = Path(folder)
    for name, value in (("processes", processes), ("shard_characters", shard_characters)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}: give more")
    if tokenizer.get_vocab_size() <= len(special_tokens(tokenizer).all):
        raise ValueError(
            "the tokenizer must have tokens beside its special ones, got a vocabulary of "
            f"{tokenizer.get_vocab_size()}: train or load a larger one"
        )
    settings: JsonObject = {
        "format": FORMAT,
        "tokenizer": fingerprint(tokenizer),
        "vocab_size": tokenizer.get_vocab_size(),
        "shard_characters": shard_characters,
        "languages": list(texts),
    }
    _check_begun(folder, settings, resume)
    counts = {"empty documents": 0}
    all_texts = _texts_of_shards(texts, shard_characters, counts)
    if (first := next(all_texts, None)) is None:
        raise ValueError(NO_TEXT)
    _begin(folder, settings, tokenizer)
    bar = progress_bar(chain([first], all_texts), "preparing", "shard", show_progress)
    shards = list(_write_shards(folder, bar, tokenizer, processes))
    # No shard has a token if, for example, all characters are control characters.
    if not any(entry["tokens"] for entry in shards):
        shutil.rmtree(folder)
        raise ValueError(NO_TEXT)
    for path in folder.glob("shard-*"):
        if path.name not in {entry["name"] for entry in shards}:
            raise ValueError(
                f"{path} was written from a text that is not given now: give the texts that the store was begun with, "
                "or another output"
            )
    text = json.dumps({**settings, **counts, "shards": shards}, indent=1)
    manifest = folder / MANIFEST
    if not (manifest.is_file() and manifest.read_text(encoding="utf-8") == text):
        # Its extents are those of the old shards.
        shutil.rmtree(folder / "packed", ignore_errors=True)
    write_text_atomically(folder / MANIFEST, text)
    return TokenStore(folder)


def _check_begun(folder: Path, settings: JsonObject, resume: bool) -> None:
    """Raises: ValueError if the folder holds files and cannot be resumed with these settings."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / SETTINGS).is_file():
        raise ValueError(
            f"{folder} must be an empty folder or a store, got one with other files: give another output"
        )
    if not resume:
        raise ValueError(
            f"{folder} must be empty, got a store: continue it with resume=True, or give another output"
        )
    begun = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    check_begun_with(begun, settings, folder, "give another output")


def _begin(folder: Path, settings: JsonObject, tokenizer: TokenizerLike) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / SETTINGS, json.dumps(settings, indent=1))
    save_tokenizer(tokenizer, folder)


def _texts_of_shards(
    texts: Mapping[str, Iterable[str]], shard_characters: int, counts: dict[str, int]
) -> Iterator[_ShardTexts]:
    """The texts of each shard, in order. Empty documents are counted in ``counts`` and left out."""
    number = 0
    for language, documents in texts.items():
        shard, size = _ShardTexts(number, language, []), 0
        for document in documents:
            if not document.strip():
                counts["empty documents"] += 1
                continue
            shard.documents.append(document)
            size += len(document)
            if size >= shard_characters:
                yield shard
                number += 1
                shard, size = _ShardTexts(number, language, []), 0
        if shard.documents:
            yield shard
            number += 1


def _write_shards(
    folder: Path, all_texts: Iterable[_ShardTexts], tokenizer: TokenizerLike, processes: int
) -> Iterator[JsonObject]:
    """The manifest's entries of the shards, in order. The texts of at most ``processes + 2`` shards are in memory."""
    if processes == 1:
        for texts in all_texts:
            yield _kept(folder, texts) or _write_shard(folder, texts, tokenizer)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    waiting: deque = deque()
    with ProcessPoolExecutor(processes, context, _start_worker, (folder,)) as workers:
        try:
            for texts in all_texts:
                kept = _kept(folder, texts)
                waiting.append(kept or workers.submit(_write_in_worker, folder, texts))
                if len(waiting) >= processes + 2:
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        finally:
            workers.shutdown(cancel_futures=True)


def _result(entry: JsonObject) -> JsonObject:
    """The manifest's entry of a shard that was kept (a dict), or that a worker writes (a future)."""
    return entry if isinstance(entry, dict) else entry.result()


def _kept(folder: Path, texts: _ShardTexts) -> JsonObject | None:
    """The manifest's entry of a shard that is already finished, else None. A shard with damaged files is removed.

    Raises: ValueError if the shard was written from other texts.
    """
    shard = folder / texts.name
    if not shard.is_dir():
        return None
    try:
        entry = json.loads((shard / SHARD).read_text(encoding="utf-8"))
        intact = all(
            file_checksum(shard / f"{array_name}.npy") == checksum
            for array_name, (_, checksum) in entry["files"].items()
        )
    except (OSError, ValueError):
        intact = False
    if not intact:
        shutil.rmtree(shard)
        return None
    if entry["source"] != texts.checksum():
        raise ValueError(
            f"{shard} was written from other texts than those given now: give the same texts in the same order, or "
            "another output"
        )
    return entry


def _write_shard(folder: Path, texts: _ShardTexts, tokenizer: TokenizerLike) -> JsonObject:
    """Write a shard and return its entry in the manifest."""
    numpy = require("numpy", extra="train")
    text = tokenize_documents(texts.documents, tokenizer, show_progress=False)
    small = tokenizer.get_vocab_size() <= 2**16
    arrays = {
        "tokens": numpy.asarray(text.tokens, dtype=numpy.uint16 if small else numpy.uint32),
        "sentences": numpy.asarray(text.sentence_ends, dtype=numpy.int64),
        "documents": numpy.asarray(text.document_ends, dtype=numpy.int64),
    }
    entry = {
        "name": texts.name,
        "language": texts.language,
        "documents": len(text.document_ends),
        "sentences": len(text.sentence_ends),
        "tokens": len(text.tokens),
        "source": texts.checksum(),
    }

    def write(hidden: Path) -> None:
        files = {}
        for array_name, values in arrays.items():
            path = hidden / f"{array_name}.npy"
            numpy.save(path, values)
            files[array_name] = path.stat().st_size, file_checksum(path)
        entry["files"] = files
        (hidden / SHARD).write_text(json.dumps(entry, indent=1), encoding="utf-8")

    write_folder(folder / texts.name, write)
    return json.loads(json.dumps(entry))


_tokenizer: TokenizerLike | None = None  # of this worker process


def _start_worker(folder: Path) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes already use the cores
    _tokenizer = load_tokenizer(folder)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker with its parent. A killed parent cannot stop its workers, which would wait for work forever."""
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def _write_in_worker(folder: Path, texts: _ShardTexts) -> JsonObject:
    assert _tokenizer is not None  # _start_worker has loaded it
    return _write_shard(folder, texts, _tokenizer)
