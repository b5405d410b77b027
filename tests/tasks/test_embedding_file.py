"""The vectors of whole files are those of ``encode``, for any parts and after a kill."""

import errno
import json
import os
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file

from fastenc._base import progress
from fastenc.cli import main
from fastenc.models import Encoder
from fastenc.models.embedding.encode import encode_parts
from fastenc.ops.int8_products import has_int8_products
from fastenc.tasks import embedding_file, embedding_format, embedding_table, parts_file
from fastenc.tasks.embedding_file import Embedded, embed_file
from tests.helpers.commands import failure, run
from tests.helpers.training_run import documents, small_model, word_tokenizer

TEXTS = [text.replace("\n", " ") for text in documents(25)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    small_model("mlm", word_tokenizer()).save_pretrained(folder)
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    return folder


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of one batch; each part is written at once."""
    monkeypatch.setattr(embedding_file, "BATCHES_AT_ONCE", 1)
    monkeypatch.setattr(parts_file, "SECONDS", 0.0)


def vectors_of(path):
    if path.suffix == ".parquet":
        return torch.tensor(parquet.read_table(path)["embedding"].to_pylist())
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path))
    return load_file(path)["embeddings"]


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".parquet"])
@pytest.mark.parametrize("store_as", ["float32", "float16"])
def test_parts_make_the_vectors_of_encode(suffix, store_as, base, tmp_path):
    expected = Encoder.from_pretrained(base).encode(TEXTS)
    command = ("embed", base, base / "texts.txt", "-o", tmp_path / f"v{suffix}")
    run(*command, "--batch-size", 7, "--store-as", store_as)
    vectors = vectors_of(tmp_path / f"v{suffix}")
    assert suffix == ".parquet" or vectors.dtype == getattr(torch, store_as)
    exact = (
        {"rtol": 1e-5, "atol": 1e-6} if store_as == "float32" else {"rtol": 2**-10, "atol": 1e-6}
    )
    torch.testing.assert_close(vectors.float(), expected, **exact)
    assert [path.name for path in tmp_path.iterdir()] == [f"v{suffix}"]
    if suffix == ".safetensors":
        header = int.from_bytes((tmp_path / f"v{suffix}").read_bytes()[:8], "little")
        assert header % 8 == 0, "as safetensors writes it"


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".parquet"])
@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_a_precision_has_the_numbers_of_sentence_transformers(
    precision, suffix, base, tmp_path, monkeypatch, capsys
):
    """Also in a run that was interrupted, and from vectors that are read back in several blocks."""
    from sentence_transformers.util import quantize_embeddings

    monkeypatch.setattr(embedding_format, "ROWS_AT_ONCE", 10)
    monkeypatch.setattr(embedding_table, "ROWS_AT_ONCE", 10)
    encoder, output = Encoder.from_pretrained(base), tmp_path / f"v{suffix}"
    plain = encoder.encode(TEXTS, convert_to_numpy=True)
    expected = quantize_embeddings(plain, precision)
    assert torch.equal(encoder.encode(TEXTS, precision=precision), torch.from_numpy(expected))
    command = ("embed", base, base / "texts.txt", "-o", output, "--precision", precision)
    Parts(monkeypatch, stop_at=3)
    with pytest.raises(SystemExit):
        main([*map(str, command), "--batch-size", "7"])
    monkeypatch.setattr(embedding_file, "encode_parts", encode_parts)
    other = failure(capsys, *command, "--batch-size", 7, "--resume", "--truncate-dim", 16)
    assert "begun with options=" in other
    printed = run(*command, "--batch-size", 7, "--resume")
    vectors = vectors_of(output).numpy()
    assert suffix == ".parquet" or vectors.dtype == expected.dtype
    np.testing.assert_array_equal(vectors, expected)
    ranges = tmp_path / "v.ranges.npy"
    assert f"25 vectors of {expected.shape[1]} numbers" in printed
    if "binary" in precision:
        assert not ranges.exists()
        return
    assert f"ranges in {ranges}" in printed
    np.testing.assert_array_equal(np.load(ranges), [plain.min(0), plain.max(0)])


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_queries_have_the_ranges_of_the_corpus(suffix, base, tmp_path):
    """By the corpus' vectors, or by the ranges that its own command wrote."""
    from sentence_transformers.util import quantize_embeddings

    encoder, output = Encoder.from_pretrained(base), tmp_path / f"v{suffix}"
    (tmp_path / "queries.txt").write_text("quickly the tree\n")
    corpus = encoder.encode(TEXTS, convert_to_numpy=True)
    query = encoder.encode(["quickly the tree"], convert_to_numpy=True)
    expected = quantize_embeddings(query, "int8", calibration_embeddings=corpus)
    assert np.isin(expected, (-128, 127)).any(), "numbers beyond the ranges are cut"
    embed_file(encoder, base / "texts.txt", tmp_path / "plain.npy")
    embed_file(encoder, base / "texts.txt", tmp_path / "corpus.npy", precision="int8")
    for calibration in ("plain.npy", "corpus.ranges.npy"):
        options = ("--precision", "int8", "--calibration", tmp_path / calibration)
        printed = run("embed", base, tmp_path / "queries.txt", "-o", output, *options)
        np.testing.assert_array_equal(vectors_of(output), expected)
        assert "ranges" not in printed.partition(str(output))[2]


def test_a_run_is_not_continued_with_another_calibration(base, tmp_path, monkeypatch):
    encoder, output = Encoder.from_pretrained(base), tmp_path / "v.npy"
    for name in ("one", "other"):
        np.save(tmp_path / f"{name}.npy", np.eye(32, dtype="float32"))
    embed = lambda name, **options: embed_file(
        *(encoder, base / "texts.txt", output),
        precision="int8",
        calibration=tmp_path / f"{name}.npy",
        batch_size=7,
        **options,
    )
    given = Parts(monkeypatch, stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        embed("one")
    given.stop_at = None
    with pytest.raises(ValueError, match="begun with calibration="):
        embed("other", resume=True)
    np.save(tmp_path / "one.npy", np.zeros((9, 32), "float32"))
    with pytest.raises(ValueError, match="begun with calibration="):
        embed("one", resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--precision", "int4"), "--precision must be one of float32, int8, "),
        (("--precision", "int8"), "texts of the file, got 1: give --calibration a file of"),
        (("--precision", "int8", "--store-as", "float16"), "--store-as is the number type of"),
        (
            ("--calibration", "good.npy"),
            "--calibration must come with precision int8 or uint8, got float32",
        ),
        (("--precision", "uint8", "--calibration", "none.npy"), "none.npy"),
        (("--precision", "uint8", "--calibration", "t.txt"), "must be a .npy file of vectors"),
        (("--precision", "uint8", "--calibration", "good.npz"), "must be a .npy file of vectors"),
        (("--precision", "uint8", "--calibration", "one.npy"), "hold two or more vectors of 32"),
        (("--precision", "uint8", "--calibration", "bytes.npy"), "got int8 (3, 32)"),
        (("--precision", "uint8", "--calibration", "wide.npy"), "got float32 (3, 33)"),
        (("--precision", "uint8", "--calibration", "inf.npy"), "must hold finite numbers"),
        (
            ("--precision", "int8", "--calibration", "good.npy", "--truncate-dim", "8"),
            "hold two or more vectors of 8 floating-point numbers, got float32 (3, 32)",
        ),
    ],
)
def test_a_precision_that_cannot_be_right_is_refused(
    options, message, base, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("a text\n")
    good = np.zeros((3, 32), "float32")
    np.save("good.npy", good)
    np.savez("good.npz", good)
    np.save("one.npy", good[:1])
    np.save("bytes.npy", good.astype("int8"))
    np.save("wide.npy", np.zeros((3, 33), "float32"))
    np.save("inf.npy", np.full((3, 32), np.inf, "float32"))
    given = Parts(monkeypatch, stop_at=1)
    assert message in failure(capsys, "embed", base, "t.txt", "-o", "v.npy", *options)
    assert not given.sizes and not list(tmp_path.glob("v.*"))


class Parts:
    """Stands in for ``encode_parts``: counts the texts of each part, and is interrupted in one of them."""

    def __init__(self, monkeypatch, stop_at):
        self.stop_at, self.sizes = stop_at, []
        monkeypatch.setattr(embedding_file, "encode_parts", self.encode)

    def encode(self, encoder, parts, **options):
        for vectors in encode_parts(encoder, parts, **options):
            self.sizes.append(len(vectors))
            if len(self.sizes) == self.stop_at:
                raise KeyboardInterrupt
            yield vectors


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".parquet"])
def test_an_interrupted_run_says_what_it_keeps_and_goes_on_there(
    suffix, base, tmp_path, monkeypatch
):
    """Ctrl-C writes what is finished, also before the first interval for writing has passed."""
    monkeypatch.setattr(parts_file, "SECONDS", 1e9)
    encoder, output = Encoder.from_pretrained(base), tmp_path / f"v{suffix}"
    options = {"batch_size": 7}
    embed_file(encoder, base / "texts.txt", tmp_path / f"whole{suffix}", **options)
    given = Parts(monkeypatch, stop_at=3)
    message = (
        r"interrupted; 14 finished texts are kept in .*v\..*\.part: run the same again with resu"
    )
    with pytest.raises(KeyboardInterrupt, match=message):
        embed_file(encoder, base / "texts.txt", output, **options)
    assert not output.exists()
    message = (
        r"part belongs to a run that did not finish, with 14 texts: continue it with resume=True"
    )
    with pytest.raises(ValueError, match=message):
        embed_file(encoder, base / "texts.txt", output, **options)
    for other in (
        {"pooling": "cls"},
        {"store_as": "float16"},
        {"batch_size": 8},
        {"text": "words"},
        {"quoting": "csv"},
    ):
        with pytest.raises(ValueError, match="begun with options="):
            embed_file(encoder, base / "texts.txt", output, resume=True, **{**options, **other})
    given.sizes.clear()
    given.stop_at = None
    embedded = embed_file(encoder, base / "texts.txt", output, resume=True, **options)
    assert embedded == Embedded(25, 32)
    assert given.sizes == [7, 4], "the first two parts are not computed again"
    assert output.read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not list(tmp_path.glob("*.part*"))


def test_the_command_names_its_option_when_it_is_interrupted(base, tmp_path, monkeypatch, capsys):
    Parts(monkeypatch, stop_at=2)
    command = ("embed", base, base / "texts.txt", "-o", tmp_path / "v.npy", "--batch-size", 7)
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in command])
    assert ended.value.code == 130
    text = capsys.readouterr().err
    assert "fastenc: interrupted; 7 finished texts are kept in" in text
    assert "run the same again with --resume to continue after them" in text
    monkeypatch.setattr(embedding_file, "encode_parts", encode_parts)
    if has_int8_products():  # the vectors of one file are of one dtype
        text = failure(capsys, *command, "--resume", "--dtype", "int8")
        begun = (
            f"{tmp_path / 'v.npy.part'} was begun with dtype=float32, got int8: use the same value"
        )
        assert begun in text
    run(*command, "--resume")


def test_a_full_disk_keeps_what_was_finished(base, tmp_path, monkeypatch):
    encoder, output = Encoder.from_pretrained(base), tmp_path / "v.npy"
    embed_file(encoder, base / "texts.txt", tmp_path / "whole.npy", batch_size=7)
    room = {}
    opened = parts_file.open_locked

    def open_on_a_small_disk(path):
        file = opened(path)

        class Small(type(file)):
            def write(self, data):
                if self.tell() + len(data) <= room["bytes"]:
                    return super().write(data)
                if self.tell() < room["bytes"]:
                    return super().write(data[: room["bytes"] - self.tell()])
                raise OSError(errno.ENOSPC, "No space left on device")

        descriptor = os.dup(file.fileno())
        file.close()
        return Small(descriptor, "r+b")

    monkeypatch.setattr(parts_file, "open_locked", open_on_a_small_disk)
    for room["bytes"], finished in ((2000, 14), (2700, 14), (3000, 21)):
        message = (
            rf"v.npy.part could not be written .*No space left on device.*; {finished} finished"
        )
        with pytest.raises(OSError, match=message):
            embed_file(encoder, base / "texts.txt", output, batch_size=7, resume=True)
    room["bytes"] = 10**6
    embed_file(encoder, base / "texts.txt", output, batch_size=7, resume=True)
    assert output.read_bytes() == (tmp_path / "whole.npy").read_bytes()


@pytest.mark.parametrize("texts", [TEXTS[:9], [*TEXTS, "more"]], ids=["shorter", "longer"])
@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_an_input_that_changes_during_the_run(suffix, texts, base, tmp_path, monkeypatch):
    """Between the first reading, which counts the texts for the output's header, and the second."""
    file = tmp_path / "texts.txt"
    shutil.copy(base / "texts.txt", file)

    def change(*arguments):
        file.write_text("\n".join(texts) + "\n")
        return progress.Counter(*arguments)

    monkeypatch.setattr(embedding_file, "Counter", change)
    message = f"must not change while it is read, got {len(texts)} texts in place of {len(TEXTS)}"
    with pytest.raises(ValueError, match=message):
        embed_file(Encoder.from_pretrained(base), file, tmp_path / f"v{suffix}", batch_size=7)
    assert not (tmp_path / f"v{suffix}").exists()


def test_two_runs_do_not_write_one_file(base, tmp_path):
    output = tmp_path / "v.npy"
    settings = {"model": "m"}
    with parts_file.PartsFile(output, "texts", settings, False) as file:
        file.append([b"one"], 1)
        for resume in (False, True):
            other = parts_file.PartsFile(output, "texts", settings, resume)
            with pytest.raises(ValueError, match=r"v.npy is being written by another run"), other:
                pass
        file.append([b"two"], 1)
    assert output.read_bytes() == b"onetwo"
    assert [path.name for path in tmp_path.iterdir()] == ["v.npy"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", [None, b"o"], ids=["deleted", "shortened"])
def test_a_run_whose_parts_are_gone_starts_again(left, resume, tmp_path):
    output, settings = tmp_path / "v.npy", {"model": "m"}
    with (
        pytest.raises(ZeroDivisionError),
        parts_file.PartsFile(output, "texts", settings, False) as file,
    ):
        file.append([b"one"], 1)
        raise ZeroDivisionError
    part = tmp_path / "v.npy.part"
    assert part.read_bytes() == b"one"
    part.unlink() if left is None else part.write_bytes(left)
    with parts_file.PartsFile(output, "texts", settings, resume) as file:
        assert file.done == 0
        file.append([b"two"], 1)
    assert output.read_bytes() == b"two" and not list(tmp_path.glob("*.part*"))


def test_an_output_in_the_models_folder_does_not_change_the_model(base, tmp_path, monkeypatch):
    folder = shutil.copytree(base, tmp_path / "model")
    encoder, output = Encoder.from_pretrained(folder), folder / "v.npy"
    given = Parts(monkeypatch, stop_at=3)
    options = {"batch_size": 7, "model_name": str(folder)}
    with pytest.raises(KeyboardInterrupt):
        embed_file(encoder, base / "texts.txt", output, **options)
    given.stop_at = None
    embed_file(encoder, base / "texts.txt", output, resume=True, **options)
    torch.testing.assert_close(vectors_of(output), encoder.encode(TEXTS), rtol=1e-5, atol=1e-6)


ROWS = [
    {"id": i, "sentence": text, "score": i / 2 if i % 3 else None} for i, text in enumerate(TEXTS)
]


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "rows.jsonl"


def test_a_parquet_file_has_all_columns_of_the_input(base, rows, tmp_path):
    encoder = Encoder.from_pretrained(base)
    embed_file(encoder, rows, tmp_path / "v.parquet", batch_size=7, store_as="float16")
    table = parquet.read_table(tmp_path / "v.parquet")
    assert table.drop(["embedding"]).to_pylist() == ROWS
    assert str(table.schema.field("embedding").type) == "fixed_size_list<element: halffloat>[32]"
    embed_file(encoder, rows, tmp_path / "v.npy", batch_size=7, store_as="float16")
    assert np.array_equal(np.stack(table["embedding"].to_numpy()), np.load(tmp_path / "v.npy"))
    (tmp_path / "t.tsv").write_text("id\tsentence\n007\ta text\n")
    embed_file(encoder, tmp_path / "t.tsv", tmp_path / "t.parquet")
    row = parquet.read_table(tmp_path / "t.parquet").to_pylist()[0]
    assert (row["id"], row["sentence"], len(row["embedding"])) == ("007", "a text", 32)


def test_a_column_has_the_type_of_all_its_values(tmp_path):
    """The rows are looked at in parts, of which some may have whole numbers or nothing."""
    rows = [{"score": None}, {"score": 1}, {"score": 2.5}]
    table = embedding_table.ParquetTable(4, "float32")
    for row in rows:
        table.look_at([row])
    table.write(tmp_path / "v.parquet", rows, [np.zeros((3, 4), "float32")])
    scores = parquet.read_table(tmp_path / "v.parquet")["score"]
    assert str(scores.type) == "double" and scores.to_pylist() == [None, 1.0, 2.5]


def test_a_disk_that_is_full_at_the_end_keeps_the_vectors(base, rows, tmp_path, monkeypatch):
    encoder, output = Encoder.from_pretrained(base), tmp_path / "v.parquet"
    monkeypatch.setattr(embedding_table.ParquetTable, "write", full)
    with pytest.raises(
        OSError, match=r"v.parquet could not be written .*; 25 finished texts are kept"
    ):
        embed_file(encoder, rows, output, batch_size=7)
    monkeypatch.undo()
    given = Parts(monkeypatch, stop_at=1)
    embed_file(encoder, rows, output, batch_size=7, resume=True)
    assert not given.sizes and len(parquet.read_table(output)) == 25


def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"embedding": 1}, "the input must not have a column 'embedding', which the vectors get"),
        ({"score": "high"}, "column 'score' must hold values of one type for a .parquet file"),
    ],
)
def test_rows_that_a_parquet_file_cannot_hold(extra, message, base, rows, tmp_path, monkeypatch):
    rows.write_text(rows.read_text() + json.dumps({"id": 9, "sentence": "a", **extra}) + "\n")
    encoder = Encoder.from_pretrained(base)
    given = Parts(monkeypatch, stop_at=1)
    with pytest.raises(ValueError, match=message):
        embed_file(encoder, rows, tmp_path / "v.parquet")
    assert not given.sizes and not list(tmp_path.glob("v.parquet*"))


def test_a_parquet_file_needs_its_extra_before_any_work(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    text = failure(capsys, "embed", tmp_path / "none", base / "texts.txt", "-o", "v.parquet")
    assert "pip install 'fastenc[parquet]'" in text


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_ids_are_beside_the_vectors(suffix, base, rows, tmp_path):
    printed = run("embed", base, rows, "-o", tmp_path / f"v{suffix}")
    assert f"ids in {tmp_path}/v.ids.txt" in printed
    assert (tmp_path / "v.ids.txt").read_text().splitlines() == [str(row["id"]) for row in ROWS]
    for bad in (None, "two\nlines", "two\rlines", 1.5):
        rows.write_text(json.dumps({**ROWS[0], "id": bad}) + "\n")
        with pytest.raises(
            ValueError, match=r"rows.jsonl, line 1: column 'id' must hold a text on"
        ):
            embed_file(Encoder.from_pretrained(base), rows, tmp_path / f"v{suffix}")


@pytest.mark.parametrize("batch_size", [1, 32])
def test_a_vector_beyond_float16_is_named(base, tmp_path, monkeypatch, batch_size):
    encoder, output = Encoder.from_pretrained(base), tmp_path / "v.npy"
    (tmp_path / "t.txt").write_text("a text\nanother\n")
    options = {"store_as": "float16", "batch_size": batch_size}

    def times(*factors):
        def scaled(*given, **options):
            rest = iter(factors)
            for each in encode_parts(*given, **options):
                yield each * torch.tensor([[next(rest)] for _ in each])

        monkeypatch.setattr(embedding_file, "encode_parts", scaled)

    times(1.0, 1e6)
    with pytest.raises(
        ValueError, match=r"store_as must be float32 .*: text 2 has a number beyond"
    ):
        embed_file(encoder, tmp_path / "t.txt", output, **options)
    for path in tmp_path.glob("v.npy*"):
        path.unlink()
    times(1.0, float("inf"))  # float32 would hold no other number
    embed_file(encoder, tmp_path / "t.txt", output, **options)
    assert np.isfinite(np.load(output)).all(1).tolist() == [True, False]
    times(1.0, 1e6)
    embed_file(encoder, tmp_path / "t.txt", output)


def test_without_a_terminal_a_line_says_how_far_it_is(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    embed_file(Encoder.from_pretrained(base), base / "texts.txt", tmp_path / "v.npy", batch_size=10)
    lines = capsys.readouterr().err.splitlines()
    pattern = r"embedding: (10|20|25) of 25 texts(, [\d,]+\.\d texts/s)?, \d:\d\d:\d\d left"
    assert len(lines) == 3 and all(re.fullmatch(pattern, line) for line in lines), lines


@pytest.mark.parametrize(
    "command, options, counted",
    [
        ("embed", ("--words", "-o", "w.npy"), ["13"]),
        ("neighbours", ("--word", "cat"), ["9", "13"]),  # words by themselves, then in sentences
    ],
)
def test_words_are_counted_without_a_terminal_too(
    command, options, counted, base, tmp_path, monkeypatch
):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("the cat sat\n" * 2 + "a dog ran by the long river\n")
    printed = run(command, base, "t.txt", *options)
    pattern = r"^embedding: (\d+) of \1 words(?:, [\d,]+\.\d words/s)?, 0:00:00 left$"
    assert re.findall(pattern, printed, re.MULTILINE) == counted, printed


def test_the_time_that_is_left_counts_this_runs_texts_only():
    counter = progress.Counter("embedding", "texts", total=4000, done=1000)
    counter.add(1000)
    assert counter.line(500.0) == "embedding: 2,000 of 4,000 texts, 2.0 texts/s, 0:16:40 left"
    assert counter.line(4000.0) == "embedding: 2,000 of 4,000 texts, 2:13:20 left"


def test_a_run_that_fails_before_its_first_part_leaves_nothing(base, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("a text\n")
    command = ("embed", base, tmp_path / "t.txt", "-o", tmp_path / "v.npy")
    assert "--pooling must be one of" in failure(capsys, *command, "--pooling", "none")
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--layers", "-1"), "--layers is for the vectors of words (--words), not of texts"),
        (("--words", "--resume"), "--resume is for the vectors of texts, not of words"),
        (("--words", "--pooling", "cls"), "--pooling is for the vectors of texts, not of words"),
    ],
)
def test_options_without_an_effect_are_refused(options, message, base, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("a text\n")
    command = ("embed", base, tmp_path / "t.txt", "-o", tmp_path / "v.npy")
    assert f"fastenc: {message}: leave it out" in failure(capsys, *command, *options)


def test_quoted_values_are_noticed_and_an_option_decides(base, tmp_path, capsys):
    table = tmp_path / "t.tsv"
    table.write_text('sentence\tlabel\n"the ""cat"" sat"\tpos\na dog ran\tneg\n')
    text = failure(capsys, "embed", base, table, "-o", tmp_path / "v.npy")
    assert 't.tsv, line 2: "the ""cat"" sat" is quoted as in CSV: give --quoting csv' in text
    encoder = Encoder.from_pretrained(base)
    for quoting, first in (("csv", 'the "cat" sat'), ("none", '"the ""cat"" sat"')):
        run("embed", base, table, "-o", tmp_path / f"{quoting}.npy", "--quoting", quoting)
        expected = encoder.encode([first, "a dog ran"])
        torch.testing.assert_close(vectors_of(tmp_path / f"{quoting}.npy"), expected)
    train = ("finetune", base, table, "-o", tmp_path / "run", "--max-steps", 1)
    assert "give --quoting csv" in failure(capsys, *train)
    run(*train, "--quoting", "csv")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["task_options"]["quoting"]
    # With the training's options.
    run("predict", tmp_path / "run", table, "-o", tmp_path / "p.jsonl")
    assert json.loads((tmp_path / "p.jsonl").read_text().splitlines()[0])["sentence"] == (
        'the "cat" sat'
    )
    pretrain = ("pretrain", table, "--text", "sentence", "-o", tmp_path / "x")
    assert "give --quoting csv" in failure(capsys, *pretrain)


def test_a_quote_here_and_there_is_text(base, tmp_path):
    table = tmp_path / "t.tsv"
    table.write_text('sentence\n"quoted" words\nhe said "no"\n"all"\n')
    run("embed", base, table, "-o", tmp_path / "v.npy")
