"""Every objective computed with transformers' models, and with plain PyTorch where transformers has no such loss.

A peer is made from the checkpoint that fastenc saved, and takes what fastenc's collator returns.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc.models import LossTerm
from fastenc.objectives.distill import COSINE_WEIGHT, KL_WEIGHT, MASKED_WEIGHT, TEMPERATURE
from fastenc.objectives.electra import DETECTION_WEIGHT, GENERATOR_FOLDER
from fastenc.objectives.spans import MAX_POSITIONS, POSITION_SIZE, SpanMaskedLM
from fastenc.ops.labelled import IGNORED
from tests.helpers.references import electra as electra_reference
from tests.helpers.references.spans import span_boundary_logits


class Peer(NamedTuple):
    """A model, and the terms of its loss on a collator's example."""

    model: nn.Module
    terms: Callable[[dict[str, Any]], dict[str, LossTerm]]


def padded(example: dict[str, Any]) -> dict[str, Tensor]:
    """The same batch as Hugging Face takes it."""
    batch = example["batch"]
    indices, shape = batch.padded_indices()

    def pad(values: Tensor, padding: int) -> Tensor:
        return values.new_full(shape, padding).flatten().index_copy(0, indices, values).view(shape)

    types = batch.token_type_ids
    return {
        "input_ids": pad(batch.input_ids, 0),
        "attention_mask": pad(torch.ones_like(batch.input_ids), 0),
        "token_type_ids": pad(torch.zeros_like(batch.input_ids) if types is None else types, 0),
        "labels": pad(example["labels"], IGNORED),
    }


def real_rows(hidden: Tensor, example: dict[str, Any]) -> Tensor:
    """(batch, length, width) → (total_tokens, width), without the padding."""
    return hidden.flatten(0, 1)[example["batch"].padded_indices()[0]]


def masked_lm(folder: str, teacher: str | None) -> Peer:
    import transformers

    model = transformers.BertForMaskedLM.from_pretrained(folder)
    return Peer(model, lambda example: {"mlm": LossTerm(model(**padded(example)).loss)})


def pairs(folder: str, teacher: str | None) -> Peer:
    """BertForPreTraining, whose loss is the sum of these two terms."""
    import transformers

    model = transformers.BertForPreTraining.from_pretrained(folder)

    def terms(example: dict[str, Any]) -> dict[str, LossTerm]:
        batch = padded(example)
        labels = batch.pop("labels")
        output = model(**batch)
        masked = F.cross_entropy(output.prediction_logits.flatten(0, 1), labels.flatten())
        pair = F.cross_entropy(output.seq_relationship_logits, example["pair_labels"])
        return {"mlm": LossTerm(masked), "pair": LossTerm(pair)}

    return Peer(model, terms)


class BoundaryHead(nn.Module):
    """SpanBERT's boundary head from torch's own modules, with fastenc's names."""

    def __init__(self, width: int, vocabulary: int, eps: float):
        super().__init__()
        self.positions = nn.Embedding(MAX_POSITIONS, POSITION_SIZE)
        self.first = nn.Linear(2 * width + POSITION_SIZE, width)
        self.second = nn.Linear(width, width)
        self.first_norm, self.second_norm = (nn.LayerNorm(width, eps=eps) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, hidden: Tensor, spans: Tensor, embeddings: Tensor) -> Tensor:
        layers = [
            (dense.weight, dense.bias, norm.weight, norm.bias)
            for dense, norm in ((self.first, self.first_norm), (self.second, self.second_norm))
        ]
        positions, eps = self.positions.weight, self.first_norm.eps
        return span_boundary_logits(hidden, spans, positions, layers, embeddings, self.bias, eps)


def spans(folder: str, teacher: str | None) -> Peer:
    """transformers' masked LM with SpanBERT's boundary head in plain PyTorch."""
    import transformers

    model = transformers.BertForMaskedLM.from_pretrained(folder)
    config = model.config
    head = BoundaryHead(config.hidden_size, config.vocab_size, config.layer_norm_eps)
    head.load_state_dict(SpanMaskedLM.from_pretrained(folder).boundary.state_dict())

    def terms(example: dict[str, Any]) -> dict[str, LossTerm]:
        output = model(**padded(example), output_hidden_states=True)
        hidden = real_rows(output.hidden_states[-1], example)
        table = model.get_input_embeddings().weight
        logits = head(hidden, example["spans"], table)
        boundary = F.cross_entropy(logits, example["labels"][example["spans"][:, 0]])
        return {"mlm": LossTerm(output.loss), "sbo": LossTerm(boundary)}

    return Peer(nn.ModuleDict({"model": model, "boundary": head}), terms)


def electra(folder: str, teacher: str | None) -> Peer:
    """transformers' generator and discriminator, combined as in the paper."""
    import transformers

    generator = transformers.ElectraForMaskedLM.from_pretrained(Path(folder) / GENERATOR_FOLDER)
    discriminator = transformers.ElectraForPreTraining.from_pretrained(folder)
    own, theirs = discriminator.electra.embeddings, generator.electra.embeddings
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        setattr(theirs, name, getattr(own, name))
    generator.generator_lm_head.weight = own.word_embeddings.weight

    def terms(example: dict[str, Any]) -> dict[str, LossTerm]:
        batch = padded(example)
        labelled = batch["labels"] != IGNORED
        output = generator(**batch)
        logits = output.logits[labelled].detach()
        samples = electra_reference.sample(logits, example["uniform_samples"])
        read = batch["input_ids"].masked_scatter(labelled, samples)
        original = torch.where(labelled, batch["labels"], batch["input_ids"])
        mask = batch["attention_mask"]
        detection = discriminator(read, attention_mask=mask, labels=(read != original).long())
        return {"mlm": LossTerm(output.loss), "rtd": LossTerm(detection.loss, DETECTION_WEIGHT)}

    return Peer(nn.ModuleDict({"generator": generator, "discriminator": discriminator}), terms)


def distill(folder: str, teacher: str | None) -> Peer:
    """Two of transformers' masked LMs, and DistilBERT's loss in plain PyTorch."""
    import transformers

    model, large = (
        transformers.BertForMaskedLM.from_pretrained(name) for name in (folder, teacher)
    )
    large.eval()

    def terms(example: dict[str, Any]) -> dict[str, LossTerm]:
        batch = padded(example)
        labelled = batch["labels"] != IGNORED
        output = model(**batch, output_hidden_states=True)
        with torch.no_grad():
            goal = large(**batch, output_hidden_states=True)
        logits, goals = (each.logits[labelled] / TEMPERATURE for each in (output, goal))
        divergence = F.kl_div(logits.log_softmax(1), goals.softmax(1), reduction="batchmean")
        states = (real_rows(each.hidden_states[-1], example) for each in (output, goal))
        cosine = (1 - torch.cosine_similarity(*states)).mean()
        return {
            "mlm": LossTerm(output.loss, MASKED_WEIGHT),
            "kl": LossTerm(TEMPERATURE**2 * divergence, KL_WEIGHT),
            "cosine": LossTerm(cosine, COSINE_WEIGHT),
        }

    return Peer(model, terms)


def encoder_decoder(folder: str, teacher: str | None) -> Peer:
    """transformers' T5 or BART."""
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)

    def terms(example: dict[str, Any]) -> dict[str, LossTerm]:
        source = padded({**example, "labels": torch.zeros_like(example["batch"].input_ids)})
        target = padded({**example, "batch": example["target"]})
        # Padding is at the end, where causal attention of the other tokens does not see it.
        output = model(
            input_ids=source["input_ids"],
            attention_mask=source["attention_mask"],
            decoder_input_ids=target["input_ids"],
            labels=target["labels"],
        )
        return {"target": LossTerm(output.loss)}

    return Peer(model, terms)


PEERS: dict[str, Callable[[str, str | None], Peer]] = {
    "mlm": masked_lm,
    "mlm+nsp": pairs,
    "mlm+sop": pairs,
    "span": spans,
    "electra": electra,
    "distill": distill,
    "span-corruption": encoder_decoder,
    "ul2": encoder_decoder,
    "denoise": encoder_decoder,
}
# transformers has neither a boundary head nor a loss of distillation.
PLAIN = "transformers and plain PyTorch"
NAMES_OF_PEERS = dict.fromkeys(PEERS, "transformers") | dict.fromkeys(("span", "distill"), PLAIN)
