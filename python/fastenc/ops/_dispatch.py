"""Which implementation an op takes: the rule of the table in docs/design/0003-dispatch.md."""

import torch
from torch import Tensor

from fastenc.ops._library import CPP_DTYPES, CUDA_DTYPES, HAS_CPP, HAS_CUDA, HAS_TRITON

IMPLEMENTATIONS = ("auto", "cpp", "cuda", "triton", "reference")
WITH_TRITON = {
    "attention",
    "bias_gelu",
    "bias_glu",
    "crf",
    "crf_decode",
    "crf_log_likelihood",
    "crf_marginals",
    "cross_attention",
    "embedding_layer_norm",
    "head_statistics",
    "layer_norm",
    "mlm_corruption",
    "pack",
    "rms_norm",
    "segment_pool",
    "tied_embedding_layer_norm",
    "unpack",
}
WITH_CUDA = {"masked_cross_entropy", "linear_masked_cross_entropy"}
WITHOUT_CPP = {"linear_kl_divergence", "mlm_corruption"}
# Of ops whose kernels take others than CPP_DTYPES and CUDA_DTYPES.
OWN_DTYPES = {"mlm_corruption": (torch.int64,)}


def choose(
    op: str,
    impl: str,
    x: Tensor,
    *,
    cpp_limit: str | None = None,
    triton_limit: str | None = None,
) -> str:
    """Resolve ``impl`` for input ``x`` to "cpp", "cuda", "triton" or "reference".

    Args:
        cpp_limit, triton_limit: why this call's arguments are beyond that kernel, or None.
    Raises: ValueError when an implementation asked for by name cannot take the call.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: impl must be one of {IMPLEMENTATIONS}, got {impl!r}")
    if impl == "auto":
        on_gpu = "cuda" if op in WITH_CUDA else "triton"
        impl = "cpp" if x.device.type == "cpu" else on_gpu
        return "reference" if _obstacle(op, impl, x, cpp_limit, triton_limit) else impl
    reason = _obstacle(op, impl, x, cpp_limit, triton_limit)
    if reason is not None:
        raise ValueError(f"{op}: impl={impl!r} cannot take this call: {reason}")
    return impl


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of matrix products inside autocast, None outside."""
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def _obstacle(
    op: str, impl: str, x: Tensor, cpp_limit: str | None, triton_limit: str | None
) -> str | None:
    if impl == "cpp":
        if op in WITHOUT_CPP:
            return "it has no C++ kernel"
        if not HAS_CPP:
            return "the compiled extension is not available: see `fastenc info`"
        if x.device.type != "cpu":
            return f"it runs on CPU tensors, got one on {x.device}"
        if x.dtype not in OWN_DTYPES.get(op, CPP_DTYPES):
            return f"it takes float32 or bfloat16, got {x.dtype}"
        return cpp_limit
    if impl == "reference":
        return None
    if impl == "triton":
        if op not in WITH_TRITON:
            return "it has no Triton kernel"
        if not HAS_TRITON:
            return "triton is not installed"
    else:
        if op not in WITH_CUDA:
            return "it has no CUDA kernel"
        if not HAS_CUDA:
            return "the extension was compiled without CUDA: see `fastenc info`"
    if x.device.type != "cuda":
        return f"it runs on CUDA tensors, got one on {x.device}"
    if x.dtype not in OWN_DTYPES.get(op, CUDA_DTYPES):
        return f"it takes float32, float16 or bfloat16, got {x.dtype}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    return triton_limit if impl == "triton" else None
