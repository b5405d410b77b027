"""The devices, output files and printed metrics of commands."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from fastenc._base.files import check_not_input, write_text_atomically

DEVICE = "cpu or cuda. Default: a GPU if there is one."
DTYPE = (
    "float32, bfloat16 or int8. bfloat16: weights and states of 16 bits, for a GPU and for a CPU with AVX512-BF16 or "
    "AMX. int8 multiplies matrices in 8 bits, on a CPU with AVX512-VNNI, AVX-VNNI, AMX or AVX2: faster, with a quarter "
    "of the memory for the layers, and a little less exact."
)
DTYPES = ("float32", "bfloat16", "int8")


def checked_dtype(name: str) -> str:
    """``--dtype``, which ``from_pretrained`` takes. Raises: ValueError for another name."""
    if name not in DTYPES:
        raise ValueError(
            f"--dtype must be float32, bfloat16 or int8, got {name!r}: give one of them"
        )
    return name


def device_named(name: str | None, dtype: str = "float32") -> torch.device:
    """The torch device of ``--device``; None: a GPU if there is one, else the CPU. int8 runs on the CPU.

    Raises: ValueError for another name, for cuda without a GPU, and for cuda with int8.
    """
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {name!r}: give one of them")
    if dtype == "int8":
        if name == "cuda":
            raise ValueError("--dtype int8 runs on a CPU, got --device cuda: leave out one of them")
        return torch.device("cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch sees, got none: give cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def check_suffix(output: Path, allowed: tuple[str, ...]) -> None:
    """Raises: ValueError if the output's suffix is not one of these."""
    if output.suffix not in allowed:
        raise ValueError(f"--output must end in {' or '.join(allowed)}, got {output}")


def check_output(output: Path, allowed: tuple[str, ...], *inputs: str | None) -> None:
    """Check an output before any work, and make its folder if needed.

    Raises: ValueError for another suffix than these, and for an output that is one of the inputs. OSError if no file
        can be written there.
    """
    check_suffix(output, allowed)
    check_not_input(output, *(each for each in inputs if each is not None))
    make_writable(output.parent)


def make_writable(folder: Path) -> None:
    """Make the folder if needed. Raises: OSError with the folder if no file can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # Trying is the only test that also knows of read-only file systems and of network shares.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        error.filename = str(folder)  # it names the temporary file
        raise


def write_lines(output: Path, lines: Iterable[str]) -> None:
    """Write lines, whose file then replaces ``output``."""
    write_text_atomically(output, "".join(f"{line}\n" for line in lines))


def format_metrics(metrics: dict[str, float], titles: dict[str, str] | None = None) -> str:
    """Metrics on one line, with their names or, if given, their titles. Integers have no decimals."""
    named = {(titles or {}).get(name, name): value for name, value in metrics.items()}
    return "  ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}"
        for name, value in named.items()
    )
