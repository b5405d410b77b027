"""Make a live Hugging Face model of the BERT family unpadded and fused, in place."""

from fastenc.integrations.transformers.batch_facts import DataCollatorWithFacts
from fastenc.integrations.transformers.patching import patch, unpatch

__all__ = ["DataCollatorWithFacts", "patch", "unpatch"]
