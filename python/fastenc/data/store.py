"""A tokenised corpus on disk that need not fit in memory: reading it, and packing it into training examples.

store/manifest.json                    what the store holds, with checksums; written last
store/tokenizer.json                   the tokenizer
store/shard-00000/tokens.npy           uint16 or uint32, see SentenceTokens
store/shard-00000/sentences.npy        int64, sentence_ends
store/shard-00000/documents.npy        int64, document_ends
store/shard-00000/shard.json           counts, language, checksums
store/packed/<packing>-<size>[-<seed>]/  extents of examples, made when a run first asks for them
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

from fastenc._extras import require
from fastenc._files import write_folder
from fastenc._progress import progress_bar
from fastenc.data.batching import Group
from fastenc.data.blocks import check_block_size
from fastenc.data.languages import smoothed_shares
from fastenc.data.packings import PLANS
from fastenc.data.segments import NO_PAIR
from fastenc.data.sentences import SentenceTokens
from fastenc.models.tokenizers import load_tokenizer, special_tokens

FORMAT = 1
MANIFEST, SETTINGS, SHARD = "manifest.json", "settings.json", "shard.json"
PARTS = ("tokens", "sentences", "documents")
COLUMNS = ("shard", "start", "split", "stop", "document", "length")
# Of every language one example in twenty is held out, but of all languages together about two thousand.
HELD_OUT_ONE_IN, HELD_OUT_LIMIT = 20, 2000


class TokenStore:
    """A finished store. Only its manifest is in memory; the other files are memory-mapped.

    Raises: ValueError if the folder is no store, is unfinished or has another format, or if a shard's file is missing
        or has another size than was written.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not is_store(folder):
            raise ValueError(f"{folder} is no token store: make one with fastenc prepare")
        if not (self.folder / MANIFEST).is_file():
            raise ValueError(
                f"{folder} is a token store that is not finished: run fastenc prepare again with --resume"
            )
        self.manifest = _read_json(self.folder / MANIFEST)
        if self.manifest["format"] != FORMAT:
            raise ValueError(
                f"{folder} must be a token store of format {FORMAT}, got {self.manifest['format']}: prepare it again"
            )
        self.shards = [entry for entry in self.manifest["shards"] if entry["tokens"]]
        for entry in self.shards:
            for part, (size, _) in entry["files"].items():
                path = self._path(entry, part)
                found = path.stat().st_size if path.is_file() else "no file"
                if found != size:
                    raise _damaged(path, f"{size} bytes", found)
        self._open: dict[int, SentenceTokens] = {}

    @property
    def tokens(self) -> int:
        return sum(entry["tokens"] for entry in self.shards)

    @property
    def languages(self) -> list[str]:
        return list(dict.fromkeys(entry["language"] for entry in self.shards))

    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder)

    def check_tokenizer(self, tokenizer: Any, owner: str) -> None:
        """Raises: ValueError for another tokenizer than the store was written with."""
        if (found := fingerprint(tokenizer)) != self.manifest["tokenizer"]:
            raise ValueError(
                f"{self.folder} holds tokens of another tokenizer (fingerprint {self.manifest['tokenizer'][:12]}) than "
                f"that of {owner} ({found[:12]}): prepare the texts with --tokenizer {owner}"
            )

    def shard(self, number: int) -> SentenceTokens:
        """A shard's tokens and ends, memory-mapped."""
        if number not in self._open:
            numpy, entry = require("numpy", extra="train"), self.shards[number]
            try:
                # A plain array over the map: numpy.memmap's own indexing is several times slower.
                parts = [
                    numpy.asarray(numpy.load(self._path(entry, part), mmap_mode="r"))
                    for part in PARTS
                ]
            except (OSError, ValueError) as error:
                raise _damaged(self._path(entry, "tokens"), "readable arrays", error) from error
            self._open[number] = SentenceTokens(*parts)
        return self._open[number]

    def verify(self, number: int) -> None:
        """Raises: ValueError when a shard's bytes are not those that were written."""
        entry = self.shards[number]
        for part, (_, expected) in entry["files"].items():
            path = self._path(entry, part)
            if (found := file_checksum(path)) != expected:
                raise _damaged(path, f"checksum {expected[:12]}", found[:12])

    def count_tokens(self) -> Tensor:
        """Occurrences of each token: int64 (vocabulary,)."""
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
        """Find the extents of all examples and store them; later calls return the same folder.

        The checksums of every shard are verified first. No example crosses the end of a shard. The last examples of
        each language (one in twenty, at most about 2,000 over all languages) are held out.
        Raises: ValueError for an unknown packing, a block_size below 8, a damaged shard, or no example.
        """
        if packing not in PLANS:
            raise ValueError(f"packing must be one of {', '.join(PLANS)}, got {packing!r}")
        check_block_size(block_size)
        key = (packing, block_size, seed) if PLANS[packing].is_random else (packing, block_size)
        folder = self.folder / "packed" / "-".join(map(str, key))
        if not folder.is_dir():
            numbers = progress_bar(range(len(self.shards)), "packing", "shard", show_progress)
            write_folder(
                folder, lambda hidden: self._pack(hidden, packing, block_size, seed, numbers)
            )
        return folder

    def _pack(self, folder: Path, packing: str, block_size: int, seed: int, numbers) -> None:
        per_language = dict.fromkeys(self.languages, 0)
        documents = 0
        with open(folder / "all.bin", "wb") as file:
            for number in numbers:
                self.verify(number)
                text, entry = self.shard(number), self.shards[number]
                rng = Random(f"{seed} {number}")
                for row in _rows(text, packing, block_size, rng, number, documents):
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

    def examples(self, packing: str, block_size: int, seed: int = 0, part: str = "train"):
        """:class:`StoredExamples` of a packing that :meth:`pack` has made; ``part``: "train" or "held_out"."""
        folder = self.pack(packing, block_size, seed)
        counts = _read_json(folder / "counts.json")[part]
        return StoredExamples(self, packing, folder / f"{part}.bin", counts)

    def _path(self, entry: dict[str, Any], part: str) -> Path:
        return self.folder / entry["name"] / f"{part}.npy"


class StoredExamples(Sequence):
    """Training examples of a store, read from disk when they are asked for.

    Fields:
        lengths: int32 (examples,), tokens of each; memory-mapped.
        documents: numpy int32 (examples,), number of the document that each begins in, ascending; memory-mapped.
        languages: {language: number of examples}; the examples are in this order.
    """

    def __init__(self, store: TokenStore, packing: str, path: Path, counts: dict[str, int]):
        self.store, self.plan = store, PLANS[packing]
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
            raise IndexError(f"example {index} of {len(self)}")
        shard, start, split, stop, document, _ = self._rows[index].tolist()
        tokens = self.store.shard(shard).tokens
        return self.plan.example(tokens, (start, split, stop, document), self.special)

    def second_lengths(self, indices: Tensor) -> Tensor:
        """int32: lengths of the second segments of the pairs with these indices."""
        rows = self._rows[indices]
        return rows[:, 3] - rows[:, 2]

    def groups(self, alpha: float) -> list[Group]:
        """The languages, with shares smoothed by ``alpha``."""
        shares = smoothed_shares(self.languages, alpha)
        stops = list(accumulate(self.languages.values()))
        starts = [0, *stops[:-1]]
        return [Group(*group) for group in zip(starts, stops, shares.values(), strict=True)]


def is_store(folder: str | Path) -> bool:
    """Whether the folder is a store, finished or not."""
    return (Path(folder) / SETTINGS).is_file()


def fingerprint(tokenizer: Any) -> str:
    """A hash of every setting of the tokenizer that changes the tokens of a text."""
    parts = json.loads(tokenizer.to_str())
    kept = {name: value for name, value in parts.items() if name not in ("truncation", "padding")}
    text = json.dumps(kept, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_checksum(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _rows(
    text: SentenceTokens, packing: str, block_size: int, rng: Random, number: int, documents: int
) -> Iterator[array]:
    """The rows of the index for a shard, a few thousand at a time."""
    plan = PLANS[packing]
    rows = array("i")
    for start, split, stop, document in plan.extents(text, block_size, rng):
        length = stop - start + plan.special
        rows.extend((number, start, split, stop, documents + document, length))
        if len(rows) >= 2**16:
            yield rows
            rows = array("i")
    yield rows


def _copy(source, target, size: int) -> None:
    while size:
        piece = source.read(min(size, 2**20))
        if not piece:
            raise OSError(
                f"{source.name} ended {size} bytes too early: is another process writing there?"
            )
        target.write(piece)
        size -= len(piece)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, "JSON", error) from error


def _damaged(path: Path, expected: Any, found: Any) -> ValueError:
    if path.name == MANIFEST:
        remedy = (
            f"Remove it and run fastenc prepare again with --resume, which writes {path.name} anew"
        )
    elif "packed" in path.parts:
        remedy = f"Remove {path.parent}, which is made again when it is needed"
    else:
        remedy = f"Remove {path.parent} and run fastenc prepare again with --resume, which writes it anew"
    return ValueError(f"{path} is damaged: it should have {expected}, got {found}. {remedy}")
