"""Vectors of texts: tokenization, batches of similar lengths, pooling."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastenc._base.prefetch import prefetch
from fastenc._base.progress import progress_bar, unless_few
from fastenc._base.transfer import send
from fastenc.models.embedding.encoder_like import EncoderLike
from fastenc.models.embedding.quantization import check_precision, check_texts, quantize_vectors
from fastenc.models.embedding.sentence_files import SentenceSettings
from fastenc.models.embedding.text_batches import TextBatch, TextBatches, checked_texts
from fastenc.nn.adaptation import adaptation_of_calls
from fastenc.nn.evaluation_mode import without_dropout
from fastenc.nn.pooling import check_pooling, normalize_rows
from fastenc.ops.dispatch import batch_invariance


def encode(
    encoder: EncoderLike,
    texts: str | Sequence[str],
    *,
    batch_size: int = 32,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    task: str | None = None,
    truncate_dim: int | None = None,
    precision: str = "float32",
    batch_invariant: bool = False,
    show_progress: bool | None = None,
    convert_to_numpy: bool = False,
) -> Any:
    """Embed texts with the checkpoint's tokenizer, without dropout in either mode of the model.

    The encoder's weights are taken as frozen during the call, so another thread must not change them. While the model
    computes, a thread tokenises the next texts.

    Args:
        encoder: a :class:`fastenc.Encoder`.
        texts: one text or several. A longer text is cut to the checkpoint's max_length, or else to the model's
            positions.
        batch_size: texts per batch. Batches have texts of similar length; the result is in the given order.
        pooling: "mean" or "max" over a text's tokens with the special tokens, "cls" or "last-token" (the first or last
            token's state), or "last-four", the mean over tokens and the last four layers. None: the checkpoint's
            pooling (``encoder.sentence``), else "mean".
        normalize: scale each vector to Euclidean length 1, after ``truncate_dim``. None: as the checkpoint says, before
            ``truncate_dim`` as in sentence-transformers, else True.
        prompt: put before each text, such as "query: ".
        prompt_name: the name of one of the checkpoint's prompts, in place of ``prompt``.
        task: one of the tasks for which the checkpoint has a LoRA ("retrieval.query" of jina-embeddings-v3). Without
            prompt and prompt_name, the checkpoint's instruction for the task is put before each text. None: the model
            as it is.
        truncate_dim: keep the first dimensions only, for models that were trained so (Matryoshka). None: as the
            checkpoint says, else all.
        precision: "float32": the vectors as they are; "int8", "uint8", "binary" or "ubinary": see
            :func:`fastenc.models.quantize_vectors`, with the ranges of these texts.
        batch_invariant: give a text the same bits alone, in any batch and in any order on a GPU too. Products then run
            in a Triton kernel with one order of sums in place of cuBLAS. Not for LoRA, DeBERTa, BigBird, Longformer and
            torch.compile. On a CPU it changes nothing: docs/sentence-embeddings.md says where the bits are the same
            anyway.
        show_progress: show a progress bar on stderr. None: on a terminal, if there are more than ten batches.
        convert_to_numpy: return a numpy array, float32 unless ``precision`` says otherwise.
    Returns: (len(texts), width), or (width,) for one text, in the model's dtype on its device. The width is
        ``encoder.config.output_size``, or that of the checkpoint's last Dense module. ``truncate_dim`` and the
        precisions of one bit make it smaller.
    Raises: ValueError for an item that is not a text, an encoder without tokenizer, the checkpoint of a sparse encoder
        without a pooling, an unknown pooling, prompt name, task or precision, a task in int8, batch_invariant for a
        layer, dtype or device that cannot have it, a batch_size below 1, a truncate_dim below 1 or above the width,
        and a prompt if the checkpoint pools without the prompt's tokens.
    """
    check_precision(precision)
    vectors = vectors_of(
        encoder,
        batch_size=batch_size,
        pooling=pooling,
        normalize=normalize,
        prompt=prompt,
        prompt_name=prompt_name,
        task=task,
        truncate_dim=truncate_dim,
        batch_invariant=batch_invariant,
    )
    listed = checked_texts(texts)
    check_texts(precision, len(listed))
    number = vectors.text_batches.number(len(listed))
    show_progress = unless_few(show_progress, number)
    # An array has float32, into which the vectors are written at once.
    widened = convert_to_numpy and precision == "float32"
    result = vectors.empty(len(listed), torch.float32 if widened else None)
    batches = vectors.text_batches.of(listed)
    # Frozen weights are for layers without additions.
    frozen_calls = number if vectors.adaptation is None else 0
    with encoder.frozen.during_call(encoder, calls=frozen_calls):
        shown = progress_bar(batches, "encode", "batch", show_progress, total=number)
        vectors.compute(shown, result)
    result = quantize_vectors(result, precision)
    result = result[0] if isinstance(texts, str) else result
    return result.cpu().numpy() if convert_to_numpy else result


def encode_parts(
    encoder: EncoderLike, parts: Iterable[Sequence[str]], **options: Any
) -> Iterator[Tensor]:
    """The vectors of each part of a stream of texts. While the model computes, a thread tokenises the next part.

    Args: parts: lists of texts. options: those of :func:`encode` that say what a vector is, and ``batch_size``.
    Yields: (texts of the part, width), in the model's dtype on its device.
    """
    vectors = vectors_of(encoder, **options)
    for number, batches in prefetch(
        lambda texts: (len(texts), vectors.text_batches.of_part(texts)), parts
    ):
        result = vectors.empty(number)
        vectors.compute(batches, result)
        yield result


@dataclass(frozen=True)
class Vectors:
    """How texts become vectors: the options of :func:`encode` after their checks, for one encoder."""

    encoder: EncoderLike
    text_batches: TextBatches
    pooling: str
    adaptation: str | None
    normalizes_before: bool
    width: int
    normalizes_after: bool
    batch_invariant: bool

    def empty(self, texts: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for the vectors of ``texts`` texts, in ``dtype`` or the model's dtype."""
        weight = self.encoder.embeddings.word.weight
        return torch.empty((texts, self.width), dtype=dtype or weight.dtype, device=weight.device)

    @torch.inference_mode()
    def compute(self, batches: Iterable[TextBatch], result: Tensor) -> None:
        """Write each text's vector into its row of ``result``."""
        with (
            without_dropout(),
            adaptation_of_calls(self.adaptation),
            batch_invariance(self.batch_invariant),
        ):
            for chosen, batch in batches:
                x = self.encoder.pooled_vectors(batch.to(result.device), self.pooling)
                x = normalize_rows(x) if self.normalizes_before else x
                x = x[:, : self.width]
                x = normalize_rows(x) if self.normalizes_after else x
                result[send(torch.tensor(chosen), result.device)] = x.to(result.dtype)


def vectors_of(
    encoder: EncoderLike,
    *,
    batch_size: int = 32,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    task: str | None = None,
    truncate_dim: int | None = None,
    batch_invariant: bool = False,
) -> Vectors:
    """The checked options of :func:`encode`, which describes them and their errors."""
    if encoder.tokenizer is None:
        raise ValueError(
            "encode needs the checkpoint's tokenizer.json: load the model with from_pretrained from a folder "
            "that has one, or set model.tokenizer"
        )
    if encoder.sparse and pooling is None:
        raise ValueError(
            "encode gives vectors, but this checkpoint gives weights of tokens (SPLADE): use "
            "SparseEncoder.from_pretrained(...).encode_sparse, or give pooling= for vectors of the encoder's states"
        )
    settings = encoder.sentence or SentenceSettings()
    pooling = settings.pooling if pooling is None else pooling
    check_pooling(pooling, encoder.config.num_layers)
    width = settings.width(encoder.config.output_size)
    if truncate_dim is not None and not 1 <= truncate_dim <= width:
        raise ValueError(
            f"truncate_dim must be from 1 to the vectors' width {width}, got {truncate_dim}"
        )
    device = encoder.embeddings.word.weight.device
    if batch_invariant and device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"batch_invariant is for a CPU and for CUDA, got a model on {device}: move it, or leave out batch_invariant"
        )
    adaptation, instruction = (None, None) if task is None else encoder.adaptation_of_task(task)
    if prompt is None and prompt_name is None:
        prompt = instruction
    prompt = settings.prompt_of(prompt, prompt_name)
    return Vectors(
        encoder,
        TextBatches(encoder.tokenizer, encoder.max_tokens, batch_size, prompt),
        pooling,
        adaptation,
        settings.normalize if normalize is None else False,
        truncate_dim or settings.truncate_dim or width,
        bool(normalize),
        batch_invariant,
    )
