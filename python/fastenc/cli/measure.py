"""fastenc profile and bench."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fastenc
from fastenc._extras import require
from fastenc._options import argument, option
from fastenc.cli.options import Command
from fastenc.cli.outputs import DEVICE, device_named
from fastenc.models import MaskedLM
from fastenc.profiling import Ceilings, models, report
from fastenc.profiling.profile import profile_step


@dataclass(frozen=True, kw_only=True)
class Profile(Command):
    """Show where a step's time goes.

    For each op and kernel its time, bytes, FLOPs and share of the roofline. The ceilings (bandwidth of a copy, rate of
    a large product) are measured first, on the same device. trace.json opens in https://ui.perfetto.dev.

    Examples:
    fastenc profile minilm
    fastenc profile bert-base --train --precision bf16 --batch-size 128
    """

    model: str = argument(
        "minilm, bert-base, bert-large or xlm-r-base (random weights), a checkpoint folder or a hub name."
    )
    output: Path = option(
        Path("profile"), "Folder for trace.json, profile.json and profile.png.", "-o"
    )
    train: bool = option(False, "A masked-LM training step instead of inference.")
    batch_size: int = option(32, "Sequences of a batch.")
    length: int = option(128, "Tokens of each sequence.")
    precision: str = option("fp32", "fp32, or bf16 for autocast over fp32 weights.")
    device: str | None = option(None, DEVICE)

    def run(self) -> None:
        for option_, value in (("--batch-size", self.batch_size), ("--length", self.length)):
            if value < 1:
                raise ValueError(f"{option_} must be at least 1, got {value}")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"--precision must be fp32 or bf16, got {self.precision!r}")
        device, bf16 = device_named(self.device), self.precision == "bf16"
        model = models.load(self.model, training=self.train).to(device)
        if self.length > model.config.max_positions:
            raise ValueError(
                f"--length must be at most the model's {model.config.max_positions} positions, got {self.length}"
            )
        lengths = [self.length] * self.batch_size
        if isinstance(model, MaskedLM):
            step = models.training_step(model, lengths, device, bf16)
        else:
            model = model.bfloat16() if bf16 else model
            step = models.inference_step(model, lengths, device)
        output = self.output
        output.mkdir(parents=True, exist_ok=True)
        profiled = profile_step(step, device, Ceilings(device), output / "trace.json")
        report.write_json(profiled, output / "profile.json")
        kind = "training" if self.train else "inference"
        sizes = f"{self.batch_size} x {self.length} tokens"
        title = f"{self.model}, {kind}, {sizes}, {self.precision}, {device.type}"
        report.draw(profiled, output / "profile.png", title)
        table = report.table(profiled)
        console = require("rich.console", extra="train").Console()
        # A file or a narrow terminal gets whole lines: a cut name is of no use.
        console.print(table, width=max(console.width, 140), crop=False, soft_wrap=True)
        print(report.summary(profiled))
        print(f"trace.json, profile.json and profile.png in {output}")


@dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """Run the repository's benchmarks (needs a checkout).

    Examples:
    fastenc bench --help
    fastenc bench layer_norm attention
    fastenc bench --tune
    """

    arguments: tuple[str, ...] = ()

    @classmethod
    def from_arguments(cls, name: str, arguments: Sequence[str]) -> "Bench":
        return cls(arguments=tuple(arguments))  # which are those of benchmarks/run.py

    def run(self) -> None:
        # Benchmarks and their committed results belong to the repository: they run peers that an installation lacks.
        root = Path(fastenc.__file__).parents[2]
        if not (root / "benchmarks" / "run.py").is_file():
            raise ValueError(
                "the benchmarks are in fastenc's repository, not in the installed package: clone it, install it there "
                "with pip install --no-build-isolation -e . and run fastenc bench again"
            )
        command = [sys.executable, "-m", "benchmarks.run", *self.arguments]
        raise SystemExit(subprocess.run(command, cwd=root).returncode)
