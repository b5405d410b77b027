"""A static model distilled from an encoder: one vector a token, and a text's vector their mean."""

import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._extras import require
from fastenc._files import write_atomically
from fastenc.models.tokenizers import special_tokens
from fastenc.packing import pack_sequences

WEIGHT = "embedding.weight"
CHUNK = 4096


class StaticModel:
    """Vectors of tokens, without an encoder: saved and loaded as sentence-transformers' StaticEmbedding.

        y(text) = Σ_{t in text} E[t] / number of tokens,  without special tokens

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        vectors: (vocabulary, width).
    """

    def __init__(self, tokenizer: Any, vectors: Tensor):
        if len(vectors) != tokenizer.get_vocab_size():
            raise ValueError(
                f"vectors must have a row for each of the {tokenizer.get_vocab_size()} tokens, got {len(vectors)}"
            )
        self.tokenizer, self.vectors = tokenizer, vectors

    def encode(self, texts: Sequence[str], normalize: bool = True) -> Tensor:
        """float32 (texts, width); 0 for a text without tokens."""
        ids = [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        batch = pack_sequences(ids)
        offsets = batch.cu_seqlens[:-1].long()
        found = F.embedding_bag(batch.input_ids, self.vectors.float(), offsets, mode="mean")
        return F.normalize(found, dim=1) if normalize else found

    def save(self, folder: str | Path) -> None:
        """Write a folder that sentence-transformers loads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file = require("safetensors.torch", extra="models").save_file
        tensors = {WEIGHT: self.vectors.contiguous()}
        write_atomically(folder / "model.safetensors", lambda path: save_file(tensors, path))
        write_atomically(folder / "tokenizer.json", lambda path: self.tokenizer.save(str(path)))
        kind = "sentence_transformers.models.StaticEmbedding"
        modules = [{"idx": 0, "name": "0", "path": "", "type": kind}]
        text = json.dumps(modules, indent=2)
        write_atomically(folder / "modules.json", lambda path: path.write_text(text))

    @classmethod
    def load(cls, folder: str | Path) -> "StaticModel":
        load_file = require("safetensors.torch", extra="models").load_file
        tokenizers = require("tokenizers", extra="models")
        tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        return cls(tokenizer, load_file(Path(folder) / "model.safetensors")[WEIGHT])


@torch.inference_mode()
def distill_static(
    encoder: Any,
    texts: Iterable[str],
    *,
    components: int | None = None,
    smoothing: float = 1e-3,
    batch_size: int = 1024,
) -> StaticModel:
    """A static model whose token vectors are the encoder's of each token alone, weighted by frequency.

        E[t] = smoothing / (smoothing + p(t)) · P (h_t - mean h),   h_t: mean of the last layer over [CLS] t [SEP]

    p is the tokens' frequency in the texts, so that frequent ones count less; P projects to the principal components.

    Args:
        texts: a sample of what the model will read.
        components: width of the vectors; None: that of the encoder, without a projection.
        smoothing: a of Arora et al.
    Raises: ValueError for no tokenizer, texts without tokens, or more components than there are dimensions.
    Source: Arora et al. 2017 (SIF weights), ICLR; Tulkens and van Dongen 2024 (Model2Vec).
    """
    tokenizer = encoder.tokenizer
    if tokenizer is None:
        raise ValueError("distill_static needs the checkpoint's tokenizer.json")
    width = encoder.config.hidden_size
    if components is not None and not 1 <= components <= width:
        raise ValueError(f"components must be from 1 to the encoder's {width}, got {components}")
    size, special = tokenizer.get_vocab_size(), special_tokens(tokenizer)
    counts = torch.zeros(size, dtype=torch.float64)
    rest = iter(texts)
    while chunk := list(islice(rest, CHUNK)):
        for encoding in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
            ids = torch.tensor(encoding.ids, dtype=torch.long)
            counts.index_add_(0, ids, torch.ones(len(ids), dtype=torch.float64))
    if not counts.sum():
        raise ValueError("the texts have no tokens: give a sample of what the model will read")
    device = encoder.embeddings.word.weight.device
    encoder.eval()
    parts = []
    for start in range(0, size, batch_size):
        tokens = range(start, min(start + batch_size, size))
        batch = pack_sequences([[special.cls, token, special.sep] for token in tokens]).to(device)
        parts.append(encoder.pooled_vectors(batch, "mean").float().cpu())
    vectors = torch.cat(parts)
    vectors -= vectors.mean(0)
    if components is not None:
        covariance = vectors.double().T @ vectors.double()
        vectors = (
            vectors @ torch.linalg.eigh(covariance).eigenvectors[:, -components:].flip(1).float()
        )
    weights = smoothing / (smoothing + counts / counts.sum())
    vectors = vectors * weights.float()[:, None]
    vectors[sorted(special.all)] = 0
    return StaticModel(tokenizer, vectors)
