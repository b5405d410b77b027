"""The committed results of each device, and what pages say of its machine."""

import json

from benchmarks._results import RESULTS

# Names of providers in the results.
BASELINE, SORTED = "Hugging Face sdpa", "Hugging Face sdpa, sorted"


def devices() -> list[str]:
    """The names of the devices' folders."""
    return sorted(path.name for path in RESULTS.glob("*") if path.is_dir())


def load(device: str, name: str) -> dict | None:
    """A device's results of one benchmark; None if it has not been measured there."""
    path = RESULTS / device / f"{name}.json"
    return json.loads(path.read_text()) | {"folder": device} if path.exists() else None


def load_all(name: str) -> list[dict]:
    """The results of one benchmark on all devices that have them."""
    return [data for device in devices() if (data := load(device, name)) is not None]


def title_of(machine: dict) -> str:
    """The device; of a processor with its cores, because machines with the same processor have different ones."""
    of_processor = "cores" in machine and not is_gpu(machine)
    return machine["device"] + (f", {machine['cores']} cores" if of_processor else "")


def is_gpu(machine: dict) -> bool:
    return machine["device"].startswith("NVIDIA")


def machine_line(machine: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['device']}, {threads_of(machine)}; {versions}; {machine['date']}."


def threads_of(machine: dict) -> str:
    return "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
