"""Extracts answers from the start and end logits of windows."""

import math
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.data.questions import Question, QuestionWindow


class Candidate(NamedTuple):
    """A possible answer: the characters [start, end) of the context. For "no answer", text is "" and both are 0.

    Fields:
        score: sum of the start and end logits.
        probability: softmax of the scores over a question's candidates.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float


class AnswerPrediction(NamedTuple):
    """A model's answer to one question.

    Fields:
        id: the question's id.
        text: the best span; "" if the context has no token.
        candidates: the best spans and "no answer", best first.
        no_answer_score: score of "no answer" minus the score of the best span.
    """

    id: str
    text: str
    candidates: list[Candidate]
    no_answer_score: float

    def answer(self, threshold: float | None) -> str:
        """The best span, or "" if ``no_answer_score`` is above ``threshold``. None: always the best span."""
        return self.text if threshold is None or self.no_answer_score <= threshold else ""


def extract_answers(
    questions: Sequence[Question],
    windows: Sequence[QuestionWindow],
    logits: Sequence[Tensor],
    *,
    n_best: int = 20,
    max_answer_tokens: int = 30,
) -> list[AnswerPrediction]:
    """The best spans of each question over all its windows.

        score(i, j) = start_logits[i] + end_logits[j],  i <= j < i + max_answer_tokens

    A span counts only in the window that owns its first token. It neither begins nor ends with a token of white space.
    The score of "no answer" in a window is the sum of the two logits of the window's first token. The score for the
    question is the minimum over its windows, because an answer in one window is enough.

    Args:
        questions: the questions that were encoded.
        windows: their windows, of :func:`fastenc.data.questions.question_windows`.
        logits: (tokens, 2) for each window, start and end.
        n_best: number of spans to keep for a question.
        max_answer_tokens: largest number of tokens of a span.
    Returns: a prediction for each question, in their order.
    Source: Devlin et al. 2018, arXiv:1810.04805, sections 4.2 and 4.3.
    """
    spans: list[dict[tuple[int, int], float]] = [{} for _ in questions]
    no_answer = [math.inf] * len(questions)
    for window, of_window in zip(windows, logits, strict=True):
        scores = of_window.float().cpu()
        no_answer[window.question] = min(no_answer[window.question], float(scores[0].sum()))
        candidates, context = spans[window.question], questions[window.question].context
        for key, score in _best_spans(context, window, scores, n_best, max_answer_tokens):
            candidates[key] = max(score, candidates.get(key, -math.inf))
    return [
        _prediction(question, candidates, none, n_best)
        for question, candidates, none in zip(questions, spans, no_answer, strict=True)
    ]


def _best_spans(
    context: str, window: QuestionWindow, scores: Tensor, n_best: int, max_answer_tokens: int
) -> list[tuple[tuple[int, int], float]]:
    """((start, end), score) of a window's best spans, as characters [start, end) of the context."""
    if not window.offsets:
        return []
    blank = torch.tensor([not context[start:end].strip() for start, end in window.offsets])
    start, end = scores[window.first : window.last + 1].masked_fill(blank[:, None], -math.inf).T
    start = start.masked_fill(~torch.tensor(window.central), -math.inf)
    # Row i holds the end logits of tokens i to i + max_answer_tokens - 1.
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
    question: Question, spans: dict[tuple[int, int], float], no_answer: float, n_best: int
) -> AnswerPrediction:
    ranked = sorted(spans.items(), key=lambda item: -item[1])[:n_best]
    rows = [(*_trimmed(question.context, *span), score) for span, score in ranked]
    text, *_, best = rows[0] if rows else ("", -math.inf)
    rows = sorted([*rows, ("", 0, 0, no_answer)], key=lambda row: -row[3])
    probabilities = torch.tensor([row[3] for row in rows], dtype=torch.float64).softmax(0)
    candidates = [Candidate(*row, p) for row, p in zip(rows, probabilities.tolist(), strict=True)]
    return AnswerPrediction(question.id, text, candidates, no_answer - best)


def _trimmed(context: str, start: int, end: int) -> tuple[str, int, int]:
    """(text, start, end) without white space at the ends, and with all marks of the last character.

    A token of ModernBERT includes the space before its word. The combining marks that a tokenizer drops or composes
    with the character before them are in no token.
    """
    text = context[start:end].strip()
    start = context.index(text, start)
    end = start + len(text)
    while unicodedata.category(context[end : end + 1] or " ")[0] == "M":
        end += 1
    return context[start:end], start, end
