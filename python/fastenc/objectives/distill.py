"""Distillation: a masked LM (the student) learns from one with more layers (the teacher)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastenc.models import EncoderConfig, LossTerm, MaskedLM, ModelOutput
from fastenc.objectives.base import Objective
from fastenc.objectives.loss_terms import weighted_sum
from fastenc.objectives.mlm import MlmCollator
from fastenc.ops import linear_kl_divergence
from fastenc.ops.labelled import IGNORED
from fastenc.packing import ModelArguments, PackedBatch

TEMPERATURE = 2.0
MASKED_WEIGHT, KL_WEIGHT, COSINE_WEIGHT = 2.0, 5.0, 1.0


class DistillationCollator(MlmCollator):
    """``MlmCollator`` that also counts the items of each term of the distillation loss."""

    def items(self, arguments: ModelArguments) -> dict[str, int]:
        """Number of items that each term is a mean over, see :func:`fastenc.objectives.loss_terms.count_items`."""
        labelled = arguments["max_labels"]
        return {"mlm": labelled, "kl": labelled, "cosine": arguments["batch"].total_tokens}


class _Unregistered(tuple):
    """Holds a module that the model does not register as a submodule. A deep copy of the model shares the module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Unregistered":
        return self


class DistilledLM(MaskedLM):
    """A student that learns from a teacher with the same tokenizer and width.

        loss = 2 × masked-LM loss + 5 × T^2 KL(teacher || student) over the masked tokens
             + mean over all tokens of 1 - cos(student's, teacher's last hidden state),   T = 2

    The weights of the terms and T are those of DistilBERT's training. The KL divergence is averaged over the masked
    tokens, as DistilBERT's code does with ``--restrict_ce_to_mask``. Averaged over all tokens, it would need 1/0.15
    times as many distributions. A checkpoint contains the student only, as a masked LM of the teacher's family.

    Args:
        config: the student's configuration.
        teacher: a masked LM in evaluation mode; None for a student that is not trained further.
    Raises: ValueError for a teacher in training mode, or with another vocabulary size or width.
    Source: Sanh et al. 2019, arXiv:1910.01108, and its code's README.
    """

    loss_ignores_padding = False

    def __init__(self, config: EncoderConfig, teacher: MaskedLM | None = None):
        super().__init__(config)
        if teacher is not None:
            for name in ("vocab_size", "hidden_size"):
                student_value, teacher_value = getattr(config, name), getattr(teacher.config, name)
                if student_value != teacher_value:
                    raise ValueError(
                        f"student and teacher must have the same {name}, got {student_value} and {teacher_value}: make "
                        "the student from the teacher, with DistilledLM.from_teacher"
                    )
            if teacher.training:
                raise ValueError(
                    "the teacher must be in evaluation mode, got training mode, in which dropout is active: call "
                    "teacher.eval()"
                )
        self._teacher = _Unregistered((teacher,))

    @classmethod
    def from_teacher(cls, teacher: MaskedLM, num_layers: int) -> "DistilledLM":
        """A student with copies of the teacher's embeddings, its head, and some of its layers (:func:`kept_layers`).

        Args:
            num_layers: the student's number of layers.
        Raises: ValueError unless ``num_layers`` is at least 1 and at most the teacher's number.
        """
        total = teacher.config.num_layers
        if not 1 <= num_layers <= total:
            raise ValueError(
                f"num_layers must be in [1, {total}], because the student's layers are copies of the teacher's, got "
                f"{num_layers}: give a number in this range"
            )
        layers = kept_layers(total, num_layers)
        student = cls(_with_layers(teacher.config, layers), teacher)
        # Layers may share modules (ALBERT). Each of the student's modules is a copy of one of the teacher's.
        own, theirs = (each.encoder.stack.module_of_layer for each in (student, teacher))
        modules = {module: theirs[layer] for module, layer in zip(own, layers, strict=True)}
        # In a pre-norm stack, a layer's last norm is the norm before the next layer, or after the stack.
        is_pre_norm = student.encoder.stack.layers[0].pre_norm
        ends = [layer - 1 for layer in (*layers[1:], total)] if is_pre_norm else layers
        norms = {module: theirs[layer] for module, layer in zip(own, ends, strict=True)}
        state, teachers = student.state_dict(), teacher.state_dict()
        for name in state:
            # Weights that the encoder stores and does not use. Their shape may depend on the number of layers (ESM's
            # contact head).
            if name.startswith("encoder.kept."):
                continue
            source = name
            if name.startswith("encoder.layers."):
                number, _, rest = name.removeprefix("encoder.layers.").partition(".")
                sources = norms if rest.startswith("out_norm.") else modules
                source = f"encoder.layers.{sources.get(int(number), number)}.{rest}"
            state[name] = teachers[source]
        student.load_state_dict(state)
        student.tokenizer = teacher.tokenizer
        return student

    def forward(
        self, batch: PackedBatch, labels: Tensor | None = None, max_labels: int | None = None
    ) -> ModelOutput:
        """Arguments as in ``MaskedLM``. Returns the loss and its terms; without labels the student's logits.

        Raises: ValueError if labels are given and the student has no teacher.
        """
        if labels is None:
            return super().forward(batch)
        (teacher,) = self._teacher
        if teacher is None:
            raise ValueError(
                "the distillation loss needs a teacher, got a student without one: load it with teacher=..."
            )
        encoded, table = self.encode(batch)
        hidden = encoded.last_hidden_state
        rows = self.labelled(hidden, labels, max_labels)
        if next(teacher.parameters()).device != hidden.device:
            teacher.to(hidden.device)
        with torch.no_grad():
            teacher_encoded, teacher_table = teacher.encode(batch)
            teacher_hidden = teacher_encoded.last_hidden_state
            teacher_rows = teacher.labelled(teacher_hidden, labels, max_labels)
        divergence = linear_kl_divergence(
            *(rows.hidden, table, self.head.bias),
            *(teacher_rows.hidden, teacher_table, teacher.head.bias),
            mask=rows.targets != IGNORED,
            temperature=TEMPERATURE,
        )
        cosine = torch.cosine_similarity(hidden.float(), teacher_hidden.float(), dim=1)
        terms = {
            "mlm": LossTerm(self.loss(rows, table), MASKED_WEIGHT),
            "kl": LossTerm(divergence, KL_WEIGHT),
            "cosine": LossTerm((1 - cosine).mean(), COSINE_WEIGHT),
        }
        return ModelOutput(loss=weighted_sum(terms), terms=terms)


def _with_layers(config: EncoderConfig, layers: Sequence[int]) -> EncoderConfig:
    """A copy of the configuration with some of the layers. Lists of one value for each layer are cut to these."""
    lists = config.architecture.layer_lists(config)
    listed = {key: [values[number] for number in layers] for key, values in lists.items()}
    return config.replace(num_layers=len(layers), extra={**config.extra, **listed})


def kept_layers(total: int, kept: int) -> list[int]:
    """Indices of ``kept`` evenly spaced layers from the first to the last.

    For 6 of 12 layers these are 0, 2, 4, 7, 9, 11, as in DistilBERT.
    """
    return [round(number * (total - 1) / max(kept - 1, 1)) for number in range(kept)]


DISTILL = Objective(
    DistilledLM,
    ("full-sentences", "doc-sentences"),
    lambda tokenizer, blocks, seed, **masking: DistillationCollator(
        tokenizer, seed=seed, **masking
    ),
    student=DistilledLM.from_teacher,
)
