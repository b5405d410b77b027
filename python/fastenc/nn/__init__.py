"""Modules over the fused ops, with the constructor arguments and state-dict keys of their torch.nn counterparts."""

from fastenc.nn.attention import MultiheadAttention
from fastenc.nn.crf import CRF
from fastenc.nn.cross_entropy import CrossEntropyLoss
from fastenc.nn.gelu import GELU
from fastenc.nn.glu import GEGLU, SwiGLU
from fastenc.nn.layer_norm import LayerNorm, RMSNorm
from fastenc.nn.scalar_mix import ScalarMix

__all__ = [
    "CRF",
    "GEGLU",
    "GELU",
    "CrossEntropyLoss",
    "LayerNorm",
    "MultiheadAttention",
    "RMSNorm",
    "ScalarMix",
    "SwiGLU",
]
