"""The detector of replaced tokens, ELECTRA's and DeBERTa's discriminator."""

import torch.nn.functional as F
from torch import nn

from fastenc.models.architectures import ARCHITECTURES
from fastenc.models.architectures.modules import HeadSpec
from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import Encoder
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.activation import activate_plain
from fastenc.nn.embeddings import make_norm
from fastenc.nn.layer_spec import NormSpec
from fastenc.ops.gemm import linear
from fastenc.packing import PackedBatch


class Discriminator(PretrainedModel):
    """For each token the logit that it was replaced: act(x W + b) w + c.

    x is hidden in ELECTRA, and LayerNorm(hidden + hidden of the sequence's first token) in DeBERTa.
    ELECTRA's checkpoints are those of transformers' ElectraForPreTraining. DeBERTa's have the names of the published
    files; transformers reads their encoder.

    Raises: ValueError for a family without this head.
    Source: Clark et al. 2020, arXiv:2003.10555; github.com/microsoft/DeBERTa, replaced_token_detection_model.py.
    """

    architecture = "ForPreTraining"

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        spec = _detector(config)
        self.encoder = Encoder(config.replace(pooler=False))
        width = config.hidden_size
        norm = NormSpec("layer", config.eps)
        self.norm = make_norm(norm, width, True) if "norm" in spec.names else None
        self.dense, self.out = nn.Linear(width, width), nn.Linear(width, 1)
        self.activation = spec.kernel_activation(config.activation)
        for module in (self.norm, self.dense, self.out):
            if module is not None:
                self.init_weights(module)

    def forward(self, batch: PackedBatch) -> ModelOutput:
        """Returns: logits (total_tokens,); positive for a token that is predicted to be replaced."""
        hidden = self.encoder(batch).last_hidden_state
        if self.norm is not None:
            lengths, starts = batch.cu_seqlens.diff(), batch.cu_seqlens[:-1].long()
            first = starts.repeat_interleave(lengths, output_size=batch.total_tokens)
            # An embedding, because its gradient is deterministic on a GPU.
            hidden = self.norm(hidden, residual=F.embedding(first, hidden))
        inner = activate_plain(linear(hidden, self.dense.weight), self.dense.bias, self.activation)
        return ModelOutput(logits=self.out(inner).squeeze(1))

    def head_names(self) -> dict[str, str]:
        return _detector(self.config).names


def _detector(config: EncoderConfig) -> HeadSpec:
    spec = config.architecture.detector
    if spec is None:
        able = ", ".join(name for name, each in ARCHITECTURES.items() if each.detector is not None)
        raise ValueError(
            f"replaced-token detection is for models of {able}, got family {config.family!r}: the checkpoints of the "
            "others have no head for it"
        )
    return spec
