"""Pretraining objectives: what a model is trained to predict."""

from fastenc.objectives.base import PACKINGS, Collator, Objective, token_ids
from fastenc.objectives.distill import DISTILL, DistillationCollator, DistilledLM
from fastenc.objectives.electra import ELECTRA, Electra, ElectraCollator
from fastenc.objectives.evaluation import evaluate_objective
from fastenc.objectives.mlm import MLM, MlmCollator, count_tokens
from fastenc.objectives.mlm_corruption import MlmCorruption
from fastenc.objectives.nsp import NSP, SOP, PairCollator, PairMaskedLM
from fastenc.objectives.spans import SPAN, SpanCollator, SpanMaskedLM

OBJECTIVES: dict[str, Objective] = {
    "mlm": MLM,
    "mlm+nsp": NSP,
    "mlm+sop": SOP,
    "span": SPAN,
    "electra": ELECTRA,
    "distill": DISTILL,
}

__all__ = [
    "OBJECTIVES",
    "PACKINGS",
    "Collator",
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
    "SpanMaskedLM",
    "count_tokens",
    "evaluate_objective",
    "token_ids",
]
