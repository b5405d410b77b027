"""Greedy and beam search with the decoder's cache of keys and values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastenc.models.decoder import Decoder
from fastenc.models.encoder import Encoder
from fastenc.models.next_tokens import TokenRules, next_tokens
from fastenc.nn.evaluation_mode import without_dropout
from fastenc.nn.layer_cache import LayerCache
from fastenc.packing import PackedBatch

NEVER = -1e9  # the score of what must not be chosen


@dataclass(frozen=True)
class SearchOptions:
    """How targets are searched.

    Fields:
        max_new_tokens: the most tokens of a target, with the end token.
        num_beams: partial targets that are kept for each source; 1: greedy search.
        length_penalty: a finished target's score is the sum of its tokens' log-probabilities, divided by the number of
            tokens to this power.
        early_stopping: whether a search ends as soon as it has ``num_beams`` finished targets; else it ends when no
            partial target can become better than they are.
        rules: which tokens may follow a target.
    """

    max_new_tokens: int
    num_beams: int
    length_penalty: float
    early_stopping: bool
    rules: TokenRules


class EncoderDecoder(Protocol):
    """What a search reads of a model. ``logits``: (tokens, hidden_size) → (tokens, vocabulary)."""

    encoder: Encoder
    decoder: Decoder

    def logits(self, hidden: Tensor) -> Tensor: ...


# Beam indices or None, and the last tokens (rows,) → logits of the next token (rows, vocabulary).
Step = Callable[[Tensor | None, Tensor], Tensor]


@torch.inference_mode()
def search(model: EncoderDecoder, batch: PackedBatch, options: SearchOptions) -> list[list[int]]:
    """The target of each source: its tokens after the start token, with the end token if it was reached.

    The results are those of transformers' greedy and beam search with the same options.
    """
    if not batch.num_sequences:
        return []
    decoder = model.decoder
    with (
        without_dropout(),
        decoder.frozen.during_call(decoder, calls=options.max_new_tokens),
    ):
        step = _decoding(model, batch)
        return (_greedy if options.num_beams == 1 else _beams)(step, batch, options)


def _decoding(model: EncoderDecoder, batch: PackedBatch) -> Step:
    """A function that decodes one more token of every target, of which a source may have several."""
    states = model.encoder(batch).last_hidden_state
    caches = [LayerCache() for _ in model.decoder.stack.layers]
    device, config = batch.input_ids.device, model.decoder.config

    def step(chosen: Tensor | None, tokens: Tensor) -> Tensor:
        if chosen is not None:
            for cache in caches:
                cache.select(chosen)
        count = tokens.shape[0]
        positions = torch.full((count,), caches[0].length, device=device)
        if config.architecture.positions_after_padding:
            # A padding token takes the row before the first position's.
            positions = positions.masked_fill(tokens == config.pad_token_id, -1)
        target = PackedBatch(
            input_ids=tokens,
            cu_seqlens=torch.arange(count + 1, dtype=torch.int32, device=device),
            max_seqlen=1,
            position_ids=positions,
        )
        return model.logits(model.decoder(target, states, batch, caches))

    return step


def _greedy(step: Step, batch: PackedBatch, options: SearchOptions) -> list[list[int]]:
    device, rules = batch.input_ids.device, options.rules
    tokens = torch.full((batch.num_sequences,), rules.start, device=device)
    ends = torch.tensor(rules.ends, dtype=torch.long, device=device)
    finished = torch.zeros_like(tokens, dtype=torch.bool)
    targets = tokens.new_empty(batch.num_sequences, 0)
    for _ in range(options.max_new_tokens):
        tokens = next_tokens(step(None, tokens), targets, rules, 1)[1][:, 0]
        targets = torch.cat([targets, tokens[:, None]], 1)
        finished |= torch.isin(tokens, ends)
        if finished.all():
            break
    return [_until_end(row, rules.ends) for row in targets.tolist()]


def _until_end(row: list[int], ends: Sequence[int]) -> list[int]:
    length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
    return row[:length]


class _Finished:
    """The best finished targets of one source, and whether a better one may still come."""

    def __init__(self, options: SearchOptions):
        self.options, self.open = options, True
        self.best: list[tuple[float, list[int]]] = []

    @property
    def full(self) -> bool:
        return len(self.best) == self.options.num_beams

    def add(self, ended: Sequence[tuple[float, list[int]]]) -> None:
        """Add the targets that ended with one token: the sums of their log-probabilities, and their tokens."""
        if not self.open or (self.full and self.options.early_stopping):
            return
        penalty = self.options.length_penalty
        scored = [(score / len(target) ** penalty, target) for score, target in ended]
        self.best = sorted(self.best + scored, key=lambda pair: -pair[0])[: self.options.num_beams]

    def close_if_done(self, best_running: float, length: int) -> None:
        possible = best_running / length**self.options.length_penalty
        if self.full and possible <= self.best[-1][0]:
            self.open = False


def _beams(step: Step, batch: PackedBatch, options: SearchOptions) -> list[list[int]]:
    device, sources, beams = batch.input_ids.device, batch.num_sequences, options.num_beams
    rules = options.rules
    finished = [_Finished(options) for _ in range(sources)]
    # Each source begins with one target; the others would be its copies.
    tokens = torch.full((sources,), rules.start, device=device)
    scores, chosen = torch.zeros(sources, 1, device=device), None
    targets = torch.empty(sources, 1, 0, dtype=torch.long, device=device)
    ends = torch.tensor(rules.ends, dtype=torch.long, device=device)
    candidates = max(2, 1 + len(rules.ends)) * beams
    for place in range(options.max_new_tokens):
        width = scores.shape[1]
        # The best of a source are among the best of each of its targets.
        following, tokens = next_tokens(
            step(chosen, tokens), targets.flatten(0, 1), rules, candidates
        )
        count = following.shape[1]
        total = (following.view(sources, width, count) + scores[:, :, None]).flatten(1)
        best, flat = total.topk(min(candidates, total.shape[1]))
        parents, words = flat // count, tokens.view(sources, -1).gather(1, flat)
        grown = targets.gather(1, parents[:, :, None].expand(-1, -1, place))
        grown = torch.cat([grown, words[:, :, None]], 2)
        ended = torch.isin(words, ends) | (place + 1 == options.max_new_tokens)
        _add_finished(finished, best[:, :beams], ended[:, :beams], grown)
        scores, order = (best + ended * NEVER).topk(beams)
        targets = grown.gather(1, order[:, :, None].expand(-1, -1, place + 1))
        first = torch.arange(sources, device=device)[:, None] * width
        chosen = (parents.gather(1, order) + first).flatten()
        tokens = targets[:, :, -1].flatten()
        for each, running in zip(finished, scores[:, 0].tolist(), strict=True):
            each.close_if_done(running, place + 1)
        if not any(each.open for each in finished) or bool(ended.all()):
            break
        if options.early_stopping and all(each.full for each in finished):
            break
    return [each.best[0][1] for each in finished]


def _add_finished(
    finished: Sequence[_Finished], scores: Tensor, ended: Tensor, targets: Tensor
) -> None:
    for source, beams in enumerate(ended.tolist()):
        rows = [beam for beam, has_ended in enumerate(beams) if has_ended]
        finished[source].add(
            [(float(scores[source, beam]), targets[source, beam].tolist()) for beam in rows]
        )
