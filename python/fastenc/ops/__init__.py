"""The public functions, one file an op; each chooses its implementation by DESIGN.md's table."""

from fastenc.ops.attention import attention
from fastenc.ops.bias_gelu import bias_gelu
from fastenc.ops.layer_norm import layer_norm, rms_norm

__all__ = ["attention", "bias_gelu", "layer_norm", "rms_norm"]
