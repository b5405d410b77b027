"""What an encoder's vectors mean: senses, similarity, isotropy, heads and layers."""

from fastenc.analysis.isotropy import Isotropy, self_similarity
from fastenc.analysis.moments import Moments
from fastenc.analysis.similarity import (
    FrequencyBin,
    LayerCorrelation,
    LayerIsotropy,
    ScoredPairs,
    correlation_by_layer,
    isotropy_by_layer,
    read_scored_pairs,
    sentence_moments,
    similarity_by_frequency,
)
from fastenc.analysis.states import visit_texts

__all__ = [
    "FrequencyBin",
    "Isotropy",
    "LayerCorrelation",
    "LayerIsotropy",
    "Moments",
    "ScoredPairs",
    "correlation_by_layer",
    "isotropy_by_layer",
    "read_scored_pairs",
    "self_similarity",
    "sentence_moments",
    "similarity_by_frequency",
    "visit_texts",
]
