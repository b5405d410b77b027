"""Acceleration of live transformers models: patch for the supported encoders, an attention back-end for all others."""

from fastenc.integrations.transformers.attention_interface import register_attention
from fastenc.integrations.transformers.batch_metadata import DataCollatorWithSeqlens
from fastenc.integrations.transformers.patching import encoder_of, patch, unpatch

__all__ = ["DataCollatorWithSeqlens", "encoder_of", "patch", "register_attention", "unpatch"]
