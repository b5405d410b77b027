"""A static model that is distilled from an encoder: each token has a vector, and a text's vector is their mean."""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_atomically, write_text_atomically
from fastenc.models.checkpoint import read_tensor_file
from fastenc.models.embedding.sentence_files import SentenceSettings
from fastenc.models.encoder import Encoder
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.packing import pack_sequences
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike

WEIGHT = "embedding.weight"
TEXTS_AT_ONCE = 4096  # number of texts in a call of the tokenizer


class StaticModel:
    """Computes text vectors from token vectors, without an encoder.

        y(text) = Σ_{t in text} E[t] / number of tokens,  special tokens excluded

    It is saved and loaded as sentence-transformers' StaticEmbedding.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        vectors: (vocabulary, width).
    Raises: ValueError for another number of vectors than tokens.
    """

    def __init__(self, tokenizer: TokenizerLike, vectors: Tensor):
        if len(vectors) != tokenizer.get_vocab_size():
            raise ValueError(
                f"vectors must have a row for each of the {tokenizer.get_vocab_size()} tokens, got {len(vectors)}: "
                "give the tokenizer that the vectors belong to"
            )
        # As in sentence-transformers: a padding token would count like the others.
        self.tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        self.tokenizer.no_padding()
        self.vectors = vectors

    def encode(self, texts: Sequence[str], normalize: bool = True) -> Tensor:
        """The vectors of texts: float32 (texts, width); 0 for a text without tokens.

        Args:
            normalize: scale vectors to length 1.
        """
        ids = [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        batch = pack_sequences(ids)
        offsets = batch.cu_seqlens[:-1].long()
        pooled = F.embedding_bag(batch.input_ids, self.vectors.float(), offsets, mode="mean")
        return F.normalize(pooled, dim=1) if normalize else pooled

    def save(self, folder: str | Path) -> None:
        """Write a folder that sentence-transformers loads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file = require("safetensors.torch", extra="models").save_file
        tensors = {WEIGHT: self.vectors.contiguous()}
        write_atomically(folder / "model.safetensors", lambda path: save_file(tensors, path))
        write_atomically(folder / "tokenizer.json", lambda path: self.tokenizer.save(str(path)))
        module_type = "sentence_transformers.models.StaticEmbedding"
        modules = [{"idx": 0, "name": "0", "path": "", "type": module_type}]
        write_text_atomically(folder / "modules.json", json.dumps(modules, indent=2))

    @classmethod
    def load(cls, folder: str | Path) -> "StaticModel":
        """Read a folder of :meth:`save` or of sentence-transformers. Raises: ValueError for another folder."""
        tensors = read_tensor_file(Path(folder) / "model.safetensors")
        if WEIGHT not in tensors:
            raise ValueError(
                f"{folder} must hold a static model, whose only weight is {WEIGHT}, got other weights: make a static "
                "model with distill_static"
            )
        tokenizers = require("tokenizers", extra="models")
        tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        return cls(tokenizer, tensors[WEIGHT])


@torch.inference_mode()
def distill_static(
    encoder: Encoder,
    texts: Iterable[str],
    *,
    components: int | None = None,
    smoothing: float = 1e-3,
    batch_size: int = 1024,
) -> StaticModel:
    """A static model whose token vectors are the encoder's vectors of single tokens, weighted by frequency.

        E[t] = smoothing / (smoothing + p(t)) · P (h_t - mean h),   h_t: mean of the last layer over [CLS] t [SEP]

    p(t) is the frequency of token t in the texts, so frequent tokens get smaller vectors. P projects to the principal
    components.

    Args:
        encoder: a :class:`fastenc.Encoder` with a tokenizer.
        texts: a sample of the texts that the model will encode.
        components: width of the vectors; None: that of the encoder's vectors of texts, without a projection.
        smoothing: the parameter a of Arora et al., positive.
        batch_size: number of tokens in a batch of the encoder.
    Raises: ValueError for an encoder without a tokenizer, texts without tokens, ``components`` above the encoder's
        width, and a ``smoothing`` or ``batch_size`` that is not positive.
    Source: Arora et al. 2017 (SIF weights), ICLR; Tulkens and van Dongen 2024 (Model2Vec).
    """
    tokenizer = encoder.tokenizer
    if tokenizer is None:
        raise ValueError(
            "the encoder must have a tokenizer, got none: load it from a folder with a tokenizer.json"
        )
    width = (encoder.sentence or SentenceSettings()).width(encoder.config.output_size)
    if components is not None and not 1 <= components <= width:
        raise ValueError(
            f"components must be from 1 to {width}, the width of the encoder's vectors, got {components}: give one in "
            "this range"
        )
    if not 0 < smoothing < math.inf:
        raise ValueError(f"smoothing must be positive and finite, got {smoothing}: 1e-3 is usual")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}: give more")
    size, special = tokenizer.get_vocab_size(), special_tokens(tokenizer)
    counts = torch.zeros(size, dtype=torch.float64)
    rest = iter(texts)
    while together := list(islice(rest, TEXTS_AT_ONCE)):
        for encoding in tokenizer.encode_batch_fast(together, add_special_tokens=False):
            ids = torch.tensor(encoding.ids, dtype=torch.long)
            counts.index_add_(0, ids, torch.ones(len(ids), dtype=torch.float64))
    if not counts.sum():
        raise ValueError(
            "the texts must have tokens, got none: give a sample of the texts that the model will encode"
        )
    device = encoder.embeddings.word.weight.device
    blocks = []
    with evaluation_mode(encoder):
        for start in range(0, size, batch_size):
            tokens = range(start, min(start + batch_size, size))
            sequences = [[*special.begin, token, special.sep] for token in tokens]
            batch = pack_sequences(sequences).to(device)
            blocks.append(encoder.pooled_vectors(batch, "mean").float().cpu())
    vectors = torch.cat(blocks)
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
