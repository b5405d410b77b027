"""Which head attends to the other word of a dependency relation, on trees of Universal Dependencies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.analysis.errors import NotMeasured
from fastenc.analysis.heads import visit_heads
from fastenc.data.columns import numbered_blocks
from fastenc.models.encoder import Encoder
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.ops.head_statistics import HeadStatistics
from fastenc.packing import length_sorted_batches, pack_sequences
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizers import ids_and_starts, tokenizer_for_words

FORM, UPOS, HEAD, RELATION = 1, 3, 6, 7  # columns of CoNLL-U, from 0
DIRECTIONS = ("dependent to head", "head to dependent")


class Tree(NamedTuple):
    """A sentence with its dependency tree.

    Fields:
        heads: index of each word's head; -1 for the root.
        relations: relation of each word to its head, without subtypes (nsubj:pass is nsubj).
        upos: universal part of speech of each word.
    """

    words: list[str]
    heads: list[int]
    relations: list[str]
    upos: list[str]


def read_trees(path: str | Path) -> list[Tree]:
    """The sentences of a CoNLL-U file (.conllu, also gzipped).

    Raises: ValueError with file and line for another number of columns than 10, or a head outside the sentence.
    """
    trees = []
    for rows in numbered_blocks(path):
        heads = []
        for number, cells in rows:
            if len(cells) != 10:
                raise ValueError(
                    f"{path}, line {number}: a line of CoNLL-U must have 10 columns, got {len(cells)}: correct it"
                )
            if not cells[HEAD].isdecimal() or int(cells[HEAD]) > len(rows):
                raise ValueError(
                    f"{path}, line {number}: the head must be from 0 to {len(rows)}, the number of words of the "
                    f"sentence, got {cells[HEAD]!r}: correct it"
                )
            heads.append(int(cells[HEAD]) - 1)
        column = lambda index, rows=rows: [cells[index] for _, cells in rows]
        relations = [relation.split(":")[0] for relation in column(RELATION)]
        trees.append(Tree(column(FORM), heads, relations, column(UPOS)))
    if not trees:
        raise ValueError(f"{path} must hold sentences, got none: give a .conllu file")
    return trees


@dataclass
class RelationScores:
    """The scores of one relation in one direction.

    Fields:
        count: number of pairs of words with this relation.
        heads: int64 (layers, heads), number of pairs that each head finds.
        offsets: {distance to the other word: number of pairs}.
    """

    count: int
    heads: Tensor
    offsets: Counter = field(default_factory=Counter)

    @property
    def best_head(self) -> tuple[int, int, float]:
        """(layer, head, share of the pairs that this head finds); layer and head count from 0."""
        index = int(self.heads.argmax())
        layer, head = divmod(index, self.heads.shape[1])
        return layer, head, int(self.heads[layer, head]) / self.count

    @property
    def best_offset(self) -> tuple[int, float]:
        """(distance, share of the pairs): the baseline, the best fixed distance to the other word."""
        offset, count = self.offsets.most_common(1)[0]
        return offset, count / self.count


@torch.inference_mode()
def score_relations(
    encoder: Encoder, trees: Sequence[Tree], *, batch_size: int = 32
) -> dict[tuple[str, str], RelationScores]:
    """For each relation and direction, how often each head attends most to the right word.

    A head finds the other word if, for the first token of the word, a token of the other word has the highest
    probability among the tokens of all words. Special tokens are excluded. Sentences with more tokens than the encoder
    has positions are left out. The baseline is always the word at the best fixed distance.

    Args:
        encoder: a :class:`fastenc.Encoder` with a tokenizer.
    Returns: {(relation, direction): scores}; direction is one of ``DIRECTIONS``.
    Raises: NotMeasured (a ValueError) for a tokenizer without a token before a text, such as T5's and Qwen's.
    Source: Clark et al. 2019, arXiv:1906.04341.
    """
    tokenizer = encoder.own_tokenizer()
    special, splitter = special_tokens(tokenizer), tokenizer_for_words(tokenizer)
    if not special.begin:  # skip_ends would take the first word for a special token
        raise NotMeasured(
            "the scores of relations need a tokenizer with a special token before a text, such as [CLS], got one "
            "without: take a model that has one"
        )
    encodings = splitter.encode_batch(
        [tree.words for tree in trees], is_pretokenized=True, add_special_tokens=False
    )
    encoded = []
    for tree, encoding in zip(trees, encodings, strict=True):
        ids, starts = ids_and_starts(encoding, len(tree.words), special.unk)
        if 0 < len(ids) <= encoder.positions - 2:
            encoded.append((tree, [special.cls, *ids, special.sep], starts))
    shape = (encoder.config.num_layers, encoder.config.num_heads)
    scores: dict[tuple[str, str], RelationScores] = {}
    device = encoder.embeddings.word.weight.device
    with evaluation_mode(encoder):
        for indices in length_sorted_batches([len(ids) for _, ids, _ in encoded], batch_size):
            chosen = [encoded[index] for index in indices]
            batch = pack_sequences([ids for _, ids, _ in chosen]).to(device)
            strongest = torch.empty((*shape, batch.total_tokens), dtype=torch.int32)

            def keep(layer: int, statistics: HeadStatistics, into: Tensor = strongest) -> None:
                into[layer] = statistics.strongest.T.cpu()

            visit_heads(encoder, batch, keep, skip_ends=True)
            offset = 0
            for tree, ids, starts in chosen:
                _count(tree, starts, strongest[..., offset : offset + len(ids)], scores)
                offset += len(ids)
    return scores


def _count(
    tree: Tree,
    starts: list[int],
    strongest: Tensor,
    all_scores: dict[tuple[str, str], RelationScores],
) -> None:
    """Add the pairs of a sentence to ``all_scores``.

    Args:
        starts: index of each word's first token, and the number of tokens, [CLS] excluded.
        strongest: int32 (layers, heads, tokens), index of the token that each token attends to most, [CLS] included.
    """
    edges = torch.tensor(starts, dtype=torch.int32) + 1
    first = edges[:-1].long()
    # (layers, heads, words): the word that each word's first token attends to most.
    attended = torch.bucketize(strongest[..., first].contiguous(), edges, right=True) - 1
    for dependent, (head, relation) in enumerate(zip(tree.heads, tree.relations, strict=True)):
        if head < 0:
            continue
        for direction, one, other in (
            (DIRECTIONS[0], dependent, head),
            (DIRECTIONS[1], head, dependent),
        ):
            key = (relation, direction)
            if key not in all_scores:
                all_scores[key] = RelationScores(
                    0, torch.zeros(strongest.shape[:2], dtype=torch.int64)
                )
            scores = all_scores[key]
            scores.count += 1
            scores.heads += attended[..., one] == other
            scores.offsets[other - one] += 1
