"""pytorch-crf on transformers' token classifier, over each word's first subword."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


class TaggerWithCrf(nn.Module):
    """The negative mean log-likelihood of the tags per word, as fastenc's; the logits are the tagger's."""

    def __init__(self, tagger: nn.Module):
        import torchcrf

        super().__init__()
        self.tagger = tagger
        self.crf = torchcrf.CRF(tagger.config.num_labels, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Any]:
        """labels: (batch, length), -100 except at the words' first subwords."""
        logits = self.tagger(input_ids=input_ids, attention_mask=attention_mask).logits
        real = labels != -100
        emissions, mask = of_words(logits, real)
        tags, _ = of_words(labels, real)
        return {
            "loss": -self.crf(emissions, tags, mask, reduction="token_mean"),
            "logits": logits,
        }

    @torch.no_grad()
    def decode(self, logits: Tensor, real: Tensor) -> list[list[int]]:
        """Each sentence's best path; real: (batch, length), True where a word begins."""
        return self.crf.decode(*of_words(logits, real))


def of_words(values: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The values where ``real`` is True, padded at the right, and the mask of the values."""
    rows = [row[chosen] for row, chosen in zip(values, real, strict=True)]
    lengths = real.sum(1)
    mask = torch.arange(int(lengths.max()), device=real.device) < lengths[:, None]
    return pad_sequence(rows, batch_first=True), mask
