"""Make a live Hugging Face model of the BERT family unpadded and fused, in place."""

from fastenc.integrations.transformers.patching import patch, unpatch

__all__ = ["patch", "unpatch"]
