"""fastenc samples."""

from dataclasses import dataclass
from pathlib import Path

from fastenc._base.options import argument, option
from fastenc.cli.options import Command
from fastenc.data.samples import write_samples


@dataclass(frozen=True, kw_only=True)
class Samples(Command):
    """Write small files for the commands of the documents.

    They have the names that README and the guides use: texts to pretrain on, labelled sentences, pairs with scores,
    words with tags, queries with documents. The guides also use a small model, runs/small, which is pretrained on one
    of these files.

    Examples:
    fastenc samples .
    fastenc pretrain wiki.txt.gz -o runs/small
    """

    folder: Path = argument("Folder for the files.")
    overwrite: bool = option(False, "Replace files of these names that have another content.")

    def run(self) -> None:
        written = write_samples(self.folder, overwrite=self.overwrite)
        print(f"{len(written)} files in {self.folder}: {', '.join(_names(self.folder, written))}")
        print("runs/small of the guides: fastenc pretrain wiki.txt.gz -o runs/small")


def _names(folder: Path, paths: list[Path]) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in paths)
