"""fastenc profile and bench."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fastenc
from fastenc._base.extras import require
from fastenc._base.options import argument, option
from fastenc.cli.options import Command
from fastenc.cli.outputs import DEVICE, device_named
from fastenc.models import MaskedLM
from fastenc.profiling import Ceilings, models, report
from fastenc.profiling.profile import profile_step


@dataclass(frozen=True, kw_only=True)
class Profile(Command):
    """Measure the time of each op and kernel in a step of a model.

    The table has the time, bytes, FLOPs and share of the roofline of each op and kernel. The roofline's two ceilings,
    the bandwidth of a copy and the FLOP/s of a large matrix product, are measured first on the same device. trace.json
    can be opened in https://ui.perfetto.dev.

    Examples:
    fastenc profile minilm
    fastenc profile bert-base --train --precision bf16 --batch-size 128
    """

    model: str = argument(
        "minilm, bert-base, bert-large or xlm-r-base (with random weights), a checkpoint folder, or a name on the hub."
    )
    output: Path = option(
        Path("profile"), "Folder for trace.json, profile.json and profile.png.", "-o"
    )
    train: bool = option(False, "Profile a masked-LM training step instead of inference.")
    batch_size: int = option(32, "Number of sequences in a batch.")
    length: int = option(128, "Number of tokens of each sequence.")
    precision: str = option(
        "fp32",
        "fp32 or bf16. In training, bf16 is autocast with fp32 weights. In inference, the weights are bf16 too.",
    )
    device: str | None = option(None, DEVICE)

    def run(self) -> None:
        for option_, value in (("--batch-size", self.batch_size), ("--length", self.length)):
            if value < 1:
                raise ValueError(f"{option_} must be at least 1, got {value}: give more")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(
                f"--precision must be fp32 or bf16, got {self.precision!r}: give one of them"
            )
        require("matplotlib", extra="plots")  # before the step is measured
        device, bf16 = device_named(self.device), self.precision == "bf16"
        model = models.load(self.model, training=self.train).to(device)
        if self.length > model.config.max_positions:
            raise ValueError(
                f"--length must be at most {model.config.max_positions}, the model's number of positions, got "
                f"{self.length}: give less"
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
        mode = "training" if self.train else "inference"
        sizes = f"{self.batch_size} x {self.length} tokens"
        title = f"{self.model}, {mode}, {sizes}, {self.precision}, {device.type}"
        report.draw(profiled, output / "profile.png", title)
        console = require("rich.console", extra="train").Console()
        width = console.width if console.is_terminal else None
        if width is None:
            console.width = 1000  # a file gets everything in full
        console.print(report.table(profiled, width), crop=False)
        print(report.summary(profiled))
        print(report.explanation(profiled))
        print(f"trace.json, profile.json and profile.png in {output}")


@dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """Run the benchmarks of a clone of the repository.

    Examples:
    fastenc bench --help
    fastenc bench layer_norm attention
    fastenc bench --tune
    """

    arguments: tuple[str, ...] = ()

    @classmethod
    def from_arguments(cls, name: str, arguments: Sequence[str]) -> "Bench":
        return cls(arguments=tuple(arguments))  # benchmarks/run.py parses them

    def run(self) -> None:
        # An installation has no benchmarks, because they need libraries to compare with, and files of the repository.
        root = Path(fastenc.__file__).parents[2]
        if not (root / "benchmarks" / "run.py").is_file():
            raise ValueError(
                "the benchmarks are in fastenc's repository, not in the installed package: clone it, install it there "
                "with pip install --no-build-isolation -e . and run fastenc bench again"
            )
        command = [sys.executable, "-m", "benchmarks.run", *self.arguments]
        raise SystemExit(subprocess.run(command, cwd=root).returncode)
