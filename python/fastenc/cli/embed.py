"""fastenc embed."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from fastenc._base.extras import require
from fastenc._base.files import write_atomically
from fastenc._base.options import REQUIRED, argument, option
from fastenc._base.progress import progress_bar
from fastenc.cli.encoders import load_encoder, with_finite_weights
from fastenc.cli.options import Command
from fastenc.cli.outputs import DEVICE, DTYPE, check_output, checked_dtype, device_named
from fastenc.data.columns import iterate_words
from fastenc.data.readers import in_parts, read_inputs
from fastenc.data.writers import json_lines
from fastenc.models import Encoder, SparseEncoder
from fastenc.packing import check_batch_size
from fastenc.tasks.embedding_file import embed_file
from fastenc.tasks.embedding_format import OUTPUTS, write_array
from fastenc.tasks.shared_options import QUOTING

# Options that have no effect on the vectors of the other kind.
OF_TEXTS = (
    "text",
    "store_as",
    "precision",
    "calibration",
    "pooling",
    "normalize",
    "prompt",
    "prompt_name",
    "task",
    "truncate_dim",
    "quoting",
    "resume",
)
OF_WORDS = ("layers", "combine", "subwords")
OF_SPARSE = ("text", "quoting", "max_active", "batch_size", "device", "dtype", "sparse", "config")
BATCHES_AT_ONCE = 32  # batches whose texts are sorted by length together


@dataclass(frozen=True, kw_only=True)
class Embed(Command):
    """Compute a vector for each text, or for each word of the texts.

    The vectors are in the order of the texts. A .parquet file has them in the column "embedding", beside all columns
    of the input. If a table has a column "id", NAME.ids.txt beside a .npy or .safetensors file has the id of each
    vector.

    Files may be of any size. Finished vectors are kept beside the output every few seconds, so that --resume continues
    after them. --words and --sparse cannot be resumed, and --sparse reads all texts at once.

    With --words there is a vector for each word of each text in a .npy file. NAME.offsets.npy beside it has the index
    of each text's first word. Words are read from files in columns (.conll, .conllu). The lines of a .txt file are cut
    into words and punctuation marks.

    With --sparse, a sparse encoder (SPLADE) gives each text a weight for each token of its vocabulary. The .jsonl file
    has an object {token: weight} for each text, the heaviest token first.

    Examples:
    fastenc embed sentence-transformers/all-MiniLM-L6-v2 texts.txt -o vectors.npy
    fastenc embed sentence-transformers/all-MiniLM-L6-v2 stsb.tsv -t sentence1 -o vectors.parquet --store-as float16
    fastenc embed sentence-transformers/all-MiniLM-L6-v2 texts.txt -o vectors.npy --precision int8
    fastenc embed sentence-transformers/all-MiniLM-L6-v2 texts.txt -o words.npy --words --layers -1 --layers -2
    fastenc embed naver/splade-v3 texts.txt -o weights.jsonl --sparse
    """

    model: str = argument("Checkpoint folder, or name on the hub.")
    inputs: str = argument("Texts: .txt with a text on each line, .tsv, .csv or .jsonl (also .gz).")
    output: Path = option(
        REQUIRED, "File to write: .safetensors, .npy or .parquet; .jsonl with --sparse.", "-o"
    )
    text: str = option("sentence", "Column of the text in a table.", "-t")
    store_as: str = option("float32", "Number type of the vectors in the file: float32 or float16.")
    precision: str = option(
        "float32",
        "float32; int8 or uint8 (8 bits a dimension, cut to its range); binary or ubinary (one bit a dimension, eight "
        "to a byte).",
    )
    calibration: Path | None = option(
        None,
        "With --precision int8 or uint8, .npy file of vectors that give each dimension its range. Default: all vectors "
        "of the inputs. Their ranges are written to NAME.ranges.npy beside the output, for the queries' --calibration.",
    )
    pooling: str | None = option(
        None,
        "How a text's token vectors become one: mean, cls, last-token, max or last-four (mean of the last four "
        "layers). Default: as the checkpoint says, else mean.",
    )
    normalize: bool | None = option(
        None, "Scale vectors to length 1. Default: as the checkpoint says, else yes."
    )
    prompt: str | None = option(None, 'Text to put before each text, such as "query: ".')
    prompt_name: str | None = option(None, "Name of one of the checkpoint's prompts.")
    task: str | None = option(
        None, "Task of a checkpoint with a LoRA for each task, such as retrieval.query."
    )
    truncate_dim: int | None = option(
        None, "Keep the first dimensions only, for models that were trained so (Matryoshka)."
    )
    words: bool = option(False, "Compute a vector for each word instead of each text.")
    layers: tuple[int, ...] = option(
        (),
        "With --words, a layer to combine; repeat it for several. 0 is the embeddings' output, -1 the last layer. "
        "Default: the last four, or all of a model with fewer.",
    )
    combine: str = option(
        "mean", "With --words, how the layers are combined: mean, sum, concat or last."
    )
    subwords: str = option(
        "mean", "With --words, how a word's tokens are combined: first, mean or last."
    )
    sparse: bool = option(False, "Compute weights of tokens (SPLADE) instead of a vector.")
    max_active: int | None = option(
        None, "With --sparse, the number of each text's heaviest tokens to keep. Default: all."
    )
    batch_size: int = option(32, "Number of sequences in a batch.")
    device: str | None = option(None, DEVICE)
    dtype: str = option("float32", DTYPE)
    quoting: str | None = option(None, QUOTING)
    resume: bool = option(False, "Continue an unfinished run after what it has kept.")

    def run(self) -> None:
        self._check_options()
        check_batch_size(self.batch_size)
        if self.words:
            return self._embed_words()
        if self.sparse:
            return self._embed_sparse()
        check_output(self.output, OUTPUTS, self.inputs)
        if self.output.suffix == ".parquet":
            require("pyarrow", extra="parquet")
        dtype, device = checked_dtype(self.dtype), device_named(self.device, self.dtype)
        model = load_encoder(self.model, dtype, device)
        written = embed_file(
            model,
            self.inputs,
            self.output,
            self.text,
            store_as=self.store_as,
            precision=self.precision,
            calibration=self.calibration,
            batch_size=self.batch_size,
            resume=self.resume,
            model_name=self.model,
            quoting=self.quoting,
            pooling=self.pooling,
            normalize=self.normalize,
            prompt=self.prompt,
            prompt_name=self.prompt_name,
            task=self.task,
            truncate_dim=self.truncate_dim,
        )
        beside = {"ids": written.ids, "ranges": written.ranges}
        others = "".join(f", {name} in {path}" for name, path in beside.items() if path)
        print(f"{written.number} vectors of {written.width} numbers in {self.output}{others}")

    def _check_options(self) -> None:
        """Raises: ValueError for an option that would have no effect."""
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        optional = [each.name for each in fields(self) if each.default is not REQUIRED]
        for name in given:
            if self.sparse and name in optional and name not in OF_SPARSE:
                raise ValueError(
                    f"--{name.replace('_', '-')} is not for the weights of --sparse: leave it out"
                )
            if name == "max_active" and not self.sparse:
                raise ValueError("--max-active is for --sparse: leave it out, or add --sparse")
            if name in (OF_TEXTS if self.words else OF_WORDS):
                kinds = ("texts", "words") if self.words else ("words (--words)", "texts")
                raise ValueError(
                    f"--{name.replace('_', '-')} is for the vectors of {kinds[0]}, not of {kinds[1]}: leave it out"
                )

    def _embed_sparse(self) -> None:
        check_output(self.output, (".jsonl",), self.inputs)
        dtype, device = checked_dtype(self.dtype), device_named(self.device, self.dtype)
        texts = read_inputs(self.inputs, (self.text,), self.quoting)
        model = SparseEncoder.from_pretrained(self.model, dtype=dtype).to(device)
        model = with_finite_weights(model, self.model)
        parts = list(in_parts(texts, BATCHES_AT_ONCE * self.batch_size))

        def save(path: Path) -> None:
            with open(path, "w", encoding="utf-8") as file:
                for part in progress_bar(parts, "embed", "part", None if parts[1:] else False):
                    rows = model.encode_sparse(
                        part,
                        batch_size=self.batch_size,
                        max_active=self.max_active,
                        show_progress=False,
                    )
                    file.writelines(f"{line}\n" for line in json_lines(rows))

        write_atomically(self.output, save)
        print(f"weights of {len(texts)} texts in {self.output}")

    def _embed_words(self) -> None:
        check_output(self.output, (".npy",), self.inputs)
        require("numpy", extra="train")  # before the file is read
        sentences = _Sentences(self.inputs)
        dtype, device = checked_dtype(self.dtype), device_named(self.device, self.dtype)
        model = with_finite_weights(
            Encoder.from_pretrained(self.model, dtype=dtype).to(device), self.model
        )
        vectors = model.embed_words(
            sentences,
            layers=self.layers or None,
            combine=self.combine,
            subwords=self.subwords,
            batch_size=self.batch_size,
            out=self.output,
        )
        offsets = self.output.with_suffix(".offsets.npy")
        write_atomically(offsets, lambda path: write_array(path, vectors.offsets))
        count, width = vectors.vectors.shape
        print(f"{count} word vectors of {width} numbers in {self.output}, offsets in {offsets}")


class _Sentences:
    """The words of a file's sentences. Each iteration reads the file again; no sentence is kept in memory."""

    def __init__(self, path: str):
        self.path = path

    def __iter__(self) -> Iterator[list[str]]:
        return (each.words for each in iterate_words(self.path))
