"""Metrics of rankings, by trec_eval (pytrec_eval)."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import ModuleType

from fastenc._base.extras import require

METRICS = ("ndcg@10", "mrr@10", "map", "recall@10")


def ranking_metrics(
    scores: Sequence[Sequence[float]], labels: Sequence[Sequence[float]]
) -> dict[str, float]:
    """ndcg@10, mrr@10, map and recall@10 over each query's candidates, means over the queries with a relevant one.

    A candidate is relevant if its label is above 0. The gain of nDCG is the label itself, as in trec_eval. Of
    candidates with equal scores, the less relevant ones rank first.

    Args:
        scores, labels: (candidates,) of each query; labels are whole numbers.
    Source: trec_eval, https://github.com/usnistgov/trec_eval.
    """
    trec_eval = require_trec_eval()
    truth, run = {}, {}
    for number, (row, relevance) in enumerate(zip(scores, labels, strict=True)):
        if max(relevance) <= 0:
            continue
        # Of equal scores, trec_eval ranks the last name first.
        order = sorted(range(len(row)), key=relevance.__getitem__, reverse=True)
        names = {index: f"{rank:09d}" for rank, index in enumerate(order)}
        truth[str(number)] = {names[i]: int(label) for i, label in enumerate(relevance)}
        run[str(number)] = {names[i]: float(score) for i, score in enumerate(row)}
    evaluator = trec_eval.RelevanceEvaluator(
        truth, {"ndcg_cut.10", "recip_rank", "map", "recall.10"}
    )
    results = list(evaluator.evaluate(run).values())
    # trec_eval has no reciprocal rank that is cut at ten.
    for each in results:
        each["recip_rank"] = each["recip_rank"] if each["recip_rank"] > 1 / 10.5 else 0.0
    measures = ("ndcg_cut_10", "recip_rank", "map", "recall_10")
    return {
        name: sum(each[measure] for each in results) / max(len(results), 1)
        for name, measure in zip(METRICS, measures, strict=True)
    }


def require_trec_eval() -> ModuleType:
    """pytrec_eval. Raises: ImportError naming the extra that installs it."""
    return require("pytrec_eval", extra="retrieval")


def check_relevance(path: str | Path, labels: Sequence[Sequence[float]]) -> None:
    """Raises: ValueError if labels to evaluate on are no whole numbers, or no document is relevant."""
    require_trec_eval()  # before the training
    values = {*chain.from_iterable(labels)}
    fraction = next((value for value in values if value != int(value)), None)
    if fraction is not None:
        raise ValueError(
            f"{path}: labels to evaluate on must be whole numbers, 0 for what is not relevant, got {fraction:g}: give "
            "the judged relevance"
        )
    if max(values) <= 0:
        raise ValueError(
            f"{path}: there must be a relevant document to evaluate on, got no label above 0: add some"
        )
