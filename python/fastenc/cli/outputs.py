"""What commands do with devices and files that they write."""

from pathlib import Path

import torch

from fastenc._files import write_atomically

DEVICE = "cpu or cuda. Default: a GPU if there is one."


def device_named(name: str | None) -> torch.device:
    """Raises: ValueError for another name, or for cuda without a GPU."""
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch sees, and there is none")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def check_suffix(output: Path, allowed: tuple[str, ...]) -> None:
    if output.suffix not in allowed:
        raise ValueError(f"--output must end in {' or '.join(allowed)}, got {output}")


def write(output: Path, writer) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, writer)


def figures(metrics: dict[str, float], titles: dict[str, str] | None = None) -> str:
    """Metrics on one line, under their names or titles; counts as whole numbers."""
    named = {(titles or {}).get(name, name): value for name, value in metrics.items()}
    return "  ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}"
        for name, value in named.items()
    )
