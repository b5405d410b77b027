"""Extractive question answering: the first and the last token of the answer in a text."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import Encoder
from fastenc.models.heads.prediction_head import PredictionHead
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel
from fastenc.ops import unpack
from fastenc.packing import PackedBatch

# Subtracted from the scores of tokens that cannot be the answer, as transformers does.
EXCLUDED = 1e6


class QuestionAnswerer(PretrainedModel):
    """Scores each token as the first and as the last token of the answer, by a linear layer with two outputs.

    DistilBERT has dropout before it (``qa_dropout`` in its configuration). BigBird has a feed-forward sublayer before
    it, gives the question and the text token types if the batch has none, and excludes the question's tokens, except
    the first, from the answer.
    Source: Devlin et al. 2018, arXiv:1810.04805, section 4.2.
    """

    architecture = "ForQuestionAnswering"

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.encoder = Encoder(config.replace(pooler=False))
        architecture = config.architecture
        p = architecture.question_answerer_dropout_p(config)
        self.head = PredictionHead(config, architecture.question_answerer, 2, p)
        self.init_modules(self.head)
        self.question_end = architecture.question_end(config)

    def encoder_batch(self, batch: PackedBatch) -> PackedBatch:
        """In an encoder with global attention, the tokens of the question are global: those before a sequence's first
        separator. On a GPU their number is read back, unless the batch has them."""
        if batch.global_tokens is not None or not self.encoder.stack.has_global_attention:
            return batch
        separator = self.config.architecture.separator(self.config)
        in_question = question_tokens(batch, separator) & (batch.input_ids != separator)
        return replace(batch, global_tokens=in_question.nonzero().flatten())

    def forward(self, batch: PackedBatch, labels: Tensor | None = None) -> ModelOutput:
        """Args: labels: int64 (batch, 2), positions of the answer's first and last token in its sequence; -100: none.

        Returns: logits (total_tokens, 2). With labels also the loss in float32, the mean of two cross-entropies (first
            token and last token), each of a softmax over the tokens of a sequence.
        """
        if self.question_end is not None:
            in_question = question_tokens(batch, self.question_end)
            if batch.token_type_ids is None:
                batch = replace(batch, token_type_ids=(~in_question).long())
        logits = self.head(self.encoder(self.encoder_batch(batch)).last_hidden_state)
        if self.question_end is not None:
            excluded = in_question & (batch.position_ids != 0)
            logits = logits - EXCLUDED * excluded[:, None].float()
        if labels is None:
            return ModelOutput(logits=logits)
        if labels.shape != (batch.num_sequences, 2):
            raise ValueError(
                f"labels must be (batch, 2) = ({batch.num_sequences}, 2), first and last token of each answer, "
                f"got shape {tuple(labels.shape)}"
            )
        scores = unpack(logits.float(), batch, padding_value=float("-inf"))
        return ModelOutput(F.cross_entropy(scores, labels), logits)

    def head_names(self) -> dict[str, str]:
        return self.head.names("head")


def question_tokens(batch: PackedBatch, end: int) -> Tensor:
    """bool (total_tokens,): the tokens up to each sequence's first ``end``, or its first token if it has none."""
    offsets, is_end = batch.cu_seqlens.long(), batch.input_ids == end
    counts = F.pad(is_end.long().cumsum(0), (1, 0))
    before, in_sequence = counts[offsets[:-1]], counts[offsets].diff()
    rows = torch.repeat_interleave(
        torch.stack([before, in_sequence], 1), offsets.diff(), 0, output_size=batch.total_tokens
    )
    within = (counts[:-1] == rows[:, 0]) & (rows[:, 1] > 0)
    return within | (batch.position_ids == 0)
