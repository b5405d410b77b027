"""What profile and bench do."""

import subprocess
import sys
from pathlib import Path

import torch

import fastenc
from fastenc._extras import require
from fastenc.models import MaskedLM
from fastenc.profiling import Ceilings, models, report
from fastenc.profiling.profile import profile_step


def profile(
    model_name: str,
    output: Path,
    train: bool,
    batch_size: int,
    length: int,
    precision: str,
    device_name: str | None,
) -> None:
    for option, value in (("--batch-size", batch_size), ("--length", length)):
        if value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"--precision must be fp32 or bf16, got {precision!r}")
    if device_name not in (None, "cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {device_name!r}")
    if device_name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch sees, and there is none")
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = models.load(model_name, training=train).to(device)
    if length > model.config.max_positions:
        raise ValueError(
            f"--length must be at most the model's {model.config.max_positions} positions, got {length}"
        )
    lengths = [length] * batch_size
    if isinstance(model, MaskedLM):
        step = models.training_step(model, lengths, device, precision == "bf16")
    else:
        model = model.bfloat16() if precision == "bf16" else model
        step = models.inference_step(model, lengths, device)
    output.mkdir(parents=True, exist_ok=True)
    profiled = profile_step(step, device, Ceilings(device), output / "trace.json")
    report.write_json(profiled, output / "profile.json")
    kind = "training" if train else "inference"
    title = f"{model_name}, {kind}, {batch_size} x {length} tokens, {precision}, {device.type}"
    report.draw(profiled, output / "profile.png", title)
    table = report.table(profiled)
    console = require("rich.console", extra="train").Console()
    # A file or a narrow terminal gets whole lines: a cut name is of no use.
    console.print(table, width=max(console.width, 140), crop=False, soft_wrap=True)
    print(report.summary(profiled))
    print(f"trace.json, profile.json and profile.png in {output}")


def bench(arguments: list[str]) -> None:
    # Benchmarks and their committed results belong to the repository: they run peers that an installation lacks.
    root = Path(fastenc.__file__).parents[2]
    if not (root / "benchmarks" / "run.py").is_file():
        raise ValueError(
            "the benchmarks are in fastenc's repository, not in the installed package: clone it, install it there with "
            "pip install --no-build-isolation -e . and run fastenc bench again"
        )
    raise SystemExit(
        subprocess.run([sys.executable, "-m", "benchmarks.run", *arguments], cwd=root).returncode
    )
