"""Scores of (query, document) pairs by a cross-encoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fastenc._base.progress import progress_bar, unless_few
from fastenc._base.transfer import send_arguments
from fastenc.data.classification import collate_classification, encode_texts
from fastenc.models import SequenceClassifier
from fastenc.models.checkpoint import read_config, resolve, tokenizer_length
from fastenc.models.embedding.sentence_files import lowercased, main_in
from fastenc.models.embedding.text_batches import items_of, lone_surrogate
from fastenc.models.heads.cross_encoder import ACTIVATIONS, stored_activation
from fastenc.models.pretrained import architecture_of
from fastenc.nn.evaluation_mode import without_dropout
from fastenc.packing import check_batch_size, length_sorted_batches


class Reranker:
    """A cross-encoder: it reads a query and a document together and scores the pair.

        reranker = fastenc.Reranker.from_pretrained("cross-encoder/ms-marco-MiniLM-L6-v2")
        reranker.rank("Where is the bank?", ["It is by the river.", "Films are long."], top_k=1)

    Pairs are sorted by length and packed, so that none is padded. The scores are those of sentence-transformers'
    CrossEncoder.

    Args:
        model: a classifier of pairs with a tokenizer.
        max_length: number of tokens to which a pair is cut, at the end of its longer text; None: the model's positions.
        activation: "Identity", "Sigmoid" or "Tanh", applied to the logits.
        prompt: put before each query.
    Raises: ValueError for another activation, a max_length outside 1 to the model's positions, and a model without a
        tokenizer.
    """

    def __init__(
        self,
        model: SequenceClassifier,
        max_length: int | None = None,
        activation: str = "Identity",
        prompt: str = "",
    ):
        model.own_tokenizer()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {[*ACTIVATIONS]}, got {activation!r}")
        max_length = model.positions if max_length is None else max_length
        if not 1 <= max_length <= model.positions:
            raise ValueError(
                f"max_length must be from 1 to the model's positions {model.positions}, got {max_length}"
            )
        self.model, self.max_length, self.activation = model, max_length, activation
        self.prompt = prompt

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        *,
        dtype: torch.dtype | str = torch.float32,
        max_length: int | None = None,
        activation: str | None = None,
        prompt: str | None = None,
    ) -> "Reranker":
        """Load a cross-encoder, or any checkpoint for the classification of sequences.

        Args:
            path_or_hub_id, dtype: as :meth:`fastenc.Encoder.from_pretrained` takes them.
            max_length: None: that of the training, if fastenc trained the model, else the tokenizer's
                ``model_max_length``; at most the model's positions.
            activation: None: what sentence-transformers has stored in config.json, else Sigmoid for one label and
                Identity for several.
            prompt: put before each query; None: the default prompt that sentence-transformers has stored, if there is
                one.
        Raises: ValueError for a checkpoint without a head for the classification of sequences, for a stored activation
            that is not known here, and as :meth:`fastenc.Encoder.from_pretrained`.
        """
        folder = resolve(path_or_hub_id)
        values = read_config(folder)
        if architecture_of(values) != SequenceClassifier.architecture:
            raise ValueError(
                f"a reranker needs a checkpoint of a cross-encoder (...{SequenceClassifier.architecture}), got "
                f"{path_or_hub_id} with architectures {values.get('architectures')}: take another, or fine-tune it"
            )
        model = SequenceClassifier.from_pretrained(folder, dtype=dtype)
        if max_length is None:
            trained = cast("int | None", model.task_options.get("max_length"))
            max_length = trained or tokenizer_length(folder) or model.positions
            max_length = min(max_length, model.positions)
        if activation is None:
            activation = stored_activation(values, folder)
        if activation is None:
            activation = "Sigmoid" if len(model.label_names) == 1 else "Identity"
        if prompt is None:
            main = main_in(folder)
            prompt = (
                main["prompts"][main["default_prompt_name"]]
                if main.get("default_prompt_name")
                else ""
            )
        model.tokenizer = lowercased(model.tokenizer, folder)
        return cls(model, max_length, activation, prompt)

    @torch.inference_mode()
    def predict(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        batch_size: int = 32,
        show_progress: bool | None = None,
    ) -> Tensor:
        """The scores of (query, document) pairs, without dropout in either mode of the model.

        Args:
            pairs: two texts each.
            batch_size: pairs in a batch. Batches have pairs of similar length.
            show_progress: show a progress bar on stderr. None: on a terminal, if there are more than ten batches.
        Returns: float32 on the model's device, (pairs,) for a model with one label, else (pairs, labels), in the given
            order.
        Raises: ValueError for an item that is not two texts, and a batch_size below 1.
        """
        check_batch_size(batch_size)
        checked = (_checked(index, pair) for index, pair in enumerate(pairs))
        given = [(self.prompt + query, document) for query, document in checked]
        model, device = self.model, next(self.model.parameters()).device
        examples = encode_texts(given, model.own_tokenizer(), self.max_length, show_progress=False)
        batches = length_sorted_batches([len(each.input_ids) for each in examples], batch_size)
        show_progress = unless_few(show_progress, len(batches))
        labels = len(model.label_names)
        scores = torch.empty(len(given), labels, device=device)
        encoder = model.encoder
        with without_dropout(), encoder.frozen.during_call(encoder, calls=len(batches)):
            for chosen in progress_bar(batches, "score", "batch", show_progress):
                arguments = collate_classification([examples[index] for index in chosen])
                logits = model(**send_arguments(arguments, device)).logits
                scores[chosen] = ACTIVATIONS[self.activation](logits.float())
        return scores.squeeze(1) if labels == 1 else scores

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        *,
        return_documents: bool = False,
        batch_size: int = 32,
        show_progress: bool | None = None,
    ) -> list[dict[str, Any]]:
        """The documents from the best to the worst answer to a query.

        Args:
            top_k: the number of documents to return; None: all.
            return_documents: also return the texts.
            batch_size, show_progress: as in :meth:`predict`.
        Returns: {"corpus_id": index of the document, "score": float}, and "text" with ``return_documents``. Documents
            of equal scores stay in their order.
        Raises: ValueError for a model with several labels, a top_k below 1, and as :meth:`predict`.
        """
        require_one_label(self, "rank", "use predict")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if isinstance(documents, str):
            raise ValueError(
                f"documents must be a list, got a single text: give [{documents[:40]!r}]"
            )
        listed = items_of(documents, "documents must be a list")
        pairs = [(query, document) for document in listed]
        scores = self.predict(pairs, batch_size=batch_size, show_progress=show_progress).tolist()
        order = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)
        results: list[dict[str, Any]] = []
        for index in order[:top_k]:
            text = {"text": listed[index]} if return_documents else {}
            results.append({"corpus_id": index, "score": scores[index], **text})
        return results


def require_one_label(reranker: Reranker, user: str, remedy: str) -> None:
    """Raises: ValueError, naming who asks and the remedy, for a model with several labels."""
    number = len(reranker.model.label_names)
    if number != 1:
        raise ValueError(f"{user} needs a model with one label, got one with {number}: {remedy}")


def _checked(index: int, pair: Any) -> tuple[str, str]:
    """Raises: ValueError for what is not a pair of texts."""
    two = isinstance(pair, list | tuple) and len(pair) == 2
    if not two or not all(isinstance(text, str) for text in pair):
        raise ValueError(
            f"each pair must be (query, document), two texts, got {pair!r} as pair {index}: leave it out"
        )
    for text in pair:
        if lone_surrogate(text) is not None:
            raise ValueError(
                f"texts must be such that UTF-8 can hold them, got half a surrogate pair in pair {index}: remove it"
            )
    return pair[0], pair[1]
