"""Word-sense disambiguation: a sense's vector is the mean of its labelled examples' vectors; the nearest one wins."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_atomically, write_text_atomically
from fastenc._base.json_values import JsonObject
from fastenc.models.checkpoint import read_json, read_tensor_file
from fastenc.models.config import EncoderConfig
from fastenc.models.embedding.states import resolve_layers, visit_states
from fastenc.models.embedding.word_vectors import LAYERS
from fastenc.models.encoder import Encoder
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel
from fastenc.ops import segment_pool
from fastenc.packing import PackedBatch

NAMES, VECTORS = "senses.json", "senses.safetensors"


@dataclass(frozen=True)
class SenseInventory:
    """The senses of lemmas, with their vectors.

    Fields:
        senses: lemma → names of its senses. The rows of counts and vectors are in this order, lemma after lemma.
        counts: int64 (senses,), number of labelled examples of each sense.
        vectors: float32 (senses, hidden_size), mean of the examples' vectors.
        min_examples: senses with fewer examples are not chosen. If a lemma has no other senses, its most frequent one
            is chosen.
    """

    senses: dict[str, list[str]]
    counts: Tensor
    vectors: Tensor
    min_examples: int = 1

    def rows(self) -> dict[str, range]:
        """Lemma → the rows of its senses."""
        rows, start = {}, 0
        for lemma, names in self.senses.items():
            rows[lemma] = range(start, start + len(names))
            start += len(names)
        return rows


def nearest(vector: Tensor, vectors: Tensor, counts: Tensor, min_examples: int) -> Tensor:
    """Scores of one lemma's senses; the sense with the highest score is chosen.

    The score is the cosine similarity, or -inf for a sense with fewer than ``min_examples``. If all senses have fewer,
    the score is the number of examples.

    Args:
        vector: (..., width), the word's vector.
        vectors: (..., senses, width), the senses' vectors.
        counts: (senses,), numbers of examples.
    Returns: (..., senses).
    """
    enough = counts >= min_examples
    if not enough.any():
        return counts.to(vector.dtype).expand(*vector.shape[:-1], -1)
    cosines = F.cosine_similarity(vector[..., None, :], vectors, dim=-1)
    return cosines.masked_fill(~enough, -torch.inf)


class WordSenseModel(PretrainedModel):
    """An encoder and the vectors of senses. Saved as an encoder's checkpoint with senses.json and senses.safetensors.

    Args:
        layers: numbers of the states whose mean is a word's vector, as in
            :func:`fastenc.models.embedding.word_vectors.embed_words`. None: as the checkpoint says, else the last four.
    Raises: ValueError for layers that do not exist.
    Source: Loureiro et al. 2021, arXiv:2008.11608.
    """

    architecture = "ForWordSense"

    def __init__(self, config: EncoderConfig, layers: Sequence[int] | None = None):
        super().__init__(config)
        if layers is None:
            layers = LAYERS[-min(len(LAYERS), config.num_layers) :]
        self.layers = resolve_layers(layers, config.num_layers)
        self.encoder = Encoder(config.replace(pooler=False))
        self.inventory: SenseInventory | None = None

    @classmethod
    def build(
        cls, config: EncoderConfig, hf_config: JsonObject, **options: Any
    ) -> "WordSenseModel":
        if options.get("layers") is None:
            options["layers"] = hf_config.get("sense_layers")
        return cls(config, **options)

    def forward(
        self,
        batch: PackedBatch,
        spans: Tensor,
        candidates: Sequence[Sequence[int]] | None = None,
    ) -> ModelOutput:
        """The vectors of target words, as means over a word's tokens and over layers.

        Args:
            spans: int32 (2 * targets,), ascending: begin and end of each target's tokens in the packed batch.
            candidates: several lists of layers to compare; None: ``layers``.
        Returns: the vectors as logits, (targets, hidden_size), or with candidates (targets, candidates, hidden_size).
        """
        choices = [self.layers] if candidates is None else candidates
        edge = spans.new_zeros(1)
        segments = torch.cat((edge, spans, edge + batch.total_tokens))
        targets = torch.arange(1, len(spans), 2, device=spans.device)
        vectors: list[Any] = [0] * len(choices)

        def visit(layer: int, state: Tensor) -> None:
            pooled = segment_pool(state, segments, "mean").index_select(0, targets)
            for index, layers in enumerate(choices):
                if layer in layers:
                    vectors[index] = vectors[index] + pooled / len(layers)

        visit_states(self.encoder, batch, sorted(set().union(*choices)), visit)
        return ModelOutput(logits=vectors[0] if candidates is None else torch.stack(vectors, dim=1))

    def extra_config(self) -> JsonObject:
        return {"sense_layers": self.layers}

    def read_beside(self, folder: Path) -> None:
        if not (folder / NAMES).exists():
            return
        values = read_json(folder / NAMES)
        tensors: dict[str, Any] = read_tensor_file(folder / VECTORS)
        expected = sum(map(len, values["senses"].values()))
        if tensors["vectors"].shape != (expected, self.config.hidden_size):
            raise ValueError(
                f"{folder / VECTORS} must hold {expected} vectors of {self.config.hidden_size} numbers, got "
                f"{tuple(tensors['vectors'].shape)}: write the checkpoint again"
            )
        self.inventory = SenseInventory(**values, **tensors)

    def write_beside(self, folder: Path) -> None:
        if self.inventory is None:
            return
        save_file = require("safetensors.torch", extra="models").save_file
        inventory = self.inventory
        tensors = {
            "vectors": inventory.vectors.contiguous(),
            "counts": inventory.counts.contiguous(),
        }
        write_atomically(folder / VECTORS, lambda path: save_file(tensors, path))
        values = {"senses": inventory.senses, "min_examples": inventory.min_examples}
        write_text_atomically(folder / NAMES, json.dumps(values, ensure_ascii=False, indent=1))
