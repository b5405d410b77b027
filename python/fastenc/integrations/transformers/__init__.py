"""Live Hugging Face encoders, unpadded and fused in place, and the attention kernel for all other models."""

from fastenc.integrations.transformers.attention_interface import register_attention
from fastenc.integrations.transformers.batch_metadata import DataCollatorWithSeqlens
from fastenc.integrations.transformers.patching import patch, unpatch

__all__ = ["DataCollatorWithSeqlens", "patch", "register_attention", "unpatch"]
