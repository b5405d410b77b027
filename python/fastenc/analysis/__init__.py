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
from fastenc.analysis.static_model import StaticModel, distill_static
from fastenc.analysis.static_vectors import (
    StaticVectors,
    compare_neighbours,
    read_analogies,
    read_static_vectors,
    score_analogies,
    static_correlation,
    train_word2vec,
)

__all__ = [
    "FrequencyBin",
    "Isotropy",
    "LayerCorrelation",
    "LayerIsotropy",
    "Moments",
    "ScoredPairs",
    "StaticModel",
    "StaticVectors",
    "compare_neighbours",
    "correlation_by_layer",
    "distill_static",
    "isotropy_by_layer",
    "read_analogies",
    "read_scored_pairs",
    "read_static_vectors",
    "score_analogies",
    "self_similarity",
    "sentence_moments",
    "similarity_by_frequency",
    "static_correlation",
    "train_word2vec",
    "visit_texts",
]
