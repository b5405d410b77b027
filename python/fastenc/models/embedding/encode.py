"""Vectors of texts: tokenization, batches of similar lengths, pooling."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fastenc._base.progress import progress_bar
from fastenc._base.transfer import send
from fastenc.models.embedding.encoder_like import EncoderLike
from fastenc.models.embedding.quantization import check_precision, check_texts, quantize_vectors
from fastenc.models.embedding.sentence_files import SentenceSettings
from fastenc.nn.adaptation import adaptation_of_calls
from fastenc.nn.evaluation_mode import without_dropout
from fastenc.nn.pooling import check_pooling
from fastenc.packing import length_sorted_batches, pack_sequences


@torch.inference_mode()
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
    show_progress: bool | None = None,
    convert_to_numpy: bool = False,
) -> Any:
    """Embed texts with the checkpoint's tokenizer, without dropout in either mode of the model.

    The encoder's weights are taken as frozen during the call, so another thread must not change them.

    Args:
        encoder: a :class:`fastenc.Encoder`.
        texts: one text or several. A longer text is cut to the checkpoint's max_length, or else to the model's
            positions.
        batch_size: texts per batch. Batches have texts of similar length; the result is in the given order.
        pooling: "mean", "cls" or "max" over a text's tokens with the special tokens, or "last-four", the mean over
            tokens and the last four layers. None: the checkpoint's pooling (``encoder.sentence``), else "mean".
        normalize: scale each vector to Euclidean length 1, after ``truncate_dim``. None: as the checkpoint says, before
            ``truncate_dim`` as in sentence-transformers, else True.
        prompt: put before each text, such as "query: ".
        prompt_name: the name of one of the checkpoint's prompts, in place of ``prompt``.
        task: one of the tasks for which the checkpoint has a LoRA ("retrieval.query" of jina-embeddings-v3). Without
            prompt and prompt_name, the checkpoint's instruction for the task is put before each text. None: the model
            as it is.
        truncate_dim: keep the first dimensions only, for models that were trained so (Matryoshka); None: all.
        precision: "float32": the vectors as they are; "int8", "uint8", "binary" or "ubinary": see
            :func:`fastenc.models.embedding.quantization.quantize_vectors`, with the ranges of these texts.
        show_progress: show a progress bar on stderr. None: on a terminal, if there are more than ten batches.
        convert_to_numpy: return a numpy array, float32 unless ``precision`` says otherwise.
    Returns: (len(texts), width), or (width,) for one text, in the model's dtype on its device. The width is
        hidden_size, ``truncate_dim`` or that of the precision.
    Raises: ValueError for an item that is not a text, an encoder without tokenizer, an unknown pooling, prompt name,
        task or precision, a task in int8, a batch_size below 1, a truncate_dim outside 1 to hidden_size, and a prompt
        if the checkpoint pools without the prompt's tokens.
    """
    if encoder.tokenizer is None:
        raise ValueError(
            "encode needs the checkpoint's tokenizer.json: load the model with from_pretrained from a folder "
            "that has one, or set model.tokenizer"
        )
    settings = encoder.sentence or SentenceSettings()
    pooling = settings.pooling if pooling is None else pooling
    normalizes_before = settings.normalize if normalize is None else False
    check_pooling(pooling, encoder.config.num_layers)
    check_precision(precision)
    width = encoder.config.hidden_size
    if truncate_dim is not None and not 1 <= truncate_dim <= width:
        raise ValueError(
            f"truncate_dim must be from 1 to the model's width {width}, got {truncate_dim}"
        )
    adaptation, instruction = (None, None) if task is None else encoder.adaptation_of_task(task)
    if prompt is None and prompt_name is None:
        prompt = instruction
    prompt = settings.prompt_of(prompt, prompt_name)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    single = isinstance(texts, str)
    listed = checked_texts(texts)
    check_texts(precision, len(listed))
    ids = tokenize([prompt + text for text in listed], encoder.tokenizer, encoder.max_tokens)
    batches = length_sorted_batches([len(each) for each in ids], batch_size)
    if show_progress is None and len(batches) <= 10:
        show_progress = False
    weight = encoder.embeddings.word.weight
    vectors = [weight.new_empty((0, width))[:, :truncate_dim]]
    # Frozen weights are for layers without additions.
    frozen_calls = len(batches) if adaptation is None else 0
    with (
        without_dropout(),
        adaptation_of_calls(adaptation),
        encoder.frozen.during_call(encoder, calls=frozen_calls),
    ):
        for chosen in progress_bar(batches, "encode", "batch", show_progress):
            batch = pack_sequences([ids[index] for index in chosen]).to(weight.device)
            pooled = encoder.pooled_vectors(batch, pooling)
            pooled = F.normalize(pooled, dim=1) if normalizes_before else pooled
            pooled = pooled[:, :truncate_dim]
            vectors.append(F.normalize(pooled, dim=1) if normalize else pooled)
    order = [index for chosen in batches for index in chosen]
    given_order = torch.tensor(order, dtype=torch.long).argsort()
    result = torch.cat(vectors).index_select(0, send(given_order, weight.device))
    if precision == "float32":
        result = result.float() if convert_to_numpy else result
    else:
        result = quantize_vectors(result, precision)
    result = result[0] if single else result
    return result.cpu().numpy() if convert_to_numpy else result


def checked_texts(texts: str | Sequence[str]) -> list[str]:
    """The texts as a list. Raises: ValueError for what is not a text, or cannot be written as UTF-8."""
    listed = [texts] if isinstance(texts, str) else list(texts)
    for index, text in enumerate(listed):
        if not isinstance(text, str):
            raise ValueError(f"encode takes texts, got {text!r} as text {index}: leave it out")
        if (character := lone_surrogate(text)) is not None:
            raise ValueError(
                f"encode takes texts that can be written as UTF-8, got half a surrogate pair, "
                f"{text[character]!r}, at character {character} of text {index}: remove it"
            )
    return listed


def lone_surrogate(text: str) -> int | None:
    """The index of the first half of a surrogate pair, which no encoding of Unicode can hold; None: there is none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def tokenize(texts: list[str], tokenizer, max_length: int) -> list[list[int]]:
    """The token ids of each text, at most ``max_length`` with the special tokens, which are kept if a text is cut."""
    room = max_length - tokenizer.num_special_tokens_to_add(False)
    ids = []
    for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if len(encoding.ids) > max_length:
            encoding = tokenizer.encode(text, add_special_tokens=False)
            encoding.truncate(room)
            encoding = tokenizer.post_process(encoding)
        ids.append(encoding.ids)
    return ids
