"""Fused kernels for bidirectional transformer encoders: same checkpoints, same results, no computation on padding."""

from importlib import import_module

__version__ = "0.1.0"

# Public name → its module, or None for a submodule. Each is imported at its first use: `import fastenc` does not import
# transformers, and `fastenc --help` does not import torch.
_LAZY = {
    "patch": "fastenc.integrations.transformers",
    "unpatch": "fastenc.integrations.transformers",
    "encoder_of": "fastenc.integrations.transformers",
    "register_attention": "fastenc.integrations.transformers",
    "DataCollatorWithSeqlens": "fastenc.integrations.transformers",
    "Encoder": "fastenc.models",
    "compile_inference": "fastenc.graphs",
    "compile_training": "fastenc.graphs",
    "freeze": "fastenc.freezing",
    "unfreeze": "fastenc.freezing",
    "Seq2Seq": "fastenc.models",
    "SparseEncoder": "fastenc.models",
    "PackedBatch": "fastenc.packing",
    "predictor": "fastenc.tasks",
    "Reranker": "fastenc.tasks",
    "nn": None,
    "ops": None,
    "models": None,
    "packing": None,
}

__all__ = [
    "DataCollatorWithSeqlens",
    "Encoder",
    "PackedBatch",
    "Reranker",
    "Seq2Seq",
    "SparseEncoder",
    "__version__",
    "compile_inference",
    "compile_training",
    "encoder_of",
    "freeze",
    "models",
    "nn",
    "ops",
    "packing",
    "patch",
    "predictor",
    "register_attention",
    "unfreeze",
    "unpatch",
]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'fastenc' has no attribute {name!r}")
    module = _LAZY[name]
    if module is None:
        return import_module(f"fastenc.{name}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
