"""fastenc analyze."""

from dataclasses import dataclass
from pathlib import Path

from fastenc._options import REQUIRED, argument, option
from fastenc.analysis.analyze import analyze
from fastenc.analysis.report import write_report
from fastenc.cli.options import Command
from fastenc.cli.outputs import DEVICE, check_suffix, device_named
from fastenc.models import Encoder


@dataclass(frozen=True, kw_only=True)
class Analyze(Command):
    """Show what an encoder's vectors, layers and heads hold.

    The result is a page of figures that needs no other file; their data are CSV files in NAME_data beside it. Of the
    folder it takes .conllu files (train and dev or test), and tables (.tsv) with the columns word, index, sense,
    sentence; word1, word2, score; or sentence1, sentence2, score. What is not there has no figure.

    Examples:
    fastenc analyze sentence-transformers/all-MiniLM-L6-v2 data/ -o report.html
    fastenc analyze runs/small data/ -o report.html --word spring --layer -2
    """

    model: str = argument("Checkpoint folder or hub name.")
    data: Path = argument("Folder with the data.")
    output: Path = option(REQUIRED, "Page to write: .html.", "-o")
    word: str | None = option(None, "Word of the map of uses. Default: the one with the most uses.")
    layer: int = option(-1, "Layer of the map of uses; -1 is the last.")
    sentences: int = option(1000, "Most sentences that a figure reads.")
    map_method: str = option("pca", "How the map is made: pca, or umap (extra: umap).")
    static: Path | None = option(
        None, "File of word2vec (.bin, text) or GloVe vectors to compare with on word pairs."
    )
    device: str | None = option(None, DEVICE)

    def run(self) -> None:
        check_suffix(self.output, (".html",))
        encoder = Encoder.from_pretrained(self.model).to(device_named(self.device))
        figures = analyze(
            encoder,
            self.data,
            word=self.word,
            layer=self.layer,
            sentences=self.sentences,
            map_method=self.map_method,
            static=self.static,
        )
        meta = f"{encoder.config.num_layers} layers, width {encoder.config.hidden_size}; data: {self.data}"
        self.output.parent.mkdir(parents=True, exist_ok=True)
        write_report(self.output, f"Inside {Path(self.model).name}", meta, figures)
        print(f"{len(figures)} figures in {self.output}")
