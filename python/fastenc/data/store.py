"""A token store: a tokenised corpus on disk that need not fit in memory. Reads it and packs it into training examples.

store/manifest.json                      settings, and the shards with their counts and checksums; written last
store/settings.json                      settings; written first
store/tokenizer.json                     the tokenizer
store/shard-00000/tokens.npy             uint16 or uint32, SentenceTokens.tokens
store/shard-00000/sentences.npy          int64, SentenceTokens.sentence_ends
store/shard-00000/documents.npy          int64, SentenceTokens.document_ends
store/shard-00000/shard.json             the shard's counts, language and checksums
store/packed/<packing>-<size>[-<seed>]/  extents of the examples; written when they are first used
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_folder
from fastenc._base.progress import progress_bar
from fastenc.data.batching import Group
from fastenc.data.blocks import check_block_size
from fastenc.data.languages import smoothed_shares
from fastenc.data.packings import PACKING_RULES
from fastenc.data.segments import NO_PAIR
from fastenc.data.sentences import SentenceTokens
from fastenc.text.special_tokens import SpecialTokens, special_tokens
from fastenc.text.tokenizer_files import load_tokenizer
from fastenc.text.tokenizer_like import TokenizerLike

FORMAT = 1
MANIFEST, SETTINGS, SHARD = "manifest.json", "settings.json", "shard.json"
ARRAYS = ("tokens", "sentences", "documents")  # files of a shard
# Int32 each, one row for each example.
COLUMNS = ("shard", "start", "split", "stop", "document", "length")
# One example in twenty of each language is held out, but at most about two thousand over all languages.
HELD_OUT_ONE_IN, HELD_OUT_LIMIT = 20, 2000


class TokenStore:
    """A finished store. Its manifest is read into memory; the other files are memory-mapped.

    Fields:
        manifest: the contents of manifest.json.
        shards: the manifest's entries of the shards that have tokens.
    Raises: ValueError if the folder is no store or an unfinished one, if its format is another one, or if a shard's
        file is missing or does not have its recorded size.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not is_store(folder):
            raise ValueError(
                f"{folder} must be a token store, got another folder or none: make one with fastenc prepare"
            )
        if not (self.folder / MANIFEST).is_file():
            raise ValueError(
                f"{folder} must be a finished token store, got an unfinished one: run fastenc prepare again with "
                "--resume"
            )
        self.manifest = _read_json(self.folder / MANIFEST)
        if self.manifest["format"] != FORMAT:
            raise ValueError(
                f"{folder} must be a token store of format {FORMAT}, got {self.manifest['format']}: prepare it again"
            )
        self.shards = [entry for entry in self.manifest["shards"] if entry["tokens"]]
        for entry in self.shards:
            for array_name, (size, _) in entry["files"].items():
                path = self._path(entry, array_name)
                actual = path.stat().st_size if path.is_file() else "no file"
                if actual != size:
                    raise _damaged(path, f"{size} bytes", actual)
        self._open: dict[int, SentenceTokens] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens of all shards."""
        return sum(entry["tokens"] for entry in self.shards)

    @property
    def languages(self) -> list[str]:
        """Names of the languages, in the order of their shards."""
        return list(dict.fromkeys(entry["language"] for entry in self.shards))

    def tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer`` that the store was written with."""
        return load_tokenizer(self.folder)

    def check_tokenizer(self, tokenizer: TokenizerLike, owner: str) -> None:
        """Compare a tokenizer with the store's.

        Args:
            owner: file or folder of the tokenizer, for the message.
        Raises: ValueError if the store was written with another tokenizer.
        """
        if (fingerprint_of := fingerprint(tokenizer)) != self.manifest["tokenizer"]:
            raise ValueError(
                f"{self.folder} holds tokens of another tokenizer (fingerprint {self.manifest['tokenizer'][:12]}) than "
                f"that of {owner} ({fingerprint_of[:12]}): prepare the texts with --tokenizer {owner}"
            )

    def shard(self, number: int) -> SentenceTokens:
        """A shard's tokens and ends, memory-mapped; ``number`` is an index of ``shards``."""
        if number not in self._open:
            numpy, entry = require("numpy", extra="train"), self.shards[number]
            try:
                # A plain array over the mapped memory is indexed faster than numpy.memmap, whose every slice is a new
                # memmap object.
                arrays = [
                    numpy.asarray(numpy.load(self._path(entry, array_name), mmap_mode="r"))
                    for array_name in ARRAYS
                ]
            except (OSError, ValueError) as error:
                raise _damaged(self._path(entry, "tokens"), "readable arrays", error) from error
            self._open[number] = SentenceTokens(*arrays)
        return self._open[number]

    def verify(self, number: int) -> None:
        """Raises: ValueError if the checksums of a shard's files are not those that were recorded."""
        entry = self.shards[number]
        for array_name, (_, expected) in entry["files"].items():
            path = self._path(entry, array_name)
            if (checksum := file_checksum(path)) != expected:
                raise _damaged(path, f"checksum {expected[:12]}", checksum[:12])

    def count_tokens(self) -> Tensor:
        """Number of occurrences of each token id: int64 (vocabulary,)."""
        counts = torch.zeros(self.manifest["vocab_size"], dtype=torch.int64)
        for number in range(len(self.shards)):
            tokens: Any = self.shard(number).tokens
            for start in range(0, len(tokens), 2**20):
                ids = torch.from_numpy(tokens[start : start + 2**20].astype("int64"))
                counts += torch.bincount(ids, minlength=len(counts))
        return counts

    def pack(
        self, packing: str, block_size: int, seed: int = 0, *, show_progress: bool | None = None
    ) -> Path:
        """Find the extents of all examples and write them to a folder. Later calls return the same folder.

        The checksums of every shard are verified first. No example crosses the end of a shard. The last examples of
        each language (one in twenty, at most about 2,000 over all languages) are held out.

        Args:
            packing: a name in ``PACKING_RULES``.
            block_size: largest number of tokens of an example, special tokens included.
            seed: of a packing with random lengths.
            show_progress: None shows a bar if stderr is a terminal.
        Raises: ValueError for an unknown packing, a block_size below 8, a damaged shard, or no example.
        """
        if packing not in PACKING_RULES:
            raise ValueError(
                f"packing must be one of {', '.join(PACKING_RULES)}, got {packing!r}: give one of them"
            )
        check_block_size(block_size)
        is_random = PACKING_RULES[packing].is_random
        key = (packing, block_size, seed) if is_random else (packing, block_size)
        folder = self.folder / "packed" / "-".join(map(str, key))
        if not folder.is_dir():
            numbers = progress_bar(range(len(self.shards)), "packing", "shard", show_progress)
            write_folder(
                folder, lambda hidden: self._pack(hidden, packing, block_size, seed, numbers)
            )
        return folder

    def _pack(self, folder: Path, packing: str, block_size: int, seed: int, numbers) -> None:
        per_language = dict.fromkeys(self.languages, 0)
        documents, special = 0, special_tokens(self.tokenizer())
        with open(folder / "all.bin", "wb") as file:
            for number in numbers:
                self.verify(number)
                text, entry = self.shard(number), self.shards[number]
                rng = Random(f"{seed} {number}")
                for row in _rows(text, packing, block_size, rng, number, documents, special):
                    row.tofile(file)
                    per_language[entry["language"]] += len(row) // len(COLUMNS)
                documents += len(text.document_ends)
        if not sum(per_language.values()):
            raise ValueError(NO_PAIR)
        limit = max(1, HELD_OUT_LIMIT // len(per_language))
        counts: dict[str, dict[str, int]] = {"train": {}, "held_out": {}}
        width = len(COLUMNS) * array("i").itemsize
        with (
            open(folder / "all.bin", "rb") as every,
            open(folder / "train.bin", "wb") as train,
            open(folder / "held_out.bin", "wb") as held_out,
        ):
            for language, count in per_language.items():
                held = min(count // HELD_OUT_ONE_IN, limit)
                counts["train"][language], counts["held_out"][language] = count - held, held
                _copy(every, train, (count - held) * width)
                _copy(every, held_out, held * width)
        (folder / "all.bin").unlink()
        (folder / "counts.json").write_text(json.dumps(counts, indent=1), encoding="utf-8")

    def examples(self, packing: str, block_size: int, seed: int = 0, subset: str = "train"):
        """The :class:`StoredExamples` of a packing, which :meth:`pack` makes first if it does not exist.

        Args:
            packing, block_size, seed: as in :meth:`pack`.
            subset: "train" or "held_out".
        """
        folder = self.pack(packing, block_size, seed)
        counts = _read_json(folder / "counts.json")[subset]
        return StoredExamples(self, packing, folder / f"{subset}.bin", counts)

    def _path(self, entry: dict[str, Any], array_name: str) -> Path:
        return self.folder / entry["name"] / f"{array_name}.npy"


class StoredExamples(Sequence):
    """Training examples of a store, read from disk when they are indexed.

    Fields:
        lengths: int32 (examples,), number of tokens of each example; memory-mapped.
        documents: numpy int32 (examples,), number of the document that each example begins in, ascending;
            memory-mapped.
        languages: {language: number of examples}; the examples are in this order.
    """

    def __init__(self, store: TokenStore, packing: str, path: Path, counts: dict[str, int]):
        self.store, self.rule = store, PACKING_RULES[packing]
        self.languages = {language: count for language, count in counts.items() if count}
        shape = (sum(counts.values()), len(COLUMNS))
        if path.stat().st_size != 4 * shape[0] * shape[1]:
            raise _damaged(path, f"{shape[0]} examples", f"{path.stat().st_size} bytes")
        self._rows = torch.empty(shape, dtype=torch.int32)
        if len(self._rows):
            size = self._rows.numel()
            flat = torch.from_file(str(path), shared=False, size=size, dtype=torch.int32)
            self._rows = flat.view(shape)
        self.lengths, self.documents = self._rows[:, 5], self._rows[:, 4].numpy()
        self.special = special_tokens(store.tokenizer())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"the index must be below {len(self)}, the number of examples, got {index}"
            )
        shard, start, split, stop, document, _ = self._rows[index].tolist()
        tokens = self.store.shard(shard).tokens
        return self.rule.example(tokens, (start, split, stop, document), self.special)

    def second_lengths(self, indices: Tensor) -> Tensor:
        """Number of tokens of the second segments of the pairs with these indices: int32 (indices,)."""
        rows = self._rows[indices]
        return rows[:, 3] - rows[:, 2]

    def groups(self, alpha: float) -> list[Group]:
        """A group for each language, with its share smoothed by ``alpha`` as in :func:`smoothed_shares`."""
        shares = smoothed_shares(self.languages, alpha)
        stops = list(accumulate(self.languages.values()))
        starts = [0, *stops[:-1]]
        return [Group(*group) for group in zip(starts, stops, shares.values(), strict=True)]


def is_store(folder: str | Path) -> bool:
    """Whether the folder is a store, finished or not."""
    return (Path(folder) / SETTINGS).is_file()


def fingerprint(tokenizer: TokenizerLike) -> str:
    """SHA-256 of every setting of the tokenizer that affects the tokens of a text: all but truncation and padding."""
    settings = json.loads(tokenizer.to_str())
    kept = {
        name: value for name, value in settings.items() if name not in ("truncation", "padding")
    }
    text = json.dumps(kept, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_checksum(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


def _rows(
    text: SentenceTokens,
    packing: str,
    block_size: int,
    rng: Random,
    number: int,
    documents: int,
    special: SpecialTokens,
) -> Iterator[array]:
    """The values of ``COLUMNS`` for the examples of shard ``number``, a few thousand examples at a time.

    ``documents``: number of documents in the shards before.
    """
    rule = PACKING_RULES[packing]
    added, rows = rule.added(special), array("i")
    for start, split, stop, document in rule.extents(text, block_size - added, rng):
        length = stop - start + added
        rows.extend((number, start, split, stop, documents + document, length))
        if len(rows) >= 2**16:
            yield rows
            rows = array("i")
    yield rows


def _copy(source, target, size: int) -> None:
    """Copy the next ``size`` bytes."""
    while size:
        data = source.read(min(size, 2**20))
        if not data:
            raise OSError(
                f"{source.name} ended {size} bytes too early: end other processes that write there, and try again"
            )
        target.write(data)
        size -= len(data)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, "JSON", error) from error


def _damaged(path: Path, expected: object, actual: object) -> ValueError:
    if path.name == MANIFEST:
        remedy = (
            f"Remove it and run fastenc prepare again with --resume, which writes {path.name} again"
        )
    elif "packed" in path.parts:
        remedy = f"Remove {path.parent}; it is written again when it is needed"
    else:
        remedy = f"Remove {path.parent} and run fastenc prepare again with --resume, which writes it again"
    return ValueError(f"{path} is damaged: it should have {expected}, got {actual}. {remedy}")
