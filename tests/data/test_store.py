"""The token store holds what in-memory packing gives, after interruptions too."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from fastenc.data import (
    SegmentPair,
    TokenStore,
    doc_sentence_blocks,
    full_sentence_blocks,
    segment_pairs,
    write_store,
)
from fastenc.data.store import fingerprint
from fastenc.demo.checkpoint import minilm_folder
from fastenc.text import load_tokenizer
from tests.helpers import ROOT
from tests.helpers.processes import python
from tests.helpers.training_run import documents, word_tokenizer

BLOCKS = {"full-sentences": full_sentence_blocks, "doc-sentences": doc_sentence_blocks}


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def every(examples_of, *arguments):
    """A packing's examples, with the held-out ones, in the store's order within one language."""
    return [
        example
        for subset in ("train", "held_out")
        for example in examples_of(*arguments, subset=subset)
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "s"
    return write_store(folder, {"": documents(200)}, word_tokenizer(), shard_characters=4000)


@pytest.mark.parametrize("packing", BLOCKS)
@pytest.mark.parametrize("block_size", [8, 32, 300])
def test_examples_are_those_of_each_shards_texts(store, packing, block_size):
    expected, texts = [], iter(documents(200))
    for entry in store.shards:
        own = [next(texts) for _ in range(entry["documents"])]
        expected += BLOCKS[packing](own, word_tokenizer(), block_size)
    assert len(store.shards) > 3 and next(texts, None) is None
    assert every(store.examples, packing, block_size) == expected


def test_pairs_are_those_of_each_shards_texts(store):
    expected, texts, before = [], iter(documents(200)), 0
    for number, entry in enumerate(store.shards):
        own = [next(texts) for _ in range(entry["documents"])]
        pairs = segment_pairs(own, word_tokenizer(), 32, seed=f"5 {number}")
        expected += [SegmentPair(p.ids, p.split, p.document + before) for p in pairs]
        before += entry["documents"]
    assert every(store.examples, "segment-pairs", 32, 5) == expected


def test_lengths_documents_and_held_out_examples(store):
    train, held_out = (store.examples("doc-sentences", 32, subset=s) for s in ("train", "held_out"))
    assert train.lengths.tolist() == [len(example) for example in train]
    assert train.documents.tolist() == sorted(train.documents.tolist())
    assert len(held_out) == (len(train) + len(held_out)) // 20
    assert train.groups(0.3) == [(0, len(train), 1.0)]
    with pytest.raises(IndexError):
        train[len(train)]


def test_large_vocabularies_take_four_bytes(tmp_path):
    small = write_store(
        tmp_path / "a", {"": ["The first. The second."]}, load_tokenizer(minilm_folder())
    )
    assert small.shard(0).tokens.dtype == np.uint16
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([f"w{i}" for i in range(2**16)])
    large = write_store(tmp_path / "b", {"": ["w65535 w1. the"]}, tokenizer)
    assert large.shard(0).tokens.dtype == np.uint32
    assert large.shard(0).tokens[0] == tokenizer.token_to_id("w65535")


def test_languages_stand_apart_and_empty_documents_are_counted(tmp_path):
    texts = {"en": [*documents(80), "", " \n"], "mt": ["", *documents(30)]}
    made = write_store(tmp_path / "s", texts, word_tokenizer(), shard_characters=3000)
    assert made.languages == ["en", "mt"]
    assert made.manifest["empty documents"] == 3
    examples = made.examples("doc-sentences", 32)
    (first, second) = examples.groups(1.0)
    assert (first.start, first.stop, second.start, second.stop) == (0, 76, 76, 105)
    assert first.share == pytest.approx(76 / 105)
    assert examples.groups(0.0)[1].share == pytest.approx(0.5)


def test_few_examples_of_a_large_store_are_held_out(tmp_path, monkeypatch):
    """One in twenty, but at most six: three of each of two languages."""
    monkeypatch.setattr("fastenc.data.store.HELD_OUT_LIMIT", 6)
    texts = {"en": documents(80), "mt": documents(30)}
    made = write_store(tmp_path / "s", texts, word_tokenizer())
    held_out = made.examples("doc-sentences", 32, subset="held_out")
    assert held_out.languages == {"en": 3, "mt": 1}
    assert made.examples("doc-sentences", 32).languages == {"en": 77, "mt": 29}


def test_a_fingerprint_is_that_of_what_makes_the_tokens():
    same, other = word_tokenizer(), word_tokenizer()
    same.enable_padding(length=9)
    same.enable_truncation(9)
    other.normalizer = tokenizers.normalizers.Lowercase()
    assert fingerprint(same) == fingerprint(word_tokenizer()) != fingerprint(other)


def test_processes_and_resuming_change_nothing(store, tmp_path):
    made = write_store(
        tmp_path / "s", {"": documents(200)}, word_tokenizer(), shard_characters=4000, processes=2
    )
    expected = {n: b for n, b in files(store.folder).items() if not n.startswith("packed")}
    assert files(made.folder) == expected
    write_store(
        tmp_path / "s", {"": documents(200)}, word_tokenizer(), shard_characters=4000, resume=True
    )
    assert files(made.folder) == expected


KILLED = """
import os, signal
from fastenc.data import store_writer
from tests.helpers.training_run import documents, word_tokenizer
real, calls = getattr({module}, {name!r}), [0]
def kill(*arguments, **options):
    calls[0] += 1
    if calls[0] == {call_number}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
setattr({module}, {name!r}, kill)
store_writer.write_store({folder!r}, {{"": documents(200)}}, word_tokenizer(), shard_characters=4000)
"""


@pytest.mark.parametrize(
    ("module", "name", "call_number", "finished"),
    [
        ("store_writer", "file_checksum", 8, 2),  # half of the third shard is written
        ("store_writer.os", "replace", 7, 3),  # written, but not renamed: three shards are complete
        ("store_writer", "TokenStore", 1, None),  # everything is written
    ],
)
def test_a_killed_writer_loses_no_finished_shard(
    store, tmp_path, module, name, call_number, finished
):
    folder = tmp_path / "s"
    code = KILLED.format(module=module, name=name, call_number=call_number, folder=str(folder))
    done = python("-c", code)
    assert done.returncode == -signal.SIGKILL
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*/*")}
    if finished is not None:
        assert len(list(folder.glob("shard-*"))) == finished
        with pytest.raises(
            ValueError, match=r"finished token store, got an unfinished one: run fastenc prepare"
        ):
            TokenStore(folder)
    arguments = (folder, {"": documents(200)}, word_tokenizer())
    with pytest.raises(
        ValueError, match="must be empty, got a store: continue it with resume=True"
    ):
        write_store(*arguments, shard_characters=4000)
    write_store(*arguments, shard_characters=4000, resume=True)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "a finished shard was lost"
    expected = {n: b for n, b in files(store.folder).items() if not n.startswith("packed")}
    assert files(folder) == expected


def test_text_that_cannot_be_read_loses_no_finished_shard(store, tmp_path):
    def texts():
        yield from documents(200)[:120]
        raise ValueError("x.txt, line 9: not UTF-8")

    with pytest.raises(ValueError, match="line 9: not UTF-8"):
        write_store(tmp_path / "s", {"": texts()}, word_tokenizer(), shard_characters=4000)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("shard-*/*")}
    assert len(kept) > 4
    whole = {"": documents(200)}
    write_store(tmp_path / "s", whole, word_tokenizer(), shard_characters=4000, resume=True)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    expected = {n: b for n, b in files(store.folder).items() if not n.startswith("packed")}
    assert files(tmp_path / "s") == expected


def test_the_workers_of_a_killed_writer_end(tmp_path):
    code = (
        "import multiprocessing, os, signal, sys\n"
        "from fastenc.data import store_writer\n"
        "from tests.helpers.training_run import documents, word_tokenizer\n"
        "def texts():\n"
        "    yield from documents(200)\n"
        "    print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        f"    store_writer.write_store({str(tmp_path / 's')!r}, {{'': texts()}}, word_tokenizer(),"
        " shard_characters=4000, processes=2)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    folder = str(ROOT)
    # The pipe closes when the last process that holds it has ended, so the workers have ended too.
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL and len(done.stdout.split()) == 2


def test_memory_does_not_grow_with_the_store(tmp_path):
    """A process that may use 10 MB more than at its start packs a store of 20 MB and reads it at random."""
    folder = tmp_path / "s"
    write_store(folder, {"": documents(40)}, word_tokenizer(), shard_characters=10**9)
    tile(folder, copies=10)
    code = (
        "import numpy, random, sys, torch\n"
        "from fastenc.data import BatchSampler, TokenStore\n"
        "def anonymous():\n"
        "    for line in open('/proc/self/status'):\n"
        "        if line.startswith('RssAnon'):\n"
        "            return int(line.split()[1])\n"
        "torch.arange(9).sort(), numpy.ones(9).astype('int32')\n"
        "before = anonymous()\n"
        "store = TokenStore(sys.argv[1])\n"
        "examples = store.examples('full-sentences', 256)\n"
        "sampler = BatchSampler(examples.lengths, 8, shuffle=True)\n"
        "batches = sampler.epoch(0, start=sampler.count(0) - 300)\n"
        "tokens = sum(len(examples[i]) for batch in batches for i in batch)\n"
        "print(store.tokens, len(examples), tokens, anonymous() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    total, examples, tokens, grown = map(int, done.stdout.split())
    assert total > 9e6 and examples > 35_000 and tokens > 400_000
    assert grown < 10 * 1024, f"{grown} KiB more"


def tile(folder, copies):
    """Repeat the shard's documents up to a million tokens, and then the shard itself."""
    from fastenc.data.store import MANIFEST, file_checksum

    manifest = json.loads((folder / MANIFEST).read_text())
    (entry,) = manifest["shards"]
    parts = {
        p: np.load(folder / entry["name"] / f"{p}.npy")
        for p in ("tokens", "sentences", "documents")
    }
    times = 1_000_000 // len(parts["tokens"])
    shift = np.arange(times)[:, None] * len(parts["tokens"])
    parts = {
        p: np.tile(v, times) if p == "tokens" else (v + shift).ravel() for p, v in parts.items()
    }
    shards = []
    for number in range(copies):
        name = f"shard-{number:05d}"
        (folder / name).mkdir(exist_ok=True)
        own = {**entry, "name": name, "tokens": len(parts["tokens"]), "files": {}}
        for part, values in parts.items():
            path = folder / name / f"{part}.npy"
            np.save(path, values)
            own["files"][part] = path.stat().st_size, file_checksum(path)
        shards.append(own)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "shards": shards}))


@pytest.fixture
def own_store(tmp_path):
    return write_store(tmp_path / "s", {"": documents(60)}, word_tokenizer(), shard_characters=2000)


def test_truncated_and_corrupt_shards_are_named_and_mended(own_store):
    folder, texts = own_store.folder, {"": documents(60)}
    expected = files(folder)
    tokens = folder / "shard-00001" / "tokens.npy"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-3])
    with pytest.raises(
        ValueError, match=r"shard-00001/tokens.npy is damaged: it should have \d+ bytes"
    ):
        TokenStore(folder)
    tokens.write_bytes(bytes(byte ^ (index == len(whole) - 1) for index, byte in enumerate(whole)))
    with pytest.raises(ValueError, match=r"shard-00001/tokens.npy is damaged: .* checksum"):
        TokenStore(folder).pack("full-sentences", 32)
    assert not list((folder / "packed").glob("*")), "half of an index is left"
    tokens.unlink()
    with pytest.raises(ValueError, match="got no file"):
        TokenStore(folder)
    again = write_store(folder, texts, word_tokenizer(), shard_characters=2000, resume=True)
    assert {n: b for n, b in files(folder).items() if "packed" not in n} == expected
    assert len(again.examples("full-sentences", 32))


def test_a_truncated_index_is_named(own_store):
    path = own_store.pack("full-sentences", 32) / "train.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"train.bin is damaged: it should have \d+ examples"):
        own_store.examples("full-sentences", 32)


def test_bad_input_is_named(own_store, tmp_path):
    folder, texts, tokenizer = own_store.folder, {"": documents(60)}, word_tokenizer()
    with pytest.raises(
        ValueError, match=r"holds tokens of another tokenizer .* than that of runs/x"
    ):
        own_store.check_tokenizer(load_tokenizer(minilm_folder()), "runs/x")
    own_store.check_tokenizer(tokenizer, "runs/x")
    with pytest.raises(ValueError, match="was begun with tokenizer="):
        write_store(folder, texts, load_tokenizer(minilm_folder()), resume=True)
    with pytest.raises(ValueError, match="was begun with shard_characters=2000, got 3000"):
        write_store(folder, texts, tokenizer, shard_characters=3000, resume=True)
    with pytest.raises(ValueError, match="shard-00000 was written from other texts"):
        changed = {"": ["the cat", *documents(60)]}
        write_store(folder, changed, tokenizer, shard_characters=2000, resume=True)
    fewer = {"": documents(60)[: own_store.shards[0]["documents"]]}
    with pytest.raises(ValueError, match="was written from a text that is not given now"):
        write_store(folder, fewer, tokenizer, shard_characters=2000, resume=True)
    # BERT's tokenizer drops control characters.
    for empty, own in ((["", " "], tokenizer), (["\x01"], load_tokenizer(minilm_folder()))):
        with pytest.raises(ValueError, match="every document is empty"):
            write_store(tmp_path / "u", {"": empty}, own)
        assert not (tmp_path / "u").exists()
    bare = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    bare.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    with pytest.raises(ValueError, match="tokens beside its special ones, got a vocabulary of 5"):
        write_store(tmp_path / "w", texts, bare)
    with pytest.raises(ValueError, match="the tokenizer has no token"):
        plain = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
        write_store(tmp_path / "w", texts, plain)
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        write_store(tmp_path / "v", texts, tokenizer, processes=0)
    with pytest.raises(ValueError, match="must be an empty folder or a store"):
        write_store(tmp_path, texts, tokenizer, resume=True)
    with pytest.raises(ValueError, match=r"must be a token store, got .*: make one"):
        TokenStore(tmp_path / "nothing")
    with pytest.raises(ValueError, match="packing must be one of full-sentences"):
        own_store.pack("sentences", 32)
    with pytest.raises(ValueError, match="block_size must be at least 8"):
        own_store.pack("full-sentences", 4)
