"""Trains few of a model's parameters: adaptations (LoRA and others), freezing, cached features."""

from fastenc.adapt.features import FeatureCache, cache_features
from fastenc.adapt.freezing import freeze_encoder, trained_parameters
from fastenc.models.adapters.adaptation_methods import Adapters, Lora, PrefixTuning, PromptTuning
from fastenc.models.adapters.adaptations import (
    add_adaptation,
    merge_adaptation,
    unmerge_adaptation,
    use_adaptation,
)
from fastenc.models.adapters.adapter_checkpoint import load_adaptation

__all__ = [
    "Adapters",
    "FeatureCache",
    "Lora",
    "PrefixTuning",
    "PromptTuning",
    "add_adaptation",
    "cache_features",
    "freeze_encoder",
    "load_adaptation",
    "merge_adaptation",
    "trained_parameters",
    "unmerge_adaptation",
    "use_adaptation",
]
