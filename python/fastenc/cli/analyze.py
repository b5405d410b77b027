"""fastenc analyze."""

from dataclasses import dataclass
from pathlib import Path

from fastenc._base.options import REQUIRED, argument, option
from fastenc._base.provenance import command, today, versions
from fastenc.analysis.analyze import analyze
from fastenc.analysis.report import data_folder, write_report
from fastenc.analysis.sections import SEED
from fastenc.cli.options import Command
from fastenc.cli.outputs import DEVICE, check_suffix, device_named, make_writable
from fastenc.models import Encoder


@dataclass(frozen=True, kw_only=True)
class Analyze(Command):
    """Show what an encoder's vectors, layers and heads encode.

    The result is an HTML page of figures that needs no other file. The data of the figures are CSV files in the folder
    NAME_data beside it.

    The folder of data may contain .conllu files (train, and dev or test), .conll files with entities, tables (.tsv)
    and analogies as in word2vec's questions-words.txt (.txt). A table has the columns word, index, sense, sentence;
    word1, word2, score; or sentence1, sentence2, score. A figure is left out if there are no data for it.

    Examples:
    fastenc analyze sentence-transformers/all-MiniLM-L6-v2 data/ -o report.html
    fastenc analyze runs/small data/ -o report.html --word spring --layer -2
    """

    model: str = argument("Checkpoint folder, or name on the hub.")
    data: Path = argument("Folder with the data.")
    output: Path = option(REQUIRED, "HTML page to write.", "-o")
    word: str | None = option(
        None,
        "Word whose uses are shown as points in a plane. Default: the one with the most labelled uses.",
    )
    layer: int = option(-1, "Layer of the vectors in this plane; -1 is the last.")
    sentences: int = option(1000, "Largest number of sentences that a figure uses.")
    map_method: str = option(
        "pca",
        "Projection to the plane: pca, or umap (needs pip install 'fastenc[umap]').",
    )
    static: Path | None = option(
        None, "File of word2vec (.bin, text) or GloVe vectors to compare with."
    )
    device: str | None = option(None, DEVICE)

    def run(self) -> None:
        check_suffix(self.output, (".html",))
        for folder in (self.output.parent, data_folder(self.output)):
            make_writable(folder)
        encoder = Encoder.from_pretrained(self.model).to(device_named(self.device))
        figures = analyze(
            encoder,
            self.data,
            word=self.word,
            layer=self.layer,
            sentences=self.sentences,
            map_method=self.map_method,
            static=self.static,
            show_progress=None,
        )
        title = f"What {Path(self.model).name} encodes"
        write_report(self.output, title, self._facts(encoder), figures)
        drawn = sum(bool(figure.drawing) for figure in figures)
        left_out = f", {len(figures) - drawn} left out" if drawn < len(figures) else ""
        print(f"{drawn} figures in {self.output}{left_out}")

    def _facts(self, encoder: Encoder) -> dict[str, str]:
        """What the figures depend on."""
        config = encoder.config
        parameters = sum(parameter.numel() for parameter in encoder.parameters())
        size = f"{config.num_layers} layers, width {config.hidden_size}, {parameters:,} parameters"
        numbers = versions(
            "torch", "tokenizers", "scikit-learn", "scipy", "matplotlib", "umap-learn"
        )
        return {
            "Model": f"{self.model} ({config.family}, {size})",
            "Data": f"{self.data}, at most {self.sentences:,} sentences a figure",
            "Seed": f"{SEED}, of probes, mixes of layers, bootstraps and UMAP",
            "Command": command() or "from Python",
            "Versions": ", ".join(f"{name} {number}" for name, number in numbers.items()),
            "Date": today(),
        }
