"""Analyses of an encoder: senses, similarity and isotropy of its vectors, its attention heads and its layers."""

from fastenc.analysis.analogies import AnalogyScore, read_analogies, score_analogies
from fastenc.analysis.analyze import analyze
from fastenc.analysis.data_files import AnalysisData, find_data, labelled_words
from fastenc.analysis.errors import TooFewData, UnknownAttention
from fastenc.analysis.heads import HeadSummary, summarize_heads, visit_heads
from fastenc.analysis.isotropy import Isotropy, self_similarity
from fastenc.analysis.mix import learn_mix
from fastenc.analysis.moments import Moments
from fastenc.analysis.neighbours import (
    Occurrence,
    compare_neighbours,
    find_occurrences,
    isolated_vectors,
)
from fastenc.analysis.probes import LabelledWords, ProbeScore, majority_accuracy, probe_by_layer
from fastenc.analysis.relations import RelationScores, Tree, read_trees, score_relations
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
    vectors_by_layer,
)
from fastenc.analysis.states import visit_texts
from fastenc.analysis.static_comparison import (
    StaticComparison,
    compare_analogies,
    compare_pairs,
)
from fastenc.analysis.static_model import StaticModel, distill_static
from fastenc.analysis.static_vectors import (
    StaticVectors,
    read_static_vectors,
    static_correlation,
    train_word2vec,
)

__all__ = [
    "AnalogyScore",
    "AnalysisData",
    "FrequencyBin",
    "HeadSummary",
    "Isotropy",
    "LabelledWords",
    "LayerCorrelation",
    "LayerIsotropy",
    "Moments",
    "Occurrence",
    "ProbeScore",
    "RelationScores",
    "ScoredPairs",
    "StaticComparison",
    "StaticModel",
    "StaticVectors",
    "TooFewData",
    "Tree",
    "UnknownAttention",
    "analyze",
    "compare_analogies",
    "compare_neighbours",
    "compare_pairs",
    "correlation_by_layer",
    "distill_static",
    "find_data",
    "find_occurrences",
    "isolated_vectors",
    "isotropy_by_layer",
    "labelled_words",
    "learn_mix",
    "majority_accuracy",
    "probe_by_layer",
    "read_analogies",
    "read_scored_pairs",
    "read_static_vectors",
    "read_trees",
    "score_analogies",
    "score_relations",
    "self_similarity",
    "sentence_moments",
    "similarity_by_frequency",
    "static_correlation",
    "summarize_heads",
    "train_word2vec",
    "vectors_by_layer",
    "visit_heads",
    "visit_texts",
]
