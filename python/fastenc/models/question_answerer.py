"""Extractive question answering over the encoder: where an answer starts and ends."""

from torch import Tensor, nn
from torch.nn import functional as F

from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import Encoder
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel
from fastenc.ops import unpack
from fastenc.packing import PackedBatch


class QuestionAnswerer(PretrainedModel):
    """Scores each token as the first and as the last one of the answer: one linear layer with two outputs.

    DistilBERT has dropout before it (``qa_dropout`` of its configuration).
    Source: Devlin et al. 2018, arXiv:1810.04805, section 4.2.
    """

    architecture = "ForQuestionAnswering"

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.encoder = Encoder(config.replace(pooler=False))
        self.head = nn.ModuleDict({"out": nn.Linear(config.hidden_size, 2)})
        self.head.apply(self.init_weights)
        has_dropout = config.family == "distilbert"
        self.dropout_p = float(config.extra.get("qa_dropout", 0.1)) if has_dropout else 0.0

    def forward(self, batch: PackedBatch, labels: Tensor | None = None) -> ModelOutput:
        """Args: labels: int64 (batch, 2), places of the answer's first and last token in each sequence; -100: none.

        Returns: logits (total_tokens, 2) and, with labels, the mean over both of the cross-entropy of a softmax over
        the sequence's tokens, in float32.
        """
        states = self.encoder(batch).last_hidden_state
        logits = self.head["out"](F.dropout(states, self.dropout_p, self.training))
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
        return {"head.out": "qa_outputs"}
