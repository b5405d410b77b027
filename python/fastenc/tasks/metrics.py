"""Metrics of the tasks, mostly by scikit-learn, scipy, seqeval, trec_eval, rouge-score and sacrebleu."""

import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base.extras import require
from fastenc.tasks.ranking_metrics import ranking_metrics
from fastenc.text.tags import Span

TEXTS_AT_ONCE = 1024  # number of texts that are compared with all candidates in one product


def classification_metrics(
    predictions: Sequence[int], labels: Sequence[int], num_labels: int
) -> dict[str, float]:
    """accuracy, f1 and mcc (Matthews correlation), each at most 1.

    f1 is that of class 1 if there are two classes, else the mean over the classes (macro).
    """
    sklearn = require("sklearn.metrics", extra="train")
    average = "binary" if num_labels == 2 else "macro"
    classes = None if num_labels == 2 else list(range(num_labels))
    return {
        "accuracy": float(sklearn.accuracy_score(labels, predictions)),
        "f1": float(
            sklearn.f1_score(labels, predictions, average=average, labels=classes, zero_division=0)
        ),
        "mcc": float(sklearn.matthews_corrcoef(labels, predictions)),
    }


def multi_label_metrics(
    predictions: Sequence[Sequence[bool]], labels: Sequence[Sequence[float]]
) -> dict[str, float]:
    """micro_f1, macro_f1 and accuracy. The accuracy is the share of texts for which all labels are right.

    Args:
        predictions, labels: (texts, num_labels).
    """
    sklearn = require("sklearn.metrics", extra="train")
    truth = [[bool(value) for value in row] for row in labels]
    # scikit-learn would take a single column for a problem with two classes.
    options = {"labels": [1]} if truth and len(truth[0]) == 1 else {}
    f1 = lambda average: float(
        sklearn.f1_score(truth, predictions, average=average, zero_division=0, **options)
    )
    return {
        "micro_f1": f1("micro"),
        "macro_f1": f1("macro"),
        "accuracy": float(sklearn.accuracy_score(truth, predictions)),
    }


def regression_metrics(predictions: Sequence[float], targets: Sequence[float]) -> dict[str, float]:
    """Pearson and Spearman correlation; 0 if predictions or targets are constant, where they are undefined."""
    stats = require("scipy.stats", extra="train")
    if len(set(predictions)) < 2 or len(set(targets)) < 2:
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(stats.pearsonr(predictions, targets).statistic),
        "spearman": float(stats.spearmanr(predictions, targets).statistic),
    }


def tagging_metrics(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]], *, entities: bool
) -> dict[str, float]:
    """accuracy over words and, if ``entities``, precision, recall and f1 over whole entities.

    The latter are micro averages by seqeval, which reads tags that break the rules of IOB2 or BIOES as conlleval does.
    They are 0 without entities.

    Args:
        predictions, labels: the tags of each sentence.
    """
    right = [
        one == two
        for p, y in zip(predictions, labels, strict=True)
        for one, two in zip(p, y, strict=True)
    ]
    metrics = {"accuracy": sum(right) / max(len(right), 1)}
    if not entities:
        return metrics
    seqeval = require("seqeval.metrics", extra="train")
    scores = {
        "f1": seqeval.f1_score,
        "precision": seqeval.precision_score,
        "recall": seqeval.recall_score,
    }
    of_entities = {
        name: float(f(labels, predictions, zero_division=0)) for name, f in scores.items()
    }
    return {**of_entities, **metrics}


def entity_metrics(
    predictions: Sequence[Iterable[Span]], gold: Sequence[Iterable[Span]]
) -> dict[str, float]:
    """f1, precision and recall over entities, as micro averages; 0 if the denominator is 0.

    A predicted entity is right if a gold entity has the same type, first and last word. ``nested`` is the number of
    gold entities that lie inside another one, ``nested_found`` how many of them were predicted.

    Args:
        predictions, gold: the entities of each sentence.
    """
    right = predicted = expected = nested = nested_found = 0
    for proposed, truth in zip(map(set, predictions), map(set, gold), strict=True):
        inner = {entity for entity in truth if any(_lies_inside(entity, other) for other in truth)}
        right += len(proposed & truth)
        predicted += len(proposed)
        expected += len(truth)
        nested += len(inner)
        nested_found += len(inner & proposed)
    return {
        "f1": 2 * right / max(predicted + expected, 1),
        "precision": right / max(predicted, 1),
        "recall": right / max(expected, 1),
        "nested": nested,
        "nested_found": nested_found,
    }


def generation_metrics(predictions: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """rouge_l, chrf, exact_match and, if every target is a number, pearson and spearman.

    - rouge_l: mean over the texts of the F1 of the longest common subsequence of words, by rouge-score, without
      stemming. It reads Latin letters and digits only.
    - chrf: character n-gram F-score of the corpus, from 0 to 100, by sacrebleu. It fits every script.
    - exact_match: share of the predictions that are their target.
    - pearson, spearman: of predictions as numbers, where a text that is no number counts as -1, as in T5's code.
    """
    rouge, sacrebleu = require_generation_metrics()
    scorer = rouge.RougeScorer(["rougeL"])
    pairs = list(zip(targets, predictions, strict=True))
    f1 = [scorer.score(target, text)["rougeL"].fmeasure for target, text in pairs]
    metrics = {
        "rouge_l": sum(f1) / max(len(f1), 1),
        "chrf": float(sacrebleu.corpus_chrf(predictions, [targets]).score) if pairs else 0.0,
        "exact_match": sum(target == text for target, text in pairs) / max(len(pairs), 1),
    }
    numbers = numbers_of(targets)
    if numbers is None:
        return metrics
    guesses = [(numbers_of([text]) or [-1.0])[0] for text in predictions]
    return {**metrics, **regression_metrics(guesses, numbers)}


def require_generation_metrics() -> tuple[ModuleType, ModuleType]:
    """rouge_score.rouge_scorer and sacrebleu. Raises: ImportError naming the extra that installs them."""
    names = ("rouge_score.rouge_scorer", "sacrebleu")
    rouge, sacrebleu = (require(name, extra="seq2seq") for name in names)
    return rouge, sacrebleu


def numbers_of(texts: Sequence[str]) -> list[float] | None:
    """The texts as numbers; None if one of them is no finite number, or if there are none."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    return numbers if numbers and all(map(math.isfinite, numbers)) else None


def _lies_inside(entity: Span, other: Span) -> bool:
    longer = other.stop - other.first > entity.stop - entity.first
    return longer and other.first <= entity.first and entity.stop <= other.stop


def retrieval_metrics(texts: Sequence[tuple[str, ...]], vectors: Tensor) -> dict[str, float]:
    """ndcg@10, mrr@10, map, recall@10 and recall@1: each text's partner is the one relevant candidate, by cosine
    similarity.

    Args:
        texts: (text, partner) or (text, partner, hard negative) of each pair.
        vectors: (pairs, 2 or 3, width).
    """
    unit = F.normalize(vectors.float(), dim=2)
    flat = unit.flatten(0, 1)
    ranks = partner_ranks(texts, lambda chosen, others: flat[chosen] @ flat[others].T)
    return {**_metrics_of_ranks(ranks), "recall@1": float((ranks == 1).double().mean())}


def sparse_retrieval_metrics(texts: Sequence[tuple[str, ...]], weights: Tensor) -> dict[str, float]:
    """ndcg@10, mrr@10, map and recall@10: each text's partner is the one relevant candidate, by dot product.

    Args:
        texts: as in :func:`retrieval_metrics`.
        weights: sparse (pairs * texts of a pair, vocabulary).
    """

    def products(chosen: Tensor, others: Tensor) -> Tensor:
        dense = weights.index_select(0, chosen).to_dense()
        return torch.sparse.mm(weights.index_select(0, others), dense.T).T

    return _metrics_of_ranks(partner_ranks(texts, products))


def _metrics_of_ranks(ranks: Tensor) -> dict[str, float]:
    """ndcg@10, mrr@10 and recall@10 by trec_eval, and map, from the rank of each query's one relevant candidate."""
    # Only this candidate and those before it count, and of these no more than ten.
    before = [min(int(rank) - 1, 10) for rank in ranks]
    metrics = ranking_metrics(
        [[*[1.0] * count, 0.0] for count in before], [[*[0.0] * count, 1.0] for count in before]
    )
    # With one relevant candidate, average precision is 1 / rank, however far down it is.
    return metrics | {"map": float((1 / ranks).mean())}


def partner_ranks(
    texts: Sequence[tuple[str, ...]], similarities: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The rank of each text's partner among the candidates, float64 (pairs,); 1 is the first.

    The candidates are all different partners and hard negatives, except the text itself and its other partners.
    Candidates with the same similarity as the partner rank before it.

    Args:
        texts: (text, partner) or (text, partner, hard negative) of each pair.
        similarities: function of the numbers of texts and of candidates that returns (texts, candidates). Texts are
            numbered pair after pair.
    """
    indices: dict[str, int] = {}
    numbers: list[int] = []
    partners: dict[str, set[int]] = {}
    width = len(texts[0]) if texts else 2
    for row, (text, *others) in enumerate(texts):
        for column, other in enumerate(others, start=1):
            if other not in indices:
                indices[other] = len(numbers)
                numbers.append(row * width + column)
        partners.setdefault(text, set()).add(indices[others[0]])
    for text, excluded in partners.items():
        excluded |= {indices[text]} if text in indices else set()
    candidates = torch.tensor(numbers, dtype=torch.long)
    ranks = [torch.empty(0, dtype=torch.long)]
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        queries = texts[start : start + TEXTS_AT_ONCE]
        values = similarities(torch.arange(start, start + len(queries)) * width, candidates)
        right = torch.tensor([indices[partner] for _, partner, *_ in queries])[:, None]
        of_partner = values.gather(1, right)
        for row, (text, *_) in enumerate(queries):
            values[row, list(partners[text])] = float("-inf")
        ranks.append(1 + (~(values < of_partner)).sum(1))  # ~(a < b) also counts NaN as better
    return torch.cat(ranks).double()
