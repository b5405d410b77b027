"""BGE-M3: one forward gives a vector of each text, and a weight and a vector of each of its tokens."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._base.extras import require
from fastenc._base.files import write_atomically
from fastenc._base.progress import progress_bar, unless_few
from fastenc._base.transfer import send
from fastenc.models.checkpoint import read_tensor_file, resolve
from fastenc.models.embedding.text_batches import TextBatches, checked_texts
from fastenc.models.encoder import Encoder
from fastenc.nn.evaluation_mode import without_dropout
from fastenc.nn.pooling import pool
from fastenc.ops.gemm import linear_in_one_order
from fastenc.packing import PackedBatch
from fastenc.text.special_tokens import special_tokens

HEADS = ("sparse_linear", "colbert_linear")  # modules, and stems of their files


class M3Vectors(NamedTuple):
    """What :meth:`M3Encoder.encode` computes, of several texts or of one.

    Fields:
        dense: (texts, hidden_size), of length 1; compared by dot products.
        sparse: a dictionary {token: weight} for each text, from the heaviest to the lightest, or None. Texts are
            compared by the sum of w_a w_b over the tokens that both have.
        multi_vectors: (tokens, width) for each text, a vector of length 1 for each token after the first, or None.
            Texts are compared by MaxSim: the mean over the query's vectors of the largest dot product with one of the
            document's.
    """

    dense: Tensor
    sparse: Any
    multi_vectors: Any


class M3Encoder(nn.Module):
    """An encoder with the two further heads of BGE-M3.

        dense = x_0 / |x_0|
        sparse[v] = max over the tokens t with the id v of relu(w . x_t + c)
        multi_vectors[t] = y_t / |y_t|,   y_t = W x_t + b

    x_t are the last states. Special tokens have no sparse weight, and the first token has no vector.

    Args:
        encoder: with the tokenizer of the checkpoint.
        width: of the multi-vectors; None: the encoder's.
    Source: Chen et al. 2024, arXiv:2402.03216; github.com/FlagOpen/FlagEmbedding, BGEM3FlagModel.
    """

    def __init__(self, encoder: Encoder, width: int | None = None):
        super().__init__()
        self.encoder = encoder
        hidden_size = encoder.config.hidden_size
        self.sparse_linear = nn.Linear(hidden_size, 1)
        self.colbert_linear = nn.Linear(hidden_size, width or hidden_size)

    @classmethod
    def from_pretrained(
        cls, path_or_hub_id: str | Path, *, dtype: torch.dtype | str = torch.float32
    ) -> "M3Encoder":
        """Load an encoder and its heads, in evaluation mode.

        The heads are sparse_linear and colbert_linear, each in a .safetensors file, or as published in a .pt file, of
        which tensors alone are read (``torch.load(weights_only=True)``).

        Args: path_or_hub_id, dtype: as :meth:`fastenc.Encoder.from_pretrained` takes them; "int8" leaves the heads in
            float32.
        Raises: ValueError for a folder without these files or with other tensors in them, and as
            :meth:`fastenc.Encoder.from_pretrained`.
        """
        folder = resolve(path_or_hub_id)
        encoder = Encoder.from_pretrained(folder, dtype=dtype)
        hidden_size = encoder.config.hidden_size
        sparse, multi = (_read_linear(folder, name, hidden_size) for name in HEADS)
        if len(sparse["bias"]) != 1:
            raise ValueError(
                f"{folder}: {HEADS[0]} must have one output, got {len(sparse['bias'])}: does it belong to this model?"
            )
        model = cls(encoder, len(multi["bias"]))
        model.sparse_linear.load_state_dict(sparse)
        model.colbert_linear.load_state_dict(multi)
        for head in (model.sparse_linear, model.colbert_linear):
            head.to(encoder.embeddings.word.weight.dtype)
        return model.eval()

    def train(self, mode: bool = True) -> "M3Encoder":
        if mode:  # asked before any module changes, not when the encoder's turn comes
            self.encoder.frozen.require_weights("train()")
        return super().train(mode)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the encoder as :meth:`fastenc.Encoder.save_pretrained` does, and each head in a .safetensors file."""
        save_file = require("safetensors.torch", extra="models").save_file
        folder = Path(folder)
        self.encoder.save_pretrained(folder)
        for name in HEADS:
            tensors = {k: v.cpu() for k, v in getattr(self, name).state_dict().items()}
            write = partial(save_file, tensors, metadata={"format": "pt"})
            write_atomically(folder / f"{name}.safetensors", write)

    def dense(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """The vectors of the batch's texts, (batch, hidden_size), from its states (total_tokens, hidden_size)."""
        return F.normalize(pool(hidden, batch.cu_seqlens, "cls"), dim=1)

    def token_weights(self, hidden: Tensor) -> Tensor:
        """The weights of tokens, (total_tokens,), at least 0."""
        head = self.sparse_linear
        return linear_in_one_order(hidden, head.weight, head.bias)[:, 0].relu()

    def token_vectors(self, hidden: Tensor) -> Tensor:
        """The vectors of tokens, (total_tokens, width)."""
        head = self.colbert_linear
        return F.normalize(linear_in_one_order(hidden, head.weight, head.bias), dim=1)

    @torch.inference_mode()
    def encode(
        self,
        texts: str | Sequence[str],
        *,
        batch_size: int = 32,
        sparse: bool = True,
        multi_vectors: bool = True,
        show_progress: bool | None = None,
    ) -> M3Vectors:
        """All three representations of texts, of one forward, without dropout in either mode of the model.

        Args:
            texts: one text or several; a longer one is cut to ``encoder.max_tokens``.
            batch_size: texts in a batch. Batches have texts of similar length; results are in the given order.
            sparse, multi_vectors: whether to return them. Multi-vectors take the memory of as many vectors as tokens.
            show_progress: show a progress bar on stderr. None: on a terminal, if there are more than ten batches.
        Returns: :class:`M3Vectors` in the model's dtype on its device, and for one text its own three.
        Raises: ValueError for a model without a tokenizer, an item that is not a text, and a batch_size below 1.
        """
        encoder, listed = self.encoder, checked_texts(texts)
        tokenizer = encoder.own_tokenizer()
        text_batches = TextBatches(tokenizer, encoder.max_tokens, batch_size)
        number = text_batches.number(len(listed))
        show_progress = unless_few(show_progress, number)
        weight = self.sparse_linear.weight
        dense = weight.new_empty(len(listed), encoder.config.hidden_size)
        weights: list[dict[str, float]] = [{} for _ in listed]
        vectors = [weight.new_empty(0, len(self.colbert_linear.bias))] * len(listed)
        with without_dropout(), encoder.frozen.during_call(encoder, calls=number):
            batches = text_batches.of(listed)
            for chosen, made in progress_bar(
                batches, "encode", "batch", show_progress, total=number
            ):
                batch = made.to(weight.device)
                hidden = encoder(batch, pooled=False).last_hidden_state
                dense[send(torch.tensor(chosen), dense.device)] = self.dense(hidden, batch)
                if sparse:
                    rows = self._weights_by_token(self.token_weights(hidden).cpu(), made)
                    for index, row in zip(chosen, rows, strict=True):
                        weights[index] = row
                if multi_vectors:
                    lengths = made.cu_seqlens.diff().tolist()
                    rows_of = self.token_vectors(hidden).split(lengths)
                    for index, of_text in zip(chosen, rows_of, strict=True):
                        vectors[index] = of_text[1:]
        as_given = lambda rows: rows[0] if isinstance(texts, str) else rows
        return M3Vectors(
            as_given(dense),
            as_given(weights) if sparse else None,
            as_given(vectors) if multi_vectors else None,
        )

    def _weights_by_token(self, weights: Tensor, batch: PackedBatch) -> list[dict[str, float]]:
        """For each text {token: largest weight}, from the weights of a batch's tokens; both on the CPU."""
        tokenizer = self.encoder.own_tokenizer()
        roles, vocabulary = special_tokens(tokenizer), self.encoder.config.vocab_size
        special = torch.tensor([*roles.begin, roles.sep, roles.pad, roles.unk])
        text = torch.repeat_interleave(batch.cu_seqlens.diff())
        kept = (weights > 0) & ~torch.isin(batch.input_ids, special)
        # One number for each text and token.
        pairs, where = torch.unique(
            text[kept] * vocabulary + batch.input_ids[kept], return_inverse=True
        )
        largest = weights.new_zeros(len(pairs)).scatter_reduce(0, where, weights[kept], "amax")
        order = largest.argsort(descending=True)
        rows: list[dict[str, float]] = [{} for _ in range(batch.num_sequences)]
        for pair, weight in zip(pairs[order].tolist(), largest[order].tolist(), strict=True):
            row, token = divmod(pair, vocabulary)
            rows[row][tokenizer.id_to_token(token) or str(token)] = weight
        return rows


def _read_linear(folder: Path, name: str, hidden_size: int) -> dict[str, Tensor]:
    """weight (outputs, hidden_size) and bias (outputs,) of a head. Raises: ValueError for another content."""
    file, pickled = folder / f"{name}.safetensors", folder / f"{name}.pt"
    if file.exists():
        tensors = read_tensor_file(file)
    elif pickled.exists():
        file = pickled
        try:
            tensors = torch.load(pickled, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise ValueError(
                f"{pickled} must hold the tensors of a linear layer and nothing else, got what cannot be read "
                f"({error}): download it again"
            ) from error
    else:
        raise ValueError(
            f"{folder} must have the heads of BGE-M3, got neither {name}.safetensors nor {name}.pt: take a checkpoint "
            "of BGE-M3, or load dense vectors with fastenc.Encoder"
        )
    named = isinstance(tensors, dict) and {*tensors} == {"weight", "bias"}
    if not named or not all(
        isinstance(each, Tensor) and each.is_floating_point() for each in tensors.values()
    ):
        raise ValueError(f"{file} must hold weight and bias of a linear layer: download it again")
    weight, bias = tensors["weight"], tensors["bias"]
    if weight.shape != (*bias.shape, hidden_size):
        raise ValueError(
            f"{file}: weight must be (outputs, {hidden_size}) and bias (outputs,), got {tuple(weight.shape)} and "
            f"{tuple(bias.shape)}: do the files of the folder belong together?"
        )
    return dict(tensors)
