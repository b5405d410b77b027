"""Metrics of extractive question answering, as SQuAD's evaluation scripts compute them.

Source: Rajpurkar et al. 2016, arXiv:1606.05250, and 2018, arXiv:1806.03822; evaluate-v1.1 and evaluate-v2.0.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from fastenc.data.questions import Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized_words(text: str) -> list[str]:
    """The words of a text in lower case, without ASCII punctuation and the articles a, an, the."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(prediction: str, answer: str) -> float:
    """1.0 if the normalised words are equal, else 0.0."""
    return float(normalized_words(prediction) == normalized_words(answer))


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the normalised words. A word counts as often as it occurs."""
    predicted, expected = normalized_words(prediction), normalized_words(answer)
    if not predicted or not expected:
        return float(predicted == expected)
    common = (Counter(predicted) & Counter(expected)).total()
    return 2 * common / (len(predicted) + len(expected))


def squad_metrics(
    questions: Sequence[Question], predictions: Mapping[str, str]
) -> dict[str, float]:
    """Mean scores over the questions, in percent. A question has its best score over its answers.

    An unanswerable question has the answer "".

    Args:
        predictions: {question id: answer}, "" for "no answer".
    Returns: exact and f1. If some questions have no answer, also has_answer_exact and has_answer_f1 of the questions
        with an answer, and no_answer_exact of those without one, whose f1 is the same.
    Raises: ValueError if a question has no prediction.
    """
    rows = [_best_scores(question, predictions) for question in questions]
    metrics = _means("", rows)
    answerable = [row for row, q in zip(rows, questions, strict=True) if q.answers]
    rest = [row for row, q in zip(rows, questions, strict=True) if not q.answers]
    if rest:
        metrics |= _means("has_answer_", answerable) if answerable else {}
        metrics["no_answer_exact"] = _means("", rest)["exact"]
    return metrics


def best_threshold(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    no_answer_scores: Mapping[str, float],
) -> float:
    """The threshold t with the highest F1, if questions with a ``no_answer_score`` above t are left unanswered.

    Args:
        predictions: {question id: text of the best span}.
        no_answer_scores: {question id: score of "no answer" minus the score of that span}.
    """
    order = sorted(questions, key=lambda question: no_answer_scores[question.id])
    unanswered = lambda question: float(_answers(question) == [""])
    # With a threshold below every score, no question is answered.
    total = best = sum(map(unanswered, questions), 0.0)
    threshold = no_answer_scores[order[0].id] - 1.0 if order else 0.0
    for index, question in enumerate(order):
        total += _best_scores(question, predictions)[1] - unanswered(question)
        score = no_answer_scores[question.id]
        following = no_answer_scores[order[index + 1].id] if index + 1 < len(order) else score + 1
        if following > score and total > best:
            best, threshold = total, (score + following) / 2
    return threshold


def _answers(question: Question) -> list[str]:
    """The answers that have words. evaluate-v2.0 drops the others: a "." in SQuAD would equal "no answer"."""
    texts = [answer.text for answer in question.answers]
    return [text for text in texts if normalized_words(text)] or [""]


def _best_scores(question: Question, predictions: Mapping[str, str]) -> tuple[float, float]:
    if question.id not in predictions:
        raise ValueError(
            f"there is no prediction for question {question.id!r}: predict every question, with '' for no answer"
        )
    prediction, answers = predictions[question.id], _answers(question)
    return (
        max(exact_match(prediction, answer) for answer in answers),
        max(f1(prediction, answer) for answer in answers),
    )


def _means(prefix: str, rows: Sequence[tuple[float, float]]) -> dict[str, float]:
    exact, f1_score = (100 * sum(column) / len(rows) for column in zip(*rows, strict=True))
    return {f"{prefix}exact": exact, f"{prefix}f1": f1_score}
