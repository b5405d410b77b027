"""Distillation: a masked LM of fewer layers learns from a larger one."""

from typing import Any

import torch
from torch import Tensor

from fastenc.models import EncoderConfig, LossPart, MaskedLM, ModelOutput
from fastenc.objectives.base import Objective
from fastenc.objectives.mlm import IGNORED, MlmCollator
from fastenc.objectives.parts import weighted_sum
from fastenc.ops import linear_kl_divergence
from fastenc.packing import PackedBatch

TEMPERATURE = 2.0
MASKED_WEIGHT, KL_WEIGHT, COSINE_WEIGHT = 2.0, 5.0, 1.0


class DistillationCollator(MlmCollator):
    """``MlmCollator``, whose masked tokens and others count for different parts of the loss."""

    def items(self, arguments: dict[str, Any]) -> dict[str, int]:
        labelled = arguments["max_labelled"]
        return {"mlm": labelled, "kl": labelled, "cosine": arguments["batch"].total_tokens}


class _Aside(tuple):
    """Keeps a teacher from being a submodule of its student, and a copy of the student from copying it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Aside":
        return self


class DistilledLM(MaskedLM):
    """A student of a teacher that has the same tokenizer and width.

        loss = 2 × masked-LM loss + 5 × T^2 KL(teacher || student) over the masked tokens
             + mean over all tokens of 1 - cos(student's, teacher's last hidden state),   T = 2

    The weights and T are those of DistilBERT's training. Its code takes the KL over all tokens that are no padding,
    unless told ``--restrict_ce_to_mask``; here it is always over the masked tokens, which needs a seventh of the
    distributions over the vocabulary. The teacher is none of the student's parameters: no checkpoint holds it.
    Checkpoints are the teacher's family's masked-LM checkpoints.

    Args:
        teacher: in evaluation mode; None for a student that learns no more.
    Raises: ValueError for a teacher in training mode, or of another vocabulary or width.
    Source: Sanh et al. 2019, arXiv:1910.01108, and its code's README.
    """

    def __init__(self, config: EncoderConfig, teacher: MaskedLM | None = None):
        super().__init__(config)
        if teacher is not None:
            for name in ("vocab_size", "hidden_size"):
                own, other = getattr(config, name), getattr(teacher.config, name)
                if own != other:
                    raise ValueError(
                        f"student and teacher must have the same {name}, got {own} and {other}: make the student "
                        "from the teacher, with DistilledLM.from_teacher"
                    )
            if teacher.training:
                raise ValueError("the teacher must not drop units: put it into evaluation mode")
        self._teacher = _Aside((teacher,))

    @classmethod
    def from_teacher(cls, teacher: MaskedLM, num_layers: int) -> "DistilledLM":
        """A student with copies of the teacher's embeddings, head and every so manieth layer, the first and the last
        among them.

        Raises: ValueError unless ``num_layers`` is in [1, the teacher's].
        """
        total = teacher.config.num_layers
        if not 1 <= num_layers <= total:
            raise ValueError(
                f"a student's layers are taken from the teacher: their number must be in [1, {total}], "
                f"got {num_layers}"
            )
        student = cls(teacher.config.replace(num_layers=num_layers), teacher)
        layers = kept_layers(total, num_layers)
        state = {}
        for name in student.state_dict():
            source = name
            if name.startswith("encoder.layers."):
                number, _, rest = name.removeprefix("encoder.layers.").partition(".")
                source = f"encoder.layers.{layers[int(number)]}.{rest}"
            state[name] = teacher.state_dict()[source]
        student.load_state_dict(state)
        student.tokenizer = teacher.tokenizer
        return student

    def forward(
        self, batch: PackedBatch, labels: Tensor | None = None, max_labelled: int | None = None
    ) -> ModelOutput:
        if labels is None:
            return super().forward(batch)
        (teacher,) = self._teacher
        if teacher is None:
            raise ValueError("the student has no teacher to learn from: load it with teacher=...")
        encoded, table = self.encode(batch)
        hidden = encoded.last_hidden_state
        rows = self.labelled(hidden, labels, max_labelled)
        if next(teacher.parameters()).device != hidden.device:
            teacher.to(hidden.device)
        with torch.no_grad():
            teacher_encoded, teacher_table = teacher.encode(batch)
            teacher_hidden = teacher_encoded.last_hidden_state
            teacher_rows = teacher.labelled(teacher_hidden, labels, max_labelled)
        divergence = linear_kl_divergence(
            *(rows.hidden, table, self.head.bias),
            *(teacher_rows.hidden, teacher_table, teacher.head.bias),
            mask=rows.targets != IGNORED,
            temperature=TEMPERATURE,
        )
        cosine = torch.cosine_similarity(hidden.float(), teacher_hidden.float(), dim=1)
        parts = {
            "mlm": LossPart(self.loss(rows, table), MASKED_WEIGHT),
            "kl": LossPart(divergence, KL_WEIGHT),
            "cosine": LossPart((1 - cosine).mean(), COSINE_WEIGHT),
        }
        return ModelOutput(loss=weighted_sum(parts), parts=parts)


def kept_layers(total: int, kept: int) -> list[int]:
    """Evenly spaced, from the first to the last: 0, 2, 4, 7, 9, 11 for 6 of 12, as DistilBERT's."""
    return [round(place * (total - 1) / max(kept - 1, 1)) for place in range(kept)]


DISTILL = Objective(
    DistilledLM,
    ("full-sentences", "doc-sentences"),
    lambda tokenizer, blocks, seed, **masking: DistillationCollator(
        tokenizer, seed=seed, **masking
    ),
    student=DistilledLM.from_teacher,
)
