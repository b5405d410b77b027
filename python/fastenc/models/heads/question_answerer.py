"""Extractive question answering: the first and the last token of the answer in a text."""

from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import Encoder
from fastenc.models.heads.prediction_head import PredictionHead
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel
from fastenc.ops import unpack
from fastenc.packing import PackedBatch, tokens_before


class QuestionAnswerer(PretrainedModel):
    """Scores each token as the first and as the last token of the answer, by a linear layer with two outputs.

    DistilBERT has dropout before it (``qa_dropout`` in its configuration).
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

    def encoder_batch(self, batch: PackedBatch) -> PackedBatch:
        """In an encoder with global attention, the tokens of the question are global: those before a sequence's first
        separator."""
        if batch.global_tokens is not None or not self.encoder.stack.has_global_attention:
            return batch
        separator = self.config.architecture.separator(self.config)
        return replace(batch, global_tokens=tokens_before(batch, separator))

    def forward(self, batch: PackedBatch, labels: Tensor | None = None) -> ModelOutput:
        """Args: labels: int64 (batch, 2), positions of the answer's first and last token in its sequence; -100: none.

        Returns: logits (total_tokens, 2). With labels also the loss in float32, the mean of two cross-entropies (first
            token and last token), each of a softmax over the tokens of a sequence.
        """
        states = self.encoder(self.encoder_batch(batch)).last_hidden_state
        logits = self.head(states)
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
