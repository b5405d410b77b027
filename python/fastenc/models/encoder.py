"""The encoder: embeddings and post-norm layers over packed tokens."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._progress import progress_bar
from fastenc._transfer import send
from fastenc.models.config import EncoderConfig
from fastenc.models.families import FAMILIES
from fastenc.models.pretrained import PretrainedModel
from fastenc.models.sentence_files import SentenceSettings, read_settings, write_settings
from fastenc.models.word_vectors import WordVectors, embed_words
from fastenc.nn import LayerNorm
from fastenc.nn.adaptation import LayerAdaptation, adapted_layer
from fastenc.nn.encoder_layer import LayerOptions, LayerWeights, encoder_layer
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.nn.inference_layer import InferenceLayer, wants_inference
from fastenc.nn.pooling import check_pooling, pool, pool_layers
from fastenc.nn.prepend import prepend_rows
from fastenc.ops import tied_embedding_layer_norm
from fastenc.packing import PackedBatch, pack_sequences


@dataclass(frozen=True)
class EncoderOutput:
    """Packed results: rows are the batch's tokens; ``fastenc.ops.unpack`` puts the padding back.

    Fields:
        last_hidden_state: (total_tokens, hidden_size).
        hidden_states: the embeddings' output and every layer's, if asked for.
        pooled: (batch, hidden_size), the pooler's output, where the model has one.
        word_table: the word embeddings' weight as a decoder tied to it takes it, if asked for; see
            :func:`fastenc.ops.tied_embedding_layer_norm`.
    """

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    pooled: Tensor | None = None
    word_table: Tensor | None = None


class Embeddings(nn.Module):
    """LayerNorm(word + position + token type), then dropout, then a projection where the widths differ."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width = config.embedding_size
        self.position_offset = config.position_offset
        self.dropout_p = config.hidden_dropout_p
        self.word = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.max_positions + config.position_offset, width)
        self.token_type = (
            nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        )
        self.norm = LayerNorm(width, eps=config.eps)
        self.projection = (
            nn.Linear(width, config.hidden_size) if width != config.hidden_size else None
        )

    def forward(
        self, batch: PackedBatch, word_table: bool = False, first_position: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Returns: (total_tokens, hidden_size), and with ``word_table`` the table for a tied decoder."""
        _check_length(batch, self, first_position)
        types, type_table = batch.token_type_ids, None
        if self.token_type is not None:
            type_table = self.token_type.weight
        # A table of one row tells nothing apart, so that families with one or none take any token types.
        if self.token_type is None or self.token_type.num_embeddings == 1:
            types = None
        x, table = tied_embedding_layer_norm(
            batch.input_ids,
            self.word.weight,
            self.norm.weight,
            self.norm.bias,
            position_ids=batch.position_ids,
            position=self.position.weight,
            token_type_ids=types,
            token_type=type_table,
            position_offset=self.position_offset + first_position,
            dropout_p=self.dropout_p if self.training else 0.0,
            eps=self.norm.eps,
        )
        if self.projection is not None:
            x = self.projection(x)
        return x, table if word_table else None


class EncoderLayer(nn.Module):
    """Post-norm transformer layer with q, k and v in one projection."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width = config.hidden_size
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.attention_norm = LayerNorm(width, eps=config.eps)
        self.up = nn.Linear(width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, width)
        self.out_norm = LayerNorm(width, eps=config.eps)
        constants = (config.num_heads, config.activation, config.eps)
        p = config.hidden_dropout_p
        out_p = p if FAMILIES[config.family].drops_attention_output else 0.0
        self._train_options = LayerOptions(*constants, config.attention_dropout_p, out_p, p)
        self._eval_options = LayerOptions(*constants)
        self._inference = InferenceLayer()
        # What fastenc.adapt adds, by name; one at most is in use.
        self.adaptations = nn.ModuleDict()
        self.adaptation: str | None = None

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        weights = LayerWeights(
            (self.qkv.weight,),
            (self.qkv.bias,),
            self.attention_out.weight,
            self.attention_out.bias,
            self.attention_norm.weight,
            self.attention_norm.bias,
            self.up.weight,
            self.up.bias,
            self.down.weight,
            self.down.bias,
            self.out_norm.weight,
            self.out_norm.bias,
        )
        options = self._train_options if self.training else self._eval_options
        if self.adaptation is not None:
            parts = self.adaptations[self.adaptation]
            assert isinstance(parts, LayerAdaptation)
            return adapted_layer(x, cu_seqlens, max_seqlen, weights, options, parts)
        if wants_inference(x, options):
            return self._inference(x, cu_seqlens, max_seqlen, weights, options)
        self._inference.forget()
        return encoder_layer(x, cu_seqlens, max_seqlen, weights, options)


class Encoder(PretrainedModel):
    """A bidirectional encoder of the BERT family on packed batches.

        x_0 = Embeddings(tokens),  x_i = Layer_i(x_{i-1})

    ``Encoder(config)`` has first weights; :meth:`from_pretrained` loads a checkpoint. ``sentence`` is how a vector is
    made of a text, where the checkpoint declares it in sentence-transformers' files; it is saved with the model.
    """

    architecture = "Model"
    optional_parts = ("pooler",)

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if config.pooler else None
        # What fastenc.adapt has added, by name: descriptions, vectors put before every sequence, values of the head,
        # and the weights as they were before one was merged into them.
        self.adaptations: dict[str, Any] = {}
        self.adaptation: str | None = None
        self.prompts = nn.ParameterDict()
        self.heads: dict[str | None, dict[str, Tensor]] = {}
        self.unmerged_weights: list[tuple[Tensor, Tensor]] = []
        self.sentence: SentenceSettings | None = None
        self.apply(self.init_weights)

    def forward(
        self, batch: PackedBatch, output_hidden_states: bool = False, word_table: bool = False
    ) -> EncoderOutput:
        """Raises: ValueError for token ids outside the table or sequences longer than the positions."""
        if batch.hidden is not None:
            if output_hidden_states or word_table:
                raise ValueError(
                    "a batch that carries the encoder's output has no other states: leave out hidden, so that they are "
                    "computed"
                )
            return EncoderOutput(batch.hidden, pooled=self._pooled(batch.hidden, batch))
        x, table = self.embeddings(batch, word_table, self.first_position)
        cu_seqlens, max_seqlen, own = batch.cu_seqlens, batch.max_seqlen, None
        if self.adaptation is not None and self.adaptation in self.prompts:
            prompt = self.prompts[self.adaptation]
            x, cu_seqlens, own = prepend_rows(x, cu_seqlens, prompt)
            max_seqlen += prompt.shape[0]
        states = [x]
        for layer in self.layers:
            x = layer(x, cu_seqlens, max_seqlen)
            states.append(x)
        if own is not None:
            states = [state[own] for state in states]
            x = states[-1]
        kept = tuple(states) if output_hidden_states else None
        return EncoderOutput(x, kept, self._pooled(x, batch), table)

    def _pooled(self, x: Tensor, batch: PackedBatch) -> Tensor | None:
        if self.pooler is None or not batch.num_sequences:
            return None
        return torch.tanh(self.pooler(pool(x, batch.cu_seqlens, "cls")))

    def pooled_vectors(self, batch: PackedBatch, pooling: str) -> Tensor:
        """(batch, hidden_size), as :func:`fastenc.nn.pooling.pool_layers` forms it, and standardized where the
        checkpoint declares it."""
        output = self(batch, output_hidden_states=pooling == "last-four")
        states = output.hidden_states or (output.last_hidden_state,)
        vectors = pool_layers(states, batch.cu_seqlens, pooling)
        if self.sentence is None or self.sentence.standardization is None:
            return vectors
        return self.sentence.standardization(vectors)

    @property
    def max_tokens(self) -> int:
        """Tokens at which texts are cut: those that the checkpoint declares, at most its positions."""
        declared = self.sentence.max_length if self.sentence else None
        return min(declared or self.positions, self.positions)

    def read_beside(self, folder: Path) -> None:
        try:
            self.sentence = read_settings(folder, self.config.num_layers)
        except (
            ValueError
        ) as error:  # which does not matter to an encoder that is to be trained further
            warnings.warn(f"{error}; encode() without a pooling takes the mean", stacklevel=4)

    def write_beside(self, folder: Path) -> None:
        if self.sentence is not None:
            write_settings(folder, self.sentence, self.config)

    def extra_config(self) -> dict[str, Any]:
        last_four = self.sentence is not None and self.sentence.pooling == "last-four"
        return {"output_hidden_states": True} if last_four else {}

    @torch.inference_mode()
    def encode(
        self,
        texts: str | Sequence[str],
        *,
        batch_size: int = 32,
        pooling: str | None = None,
        normalize: bool | None = None,
        show_progress: bool | None = None,
        convert_to_numpy: bool = False,
    ) -> Any:
        """Embed texts with the checkpoint's own tokenizer, in evaluation mode.

        Args:
            texts: one text or several; each is cut to the model's positions, or where the checkpoint declares it.
            batch_size: sequences a batch; batches are formed by length, the result is in the order given.
            pooling: "mean", "cls" or "max" over a text's tokens, special tokens included, or "last-four", the mean over
                tokens and the last four layers. None: what the checkpoint declares (``sentence``), else "mean".
            normalize: scale each vector to Euclidean length 1. None: what the checkpoint declares, else True.
            show_progress: a progress bar on stderr; None: on a terminal, for more than ten batches.
            convert_to_numpy: return a float32 numpy array.
        Returns: (len(texts), hidden_size), the model's dtype, on its device; (hidden_size,) for one text.
        Raises: ValueError for what is no text, without a tokenizer, for an unknown pooling or a batch_size below 1.
        """
        if self.tokenizer is None:
            raise ValueError(
                "encode needs the checkpoint's tokenizer.json: load the model with from_pretrained from a folder "
                "that has one, or set model.tokenizer"
            )
        settings = self.sentence or SentenceSettings()
        pooling = settings.pooling if pooling is None else pooling
        normalize = settings.normalize if normalize is None else normalize
        check_pooling(pooling, self.config.num_layers)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        single = isinstance(texts, str)
        listed = [texts] if isinstance(texts, str) else list(texts)
        for place, text in enumerate(listed):
            if not isinstance(text, str):
                raise ValueError(f"encode takes texts, got {text!r} as text {place}: leave it out")
        ids = tokenize(listed, self.tokenizer, self.max_tokens)
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]), reverse=True)
        starts = range(0, len(order), batch_size)
        if show_progress is None and len(starts) <= 10:
            show_progress = False
        weight = self.embeddings.word.weight
        parts = [weight.new_empty((0, self.config.hidden_size))]
        with evaluation_mode(self):
            for start in progress_bar(starts, "encode", "batch", show_progress):
                chosen = order[start : start + batch_size]
                batch = pack_sequences([ids[place] for place in chosen]).to(weight.device)
                pooled = self.pooled_vectors(batch, pooling)
                parts.append(F.normalize(pooled, dim=1) if normalize else pooled)
        places = torch.tensor(order, dtype=torch.long).argsort()
        vectors = torch.cat(parts).index_select(0, send(places, weight.device))
        vectors = vectors[0] if single else vectors
        return vectors.float().cpu().numpy() if convert_to_numpy else vectors

    @staticmethod
    def similarity(a: Any, b: Any) -> Tensor:
        """Cosine similarities (rows of a, rows of b) of vectors, tensors or arrays; float32."""
        unit = [F.normalize(torch.atleast_2d(torch.as_tensor(x)).float(), dim=1) for x in (a, b)]
        return unit[0] @ unit[1].T

    def embed_words(self, sentences: Any, **options: Any) -> WordVectors:
        """Vectors of the words of sentences: :func:`fastenc.models.word_vectors.embed_words`."""
        return embed_words(self, sentences, **options)


def tokenize(texts: list[str], tokenizer, max_length: int) -> list[list[int]]:
    """Token ids with special tokens; a longer text is cut so that its closing special token stays."""
    room = max_length - tokenizer.num_special_tokens_to_add(False)
    ids = []
    for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if len(encoding.ids) > max_length:
            encoding = tokenizer.encode(text, add_special_tokens=False)
            encoding.truncate(room)
            encoding = tokenizer.post_process(encoding)
        ids.append(encoding.ids)
    return ids


def _check_length(batch: PackedBatch, embeddings: Embeddings, first_position: int) -> None:
    positions = embeddings.position.num_embeddings - embeddings.position_offset
    room = positions - first_position
    if batch.max_seqlen > room:
        prefix = f"{positions} positions less its prefix's {first_position}"
        raise ValueError(
            f"a sequence may have at most {room} tokens, the model's {prefix if first_position else 'positions'}, "
            f"got {batch.max_seqlen}: cut it or split it"
        )
