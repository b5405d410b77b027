"""The encoder: embeddings and layers over packed tokens."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._base import debug
from fastenc._base.json_values import JsonObject
from fastenc.models.adapters.adaptation_state import AdaptationState
from fastenc.models.adapters.adaptations import check_unmerged, name_of_task
from fastenc.models.adapters.adapter_checkpoint import read_tasks, write_tasks
from fastenc.models.config import EncoderConfig
from fastenc.models.embedding.encode import encode as encode_texts
from fastenc.models.embedding.sentence_files import (
    SentenceSettings,
    lowercased,
    read_settings,
    write_settings,
)
from fastenc.models.embedding.splade_files import is_splade
from fastenc.models.embedding.word_vectors import embed_words as embed_sentences
from fastenc.models.layer_stack import LayerStack
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.layer_inputs import rows_of
from fastenc.nn.pooling import LAST_LAYERS, check_not_empty, pool, pool_layers, project
from fastenc.nn.prepend import prepend_rows
from fastenc.nn.scalar_mix import ScalarMix, add_weighted
from fastenc.nn.stack import VisitInput, run_stack
from fastenc.packing import PackedBatch, check_cu_seqlens, first_tokens

# Called with a state's number (0 for the embeddings' output) and the state, which it must not change.
Visit = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class EncoderOutput:
    """The results of an encoder in packed layout. ``fastenc.ops.unpack`` restores the padding.

    Fields:
        last_hidden_state: (total_tokens, output_size), or the rows of the requested ``output_tokens``. For an encoder
            with ``mix``, the mix of all states. ``config.output_size`` is hidden_size in most families; in the others
            a linear layer follows (:meth:`Encoder.project_output`).
        hidden_states: if requested, the embeddings' output and every layer's output, each (total_tokens, hidden_size)
            or None if this state was not requested.
        pooled: (batch, hidden_size), the pooler's output, or None without a pooler.
        tied_weight: if requested, the word embeddings' weight (vocab_size, embedding_size) for a tied decoder; see
            :func:`fastenc.ops.tied_embedding_layer_norm`.
    """

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor | None, ...] | None = None
    pooled: Tensor | None = None
    tied_weight: Tensor | None = None


class Encoder(LayerStack, PretrainedModel):
    """A bidirectional encoder on packed batches, of any architecture of ``fastenc.models.architectures``.

        x_0 = Embeddings(tokens),  x_i = Layer_i(x_{i-1})

    ``Encoder(config)`` has random weights; :meth:`from_pretrained` loads a checkpoint. It raises a ValueError for token
    types or a pooler in a family that has none.

    The modules inside hold the weights, and fused ops read them: a module's own forward is not called. So hooks of
    these modules do not run, and a module in place of one has no effect but by its weights. ``hidden_states`` has the
    states of the layers; :mod:`fastenc.adapt` adds LoRA, adapters and prefixes.

    Attributes:
        sentence: how a text's vector is computed (:class:`fastenc.models.SentenceSettings`), if the checkpoint has
            sentence-transformers' files; saved with the model.
        sparse: whether the checkpoint is that of a sparse encoder, whose vectors :class:`fastenc.SparseEncoder`
            computes. :meth:`encode` then needs a pooling.
        gradient_checkpointing: set it to True to keep only the input of each layer in training; the backward computes
            the rest again.
        adapted: the state of :mod:`fastenc.adapt`.
        mix: with ``config.layer_mix``, a learned weighted sum of x_0 to x_L, which heads, pooler and pooling read
            instead of x_L.
    """

    architecture = "Model"
    optional_parts = ("pooler", "mix", "kept")
    keeps_tasks = True
    sparse: bool = False

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        _check_parts(config)
        self.make_stack(config)
        width = config.hidden_size
        self.pooler = nn.Linear(width, width) if config.pooler else None
        self.mix = ScalarMix(config.num_layers + 1) if config.layer_mix else None
        self.adapted = AdaptationState()
        self.sentence: SentenceSettings | None = None
        self.init_modules(self)

    def forward(
        self,
        batch: PackedBatch,
        output_hidden_states: bool | Sequence[int] = False,
        tied_weight: bool = False,
        visit: Visit | None = None,
        visit_input: VisitInput | None = None,
        pooled: bool = True,
        output_tokens: Tensor | None = None,
    ) -> EncoderOutput:
        """Encode a packed batch.

        Args:
            output_hidden_states: True returns all states, a sequence those of these numbers: 0 is the embeddings'
                output, i the output of layer i, negative numbers count from the last.
            tied_weight: return the word embeddings' weight for a tied decoder.
            visit: called with each state as soon as it is computed; the encoder does not keep the state.
            visit_input: called before each layer with the inputs of its attention, including the rows of a prompt.
            pooled: False leaves out the pooler, for a caller that does not read it.
            output_tokens: int64 (n,), the indices of the tokens whose last state the caller reads, such as
                ``fastenc.packing.first_tokens(batch)``. All tokens are attended to, but the last layer computes its
                feed-forward sublayer for these tokens only. The output then has no ``pooled``. None: all tokens.
        Raises: ValueError for an argument that is not a PackedBatch, token ids outside the vocabulary, sequences longer
            than the model's positions, states that do not exist, or output_tokens that are no indices of tokens.
        """
        if not isinstance(batch, PackedBatch):
            raise ValueError(
                f"the encoder takes a PackedBatch, got {type(batch).__name__}: encode() takes texts, and "
                "fastenc.packing.pack makes a batch of padded ids"
            )
        wanted = wanted_states(output_hidden_states, self.config.num_layers)
        if output_tokens is not None:
            _check_output_tokens(output_tokens, batch.total_tokens)
        if batch.hidden is not None:
            if wanted or visit is not None or visit_input is not None:
                raise ValueError(
                    "states of layers cannot be given for a batch that brings the encoder's stored output, got a "
                    "batch with hidden: make it without hidden"
                )
            last = rows_of(batch.hidden, output_tokens)
            pooled = pooled and output_tokens is None
            return EncoderOutput(
                last,
                pooled=self._pooled(last, batch) if pooled else None,
                tied_weight=self.embeddings.word.weight if tied_weight else None,
            )
        self._check_weights(batch)
        self._check_length(batch)
        if not torch.compiler.is_compiling():
            check_cu_seqlens(batch.cu_seqlens, batch.total_tokens, batch.max_seqlen)
        parts = self.adapted.parts_in_use()
        x, table = self.embeddings(batch, tied_weight, self.adapted.first_position, parts)
        cu_seqlens, max_seqlen, rows = batch.cu_seqlens, batch.max_seqlen, None
        prompt, global_tokens = self.adapted.prompt(), batch.global_tokens
        if prompt is not None:
            x, cu_seqlens, rows = prepend_rows(x, cu_seqlens, prompt)
            max_seqlen += prompt.shape[0]
            global_tokens = None if global_tokens is None else rows[global_tokens]
        without_prompt = lambda state: rows_of(state, rows)
        reads_all = self.mix is not None or visit is not None or self.config.num_layers in wanted
        of_last_layer = None if reads_all else output_tokens
        if of_last_layer is not None and rows is not None:
            of_last_layer = rows[of_last_layer]
        kept: list[Tensor | None] = [None] * (self.config.num_layers + 1)
        weights = None if self.mix is None else self.mix.weights.unbind()
        weighted_sum: Tensor | None = None
        modules = self._stack_modules(self.frozen.current())
        states = run_stack(
            *(x, cu_seqlens, max_seqlen, self.stack, modules, visit_input),
            global_tokens=global_tokens,
            output_tokens=of_last_layer,
        )
        for number, state in enumerate(states):
            if number in wanted:
                kept[number] = without_prompt(state)
            if visit is not None:
                visit(number, without_prompt(state))
            if weights is not None:
                weighted_sum = add_weighted(weighted_sum, weights[number], without_prompt(state))
        last = state
        if of_last_layer is None:
            last = without_prompt(state) if weighted_sum is None else weighted_sum
            last = rows_of(last, output_tokens)
        last = self.project_output(last)
        return EncoderOutput(
            last,
            tuple(kept) if wanted else None,
            self._pooled(last, batch) if pooled and output_tokens is None else None,
            table,
        )

    def _check_weights(self, batch: PackedBatch) -> None:
        if self.embeddings.word.weight.is_meta and not batch.input_ids.is_meta:
            raise ValueError(
                "the encoder's weights must be in memory, got weights on the meta device: load them by "
                "from_pretrained without accelerate's offloading. An encoder does not call its modules' forwards, "
                "where accelerate would load the weights"
            )

    def _check_length(self, batch: PackedBatch) -> None:
        positions, taken = self.config.max_positions, self.adapted.first_position
        room = positions - taken
        bounded = self.embeddings.position is not None or self.stack.has_bounded_angles
        if bounded and batch.max_seqlen > room:
            prefix = f"{positions} positions less its prefix's {taken}"
            raise ValueError(
                f"a sequence may have at most {room} tokens, the model's {prefix if taken else 'positions'}, "
                f"got {batch.max_seqlen}: cut it or split it"
            )

    def _pooled(self, x: Tensor, batch: PackedBatch) -> Tensor | None:
        if self.pooler is None or not batch.num_sequences:
            return None
        return self.pool_first(pool(x, batch.cu_seqlens, "cls"))

    def first_states(self, batch: PackedBatch) -> Tensor:
        """The last state of each sequence's first token, (batch, output_size).

        The last layer computes its feed-forward sublayer for these tokens only. Raises: ValueError for an empty
        sequence.
        """
        return self._states_of(batch, first_tokens(batch))

    def _states_of(self, batch: PackedBatch, tokens: Tensor) -> Tensor:
        """The last states of one token of each sequence, (batch, output_size). Raises: as :meth:`first_states`."""
        check_not_empty(batch.cu_seqlens)
        return self(batch, pooled=False, output_tokens=tokens).last_hidden_state

    def pool_first(self, states: Tensor) -> Tensor:
        """The pooler's output tanh(x W + b) for states x of first tokens, (batch, hidden_size).

        Raises: ValueError for an encoder without a pooler.
        """
        if self.pooler is None:
            raise ValueError(
                "pool_first is for an encoder with a pooler, got one without: read first_states"
            )
        return self._through_pooler(states)

    def _through_pooler(self, states: Tensor) -> Tensor:
        assert self.pooler is not None  # pool_first() has seen it
        pooled, parts = project(states, self.pooler), self.adapted.parts_in_use()
        return torch.tanh(pooled + parts["pooler"](states) if "pooler" in parts else pooled)

    def pooled_vectors(self, batch: PackedBatch, pooling: str) -> Tensor:
        """One vector for each sequence of a packed batch, not scaled to length 1.

        After the pooling the vectors are standardised, or go through linear layers, if the checkpoint says so.

        Args:
            pooling: "cls" or "last-token" (the first or last token's state), "mean" or "max" over the tokens, or
                "last-four", the mean over tokens and the last four layers.
        Returns: (batch, width), the model's dtype; width: ``config.output_size``, or that of the last linear layer.
        Raises: ValueError for another pooling, an empty sequence, and "last-four" with fewer than four layers.
        """
        vectors = self.pooled_states(batch, pooling)
        return vectors if self.sentence is None else self.sentence.after_pooling(vectors)

    def pooled_states(self, batch: PackedBatch, pooling: str) -> Tensor:
        """:meth:`pooled_vectors` before their standardization or linear layers, (batch, output_size)."""
        if pooling == "cls":
            return self.first_states(batch)
        if pooling == "last-token":
            return self._states_of(batch, batch.cu_seqlens[1:].long() - 1)
        last_four = range(-LAST_LAYERS, 0) if pooling == "last-four" else False
        output = self(batch, output_hidden_states=last_four, pooled=False)
        states = output.hidden_states or (output.last_hidden_state,)
        vectors = pool_layers(states, batch.cu_seqlens, pooling)
        return self.project_output(vectors) if last_four else vectors

    @property
    def max_tokens(self) -> int:
        """The number of tokens to which texts are cut: the checkpoint's max_length, at most the model's positions.

        It can be set, and is saved with the model as a setting of sentence-transformers. Raises: ValueError below 1 and
        beyond the positions.
        """
        declared = self.sentence.max_length if self.sentence else None
        return min(declared or self.positions, self.positions)

    @max_tokens.setter
    def max_tokens(self, number: int) -> None:
        if not 1 <= number <= self.positions:
            raise ValueError(
                f"max_tokens must be from 1 to the model's {self.positions} positions, got {number}"
            )
        self.sentence = replace(self.sentence or SentenceSettings(), max_length=number)

    def adaptation_of_task(self, task: str) -> tuple[str, str]:
        """The name of the adaptation for a task of the checkpoint, and the instruction that is put before each text.

        Raises: ValueError for a task that the checkpoint does not have, and for layers that take no adaptation now.
        """
        tasks = self.config.architecture.tasks(self.config) if self.adapted.tasks else {}
        if task not in tasks:
            raise ValueError(
                f"task must be one of the checkpoint's tasks, got {task!r}; it has {', '.join(tasks) or 'none'}: leave "
                "out task"
            )
        self.frozen.require_weights("the LoRA of a task")
        if self.frozen.in_8_bits:
            raise ValueError(
                "the LoRA of a task is not computed in int8, got a frozen model: call fastenc.unfreeze(model)"
            )
        check_unmerged(self)
        return name_of_task(task), tasks[task]

    def read_beside(self, folder: Path) -> None:
        if not self.adapted.tasks:
            read_tasks(folder, self)
        try:
            self.sparse = is_splade(folder)
            self.sentence = None if self.sparse else read_settings(folder, self.config)
            self.tokenizer = lowercased(self.tokenizer, folder)
        except ValueError as error:
            # Not an error, because training the encoder does not need these files.
            warnings.warn(f"{error}; encode() without a pooling takes the mean", stacklevel=4)

    def write_beside(self, folder: Path) -> None:
        write_tasks(folder, self)
        if self.sentence is not None:
            write_settings(folder, self.sentence, self.config, self.mix)

    def extra_config(self) -> JsonObject:
        values: JsonObject = {}
        if self.config.architecture.tasks(self.config) and not self.adapted.tasks:
            values["load_trained_adapters"] = False
        if self.sentence is None:
            return values
        several = self.mix is not None or self.sentence.pooling == "last-four"
        return {**values, "output_hidden_states": True} if several else values

    @staticmethod
    def similarity(a: object, b: object) -> Tensor:
        """Cosine similarities of the rows of a and of b, float32 (rows of a, rows of b).

        Args: a, b: tensors or arrays, (rows, width) or (width,).
        Raises: ValueError for other values, and for vectors of different widths.
        """
        x, y = (F.normalize(_as_vectors(each), dim=1) for each in (a, b))
        if x.shape[1] != y.shape[1]:
            raise ValueError(
                f"similarity takes vectors of one width, got {x.shape[1]} and {y.shape[1]}: encode both with one model"
            )
        return x @ y.T

    # Methods with the functions' options and descriptions.
    encode = encode_texts
    embed_words = embed_sentences


def encoder_under_head(config: EncoderConfig, reads_pooler: bool) -> Encoder:
    """The encoder of a model with a head, with the pooler of transformers' class.

    A pooler that the head does not read is loaded and saved, but not trained.
    """
    has_unread = config.architecture.has_unread_pooler and not reads_pooler
    encoder = Encoder(config.replace(pooler=reads_pooler or has_unread))
    if has_unread and encoder.pooler is not None:
        encoder.pooler.requires_grad_(False)
    return encoder


def _check_parts(config: EncoderConfig) -> None:
    """Raise ValueError for tables or layers that no checkpoint of the family holds."""
    names = config.architecture.names(config)
    for field, module, without, parts in (
        ("type_vocab_size", "embeddings.token_type", 0, "token types"),
        ("pooler", "pooler", False, "pooler"),
    ):
        value = getattr(config, field)
        if value and module not in names:
            raise ValueError(
                f"{field} must be {without} for the family {config.family!r}, which has no {parts}, got {value}: give "
                f"{field}={without}"
            )


def _check_output_tokens(tokens: Tensor, total: int) -> None:
    if tokens.dtype != torch.int64 or tokens.dim() != 1:
        raise ValueError(
            f"output_tokens must be int64 (tokens,), got {tokens.dtype} of shape {tuple(tokens.shape)}: give indices "
            "of packed tokens"
        )
    if debug.may_read(tokens) and tokens.numel():
        low, high = (int(value) for value in tokens.aminmax())
        if low < 0 or high >= total:
            raise ValueError(
                f"output_tokens must be in [0, {total}), got {low if low < 0 else high}: give indices of packed tokens"
            )


def _as_vectors(given: object) -> Tensor:
    try:
        return torch.atleast_2d(torch.as_tensor(given)).float()
    except (TypeError, ValueError):
        raise ValueError(
            f"similarity takes vectors, tensors or arrays, got {given!r:.40}: encode texts first"
        ) from None


def wanted_states(asked: bool | Sequence[int], num_layers: int) -> frozenset[int]:
    """The numbers, from 0, of the requested states. Raises: ValueError for a state that does not exist."""
    if isinstance(asked, bool):
        return frozenset(range(num_layers + 1) if asked else ())
    outside = [number for number in asked if not -num_layers - 1 <= number <= num_layers]
    if outside:
        raise ValueError(
            f"output_hidden_states must be of the states 0 to {num_layers}, got {outside[0]}: the model has "
            f"{num_layers} layers"
        )
    return frozenset(number % (num_layers + 1) for number in asked)
