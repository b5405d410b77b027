"""Ways to adapt a pretrained encoder with fewer trained parameters."""

from fastenc.adapt.freezing import freeze_encoder, trained_parameters

__all__ = ["freeze_encoder", "trained_parameters"]
