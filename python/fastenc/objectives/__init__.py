"""Pretraining objectives: what a model is trained to predict."""

from fastenc.objectives.base import PACKINGS, Collator, Objective, token_ids
from fastenc.objectives.denoise import DENOISE, DenoiseCollator
from fastenc.objectives.distill import DISTILL, DistillationCollator, DistilledLM
from fastenc.objectives.electra import ELECTRA, Electra, ElectraCollator
from fastenc.objectives.evaluation import evaluate_objective
from fastenc.objectives.mlm import MLM, MlmCollator, count_tokens
from fastenc.objectives.mlm_corruption import MlmCorruption
from fastenc.objectives.nsp import NSP, SOP, PairCollator, PairMaskedLM
from fastenc.objectives.span_corruption import (
    SPAN_CORRUPTION,
    UL2,
    UL2_DENOISERS,
    Denoiser,
    SpanCorruptionCollator,
)
from fastenc.objectives.spans import SPAN, SpanCollator, SpanMaskedLM

OBJECTIVES: dict[str, Objective] = {
    "mlm": MLM,
    "mlm+nsp": NSP,
    "mlm+sop": SOP,
    "span": SPAN,
    "electra": ELECTRA,
    "distill": DISTILL,
    "span-corruption": SPAN_CORRUPTION,
    "ul2": UL2,
    "denoise": DENOISE,
}

__all__ = [
    "OBJECTIVES",
    "PACKINGS",
    "UL2_DENOISERS",
    "Collator",
    "DenoiseCollator",
    "Denoiser",
    "DistillationCollator",
    "DistilledLM",
    "Electra",
    "ElectraCollator",
    "MlmCollator",
    "MlmCorruption",
    "Objective",
    "PairCollator",
    "PairMaskedLM",
    "SpanCollator",
    "SpanCorruptionCollator",
    "SpanMaskedLM",
    "count_tokens",
    "evaluate_objective",
    "token_ids",
]
