"""fastenc embed."""

from dataclasses import dataclass
from pathlib import Path

from fastenc._extras import require
from fastenc._options import REQUIRED, argument, option
from fastenc.cli.options import Command
from fastenc.cli.outputs import DEVICE, check_suffix, device_named, write
from fastenc.data import read_inputs
from fastenc.models import Encoder


@dataclass(frozen=True, kw_only=True)
class Embed(Command):
    """Embed texts: a vector for each, in the order given.

    Examples:
    fastenc embed sentence-transformers/all-MiniLM-L6-v2 texts.txt -o vectors.npy
    """

    model: str = argument("Checkpoint folder or hub name.")
    inputs: str = argument("Texts: .txt with a text a line, .tsv, .csv or .jsonl (.gz).")
    output: Path = option(REQUIRED, "File to write: .safetensors or .npy.", "-o")
    column: str = option("sentence", "Column of the text in a table.")
    pooling: str | None = option(
        None,
        "mean, cls, max or last-four (layers). Default: what the checkpoint declares, else mean.",
    )
    normalize: bool | None = option(
        None, "Scale vectors to length 1. Default: what the checkpoint declares, else yes."
    )
    batch_size: int = option(32, "Sequences of a batch.")
    device: str | None = option(None, DEVICE)

    def run(self) -> None:
        check_suffix(self.output, (".safetensors", ".npy"))
        texts = read_inputs(self.inputs, [self.column])
        model = Encoder.from_pretrained(self.model).to(device_named(self.device))
        vectors = model.encode(
            texts, batch_size=self.batch_size, pooling=self.pooling, normalize=self.normalize
        ).to("cpu", copy=True)
        if self.output.suffix == ".npy":
            numpy = require("numpy", extra="train")

            def save(path: Path) -> None:
                with open(path, "wb") as file:
                    numpy.save(file, vectors.numpy())

        else:
            save_file = require("safetensors.torch", extra="models").save_file
            save = lambda path: save_file({"embeddings": vectors}, path)
        write(self.output, save)
        print(f"{vectors.shape[0]} vectors of {vectors.shape[1]} numbers in {self.output}")
