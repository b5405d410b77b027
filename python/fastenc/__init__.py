"""Fused kernels for bidirectional transformer encoders: same checkpoints, same numbers, no padding paid for."""

from importlib import import_module

__version__ = "0.1.0"

# Imported at first use, so that `import fastenc` needs torch only and `fastenc --help` not even that.
_LAZY = {
    "patch": "fastenc.integrations.transformers",
    "unpatch": "fastenc.integrations.transformers",
    "DataCollatorWithFacts": "fastenc.integrations.transformers",
    "Encoder": "fastenc.models",
    "compile_inference": "fastenc.models",
    "PackedBatch": "fastenc.packing",
    "predictor": "fastenc.tasks",
    "nn": None,
    "ops": None,
    "models": None,
    "packing": None,
}

__all__ = [
    "DataCollatorWithFacts",
    "Encoder",
    "PackedBatch",
    "__version__",
    "compile_inference",
    "models",
    "nn",
    "ops",
    "packing",
    "patch",
    "predictor",
    "unpatch",
]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'fastenc' has no attribute {name!r}")
    home = _LAZY[name]
    return import_module(f"fastenc.{name}") if home is None else getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
