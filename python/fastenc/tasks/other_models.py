"""What other models say about the texts of a training: a guide's vectors, a teacher's scores. Each is computed once."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from fastenc.models import Encoder
from fastenc.tasks.reranker import Reranker, require_one_label


def guide_vectors(name: str, texts: Sequence[Sequence[str]]) -> Tensor:
    """The vectors of pairs' texts by a model of sentence vectors, without its default prompt.

    Args:
        name: its folder, or its name on the hub.
        texts: the texts of each pair, the same number for all.
    Returns: float32 (pairs, texts of a pair, width) on the CPU.
    """
    encoder = Encoder.from_pretrained(name).to(_device())
    different = list(dict.fromkeys(chain.from_iterable(texts)))
    index_of = {text: index for index, text in enumerate(different)}
    vectors = encoder.encode(different, prompt="").cpu()
    return vectors[torch.tensor([[index_of[text] for text in row] for row in texts])]


def teacher_scores(name: str, texts: Sequence[Sequence[str]]) -> list[list[float]]:
    """A cross-encoder's logits of each pair's first text with each of the others.

    Args: as :func:`guide_vectors`.
    Raises: ValueError for a model with several labels.
    """
    reranker = Reranker.from_pretrained(name, activation="Identity")
    require_one_label(reranker, "teacher", "take a reranker")
    reranker.model.to(_device())
    pairs = [(text, other) for text, *others in texts for other in others]
    return reranker.predict(pairs).view(len(texts), -1).tolist()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
