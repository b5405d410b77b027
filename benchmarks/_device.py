"""What the figures are measured on: the device, its name, its ceilings, the libraries' versions."""

import os
import platform
import re
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fastenc.ops import library
from fastenc.profiling import Ceilings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
LIBRARIES = (
    "fastenc",
    "torch",
    "triton",
    "transformers",
    "liger-kernel",
    "cut-cross-entropy",
    "ctranslate2",
    "onnxruntime",
    "openvino",
    "nncf",
    "numpy",
)


def machine() -> dict:
    """The device and the versions with which the figures were measured."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name() if ON_GPU else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "int8_products": library._C.build_info()["int8_products"] if library.HAS_CPP else None,
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    if limit := os.environ.get("FASTENC_ISA"):  # it stands for another processor
        return f"{_processor_name()} as {limit}"
    # Processors with and without AMX can have the same name, but compute bfloat16 at different speeds.
    return _processor_name() + (" with AMX" if torch.cpu._is_amx_tile_supported() else "")


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    name = values.get("model name") or platform.processor() or "unknown processor"
    # Generations of AMD's server processors can have the same name, too. Zen 3 and Zen 4 share a family.
    has_avx512 = "avx512f" in values.get("flags", "").split()
    generations = {("25", False): "Zen 3", ("25", True): "Zen 4", ("26", True): "Zen 5"}
    generation = generations.get((values.get("cpu family", ""), has_avx512))
    return f"{name} ({generation})" if generation and name.startswith("AMD") else name


def folder_of_device() -> str:
    """The folder below benchmarks/results/ for this kind of device: nvidia-h200, amd-epyc-2-cores."""
    if ON_GPU:
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)|processor|cpu", "", _processor().lower()))
    return "-".join([*words, str(os.cpu_count()), "cores"])


@cache
def ceilings() -> Ceilings:
    """The ceilings of this process's device; each is measured when a figure first needs it."""
    return Ceilings(DEVICE)
