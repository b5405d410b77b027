"""Hard negatives: documents that are near a query and do not belong to it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc._base.options import option
from fastenc._base.progress import progress_bar
from fastenc.models import Encoder
from fastenc.models.embedding.search import SEARCHES
from fastenc.tasks.reranker import Reranker, require_one_label

SAMPLINGS = ("top", "random")
NONE = float("-inf")


@dataclass(frozen=True)
class Mining:
    """Which documents are hard negatives of a query.

    Raises: ValueError naming the option, the rule and the value.
    """

    num_negatives: int = option(3, "Number of negatives for each query.")
    skip: int = option(
        0, "Number of the nearest documents that are left out: they may be unlabelled positives."
    )
    candidates: int | None = option(
        None,
        "Number of nearest documents to choose from. Default: what is needed; ten times the negatives with a limit of "
        "scores.",
    )
    max_score: float | None = option(None, "Leave out documents with a higher score.")
    min_score: float | None = option(None, "Leave out documents with a lower score.")
    margin: float | None = option(
        None,
        "Leave out documents whose score is not this much below that of the query's worst positive.",
    )
    relative_margin: float | None = option(
        None,
        "The same as a share of the positive's score: 0.05 keeps scores of at most 95 % of it.",
    )
    sampling: str = option(
        "top", "Which of the candidates are taken: top (the nearest), or random."
    )
    search: str = option(
        "exact", "How near documents are searched: exact, faiss (exact), or usearch (approximate)."
    )
    seed: int = option(0, "Seed of random sampling.")

    def __post_init__(self) -> None:
        for name, least in (("num_negatives", 1), ("skip", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} must be at least {least}, got {getattr(self, name)}: give more"
                )
        for name, known in (("sampling", SAMPLINGS), ("search", tuple(SEARCHES))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)}: give one of them"
                )
        if self.candidates is not None and self.candidates < self.skip + self.num_negatives:
            raise ValueError(
                f"candidates must be at least skip + num_negatives = {self.skip + self.num_negatives}, got "
                f"{self.candidates}: give more"
            )

    def number_of_candidates(self, positives: int) -> int:
        """Number of documents to choose from, if a query has at most this number of positives."""
        if self.candidates is not None:
            return self.candidates
        limits = (self.max_score, self.min_score, self.margin, self.relative_margin)
        several = 1 if all(limit is None for limit in limits) else 10
        return self.skip + several * self.num_negatives + positives


class Mined(NamedTuple):
    """A query with its positives and its hard negatives, the nearest first, with their scores."""

    query: str
    positives: list[str]
    negatives: list[str]
    positive_scores: list[float]
    negative_scores: list[float]


def mine_hard_negatives(
    encoder: Encoder,
    pairs: Iterable[Sequence[str]],
    corpus: Iterable[str] = (),
    options: Mining | None = None,
    *,
    cross_encoder: Reranker | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    batch_size: int = 32,
    show_progress: bool | None = None,
) -> list[Mined]:
    """Mine hard negatives by the cosine similarity of vectors, as sentence-transformers' function of this name does.

    The documents are the corpus and all positives. A query's own positives are no negatives, and a query that recurs
    has several. With a cross-encoder, its scores of the nearest documents replace the similarities, in the limits and
    in the order.

    Args:
        pairs: (query, positive).
        corpus: further documents. Empty ones are left out.
        options: None: :class:`Mining`.
        cross_encoder: it has one label.
        query_prompt, document_prompt: text before each query, and before each document. None: the checkpoint's prompts
            "query" and "document", if it has them.
        batch_size: texts, or pairs of the cross-encoder, in a batch.
        show_progress: None shows bars if stderr is a terminal.
    Returns: an item for each different query, in the order of the pairs. It has fewer negatives than asked for, or
        none, if the limits leave fewer.
    Raises: ValueError for no pairs, and for a cross-encoder with several labels.
    Source: the margins are those of Moreira et al. 2024, arXiv:2407.15831.
    """
    options = options or Mining()
    if cross_encoder is not None:
        require_one_label(cross_encoder, "cross_encoder", "take a reranker")
    positives_of: dict[str, dict[str, None]] = {}
    for query, positive in pairs:
        positives_of.setdefault(query, {})[positive] = None
    if not positives_of:
        raise ValueError("there must be a pair to mine negatives for, got none: give pairs")
    queries = list(positives_of)
    positive_texts = list(chain.from_iterable(positives_of.values()))
    # A text file may have empty lines, and no training takes an empty text.
    further = (text for text in corpus if text.strip())
    documents = list(dict.fromkeys([*further, *positive_texts]))
    index_of = {text: index for index, text in enumerate(documents)}
    stored = {} if encoder.sentence is None else encoder.sentence.prompts

    def embed(texts: list[str], prompt: str | None, name: str) -> Tensor:
        prompt = stored.get(name, "") if prompt is None else prompt
        return encoder.encode(
            texts, prompt=prompt, normalize=True, batch_size=batch_size, show_progress=show_progress
        )

    of_queries = embed(queries, query_prompt, "query")
    of_documents = embed(documents, document_prompt, "document")
    counts = [len(own) for own in positives_of.values()]
    most = max(counts)
    wanted = options.number_of_candidates(most)
    k = min(wanted + most, len(documents))
    search = SEARCHES[options.search]
    scores, indices = (each.cpu() for each in search(of_queries, of_documents, k, show_progress))
    rows = torch.arange(len(queries)).repeat_interleave(torch.tensor(counts))
    columns = torch.tensor([index_of[text] for text in positive_texts])
    if cross_encoder is None:
        products = of_queries.cpu()[rows].float() * of_documents.cpu()[columns].float()
        positive_scores = products.sum(1)
    else:
        predict = partial(cross_encoder.predict, batch_size=batch_size, show_progress=False)
        positive_scores = predict(
            [(queries[row], documents[column]) for row, column in zip(rows, columns, strict=True)]
        ).cpu()
        bar = progress_bar(queries, "scoring", "query", show_progress)
        scores = _scores_by(predict, zip(bar, indices, strict=True), documents)
        scores[indices < 0] = NONE  # an approximate search may find fewer
    own = positive_scores.split(counts)
    for row, of_query in enumerate(columns.split(counts)):
        scores[row, torch.isin(indices[row], of_query)] = NONE
    scores[_left_out(scores, torch.stack([each.min() for each in own]), options)] = NONE
    scores, order = scores.topk(min(wanted, k), dim=1)
    indices = indices.gather(1, order)
    draw = torch.Generator().manual_seed(options.seed)
    mined = []
    for row, (query, positives) in enumerate(positives_of.items()):
        ranks = _sampled_ranks(int((scores[row] > NONE).sum()), options, draw)
        negatives = [documents[column] for column in indices[row, ranks]]
        of_positives, of_negatives = own[row].tolist(), scores[row, ranks].tolist()
        mined.append(Mined(query, list(positives), negatives, of_positives, of_negatives))
    return mined


def _scores_by(
    predict: Callable[[list[tuple[str, str]]], Tensor],
    nearest: Iterable[tuple[str, Tensor]],
    documents: Sequence[str],
) -> Tensor:
    """A cross-encoder's scores (queries, k) of each query with its nearest documents, which are given by indices."""
    pairs_of = ([(query, documents[column]) for column in near] for query, near in nearest)
    return torch.stack([predict(pairs).cpu() for pairs in pairs_of])


def _sampled_ranks(candidates: int, options: Mining, draw: torch.Generator) -> Tensor:
    """The ranks of a query's negatives among its candidates, ascending."""
    ranks = torch.arange(candidates)[options.skip :]
    if options.sampling == "random":
        chosen = torch.randperm(len(ranks), generator=draw)[: options.num_negatives]
        ranks = ranks[chosen.sort().values]
    return ranks[: options.num_negatives]


def _left_out(scores: Tensor, worst_positive: Tensor, options: Mining) -> Tensor:
    """Which candidates the limits leave out: bool, as ``scores`` (queries, candidates)."""
    worst = worst_positive[:, None]
    left_out = torch.zeros_like(scores, dtype=torch.bool)
    if options.margin is not None:
        left_out |= scores + options.margin > worst
    if options.relative_margin is not None:
        left_out |= scores > worst - worst.abs() * options.relative_margin
    if options.max_score is not None:
        left_out |= scores > options.max_score
    if options.min_score is not None:
        left_out |= scores < options.min_score
    return left_out
