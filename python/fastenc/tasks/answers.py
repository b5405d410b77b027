"""From start and end scores of windows to answers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.data.questions import Question, QuestionWindow


class Candidate(NamedTuple):
    """A possible answer: characters ``start`` to ``end`` of the context; all zero and "" for "no answer"."""

    text: str
    start: int
    end: int
    score: float
    probability: float


class AnswerPrediction(NamedTuple):
    """What a model says to one question.

    Fields:
        text: the best span; "" where the context has no token.
        candidates: the best spans and "no answer", best first; probabilities are a softmax over their scores.
        no_answer_score: score of "no answer" less that of the best span.
    """

    id: str
    text: str
    candidates: list[Candidate]
    no_answer_score: float

    def answer(self, threshold: float | None) -> str:
        """The best span, or "" where "no answer" scores more than ``threshold`` above it (None: always the span)."""
        return self.text if threshold is None or self.no_answer_score <= threshold else ""


def extract_answers(
    questions: Sequence[Question],
    windows: Sequence[QuestionWindow],
    logits: Sequence[Tensor],
    *,
    n_best: int = 20,
    max_answer_tokens: int = 30,
) -> list[AnswerPrediction]:
    """The best span start <= end of each question over all its windows.

        score(i, j) = start_logits[i] + end_logits[j],  i <= j < i + max_answer_tokens

    A span counts only in the window that gives its first token most context. "No answer" scores the sum of the first
    token's logits, the least over the windows: each of them has to say so.

    Args:
        logits: for each window (tokens, 2), start and end.
        n_best: candidates to keep.
    Source: Devlin et al. 2018, arXiv:1810.04805, sections 4.2 and 4.3.
    """
    spans: list[dict[tuple[int, int], float]] = [{} for _ in questions]
    nothing = [math.inf] * len(questions)
    for window, scores in zip(windows, logits, strict=True):
        found = spans[window.question]
        nothing[window.question] = min(nothing[window.question], float(scores[0].sum()))
        for key, score in _best_spans(window, scores.float().cpu(), n_best, max_answer_tokens):
            found[key] = max(score, found.get(key, -math.inf))
    return [
        _prediction(question, found, none, n_best)
        for question, found, none in zip(questions, spans, nothing, strict=True)
    ]


def _best_spans(
    window: QuestionWindow, scores: Tensor, n_best: int, max_answer_tokens: int
) -> list[tuple[tuple[int, int], float]]:
    """((first character, last character + 1), score) of a window's best spans."""
    if not window.offsets:
        return []
    start, end = scores[window.first : window.last + 1].unbind(1)
    start = start.masked_fill(~torch.tensor(window.central), -math.inf)
    # Row i: the end scores of tokens i to i + max_answer_tokens - 1.
    ends = F.pad(end, (0, max_answer_tokens - 1), value=-math.inf).unfold(0, max_answer_tokens, 1)
    best = (start[:, None] + ends).flatten().topk(min(n_best, ends.numel()))
    result = []
    for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        if score == -math.inf:
            break
        first, length = divmod(index, max_answer_tokens)
        result.append(((window.offsets[first][0], window.offsets[first + length][1]), score))
    return result


def _prediction(
    question: Question, spans: dict[tuple[int, int], float], nothing: float, n_best: int
) -> AnswerPrediction:
    ranked = sorted(spans.items(), key=lambda item: -item[1])[:n_best]
    rows = [(question.context[a:b], a, b, score) for (a, b), score in ranked]
    text, *_, best = rows[0] if rows else ("", -math.inf)
    rows = sorted([*rows, ("", 0, 0, nothing)], key=lambda row: -row[3])
    probabilities = torch.tensor([row[3] for row in rows], dtype=torch.float64).softmax(0)
    candidates = [Candidate(*row, p) for row, p in zip(rows, probabilities.tolist(), strict=True)]
    return AnswerPrediction(question.id, text, candidates, nothing - best)
