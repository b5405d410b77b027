"""Token classification (parts of speech, entities), with or without a CRF."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastenc._base.json_values import JsonObject
from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import encoder_under_head
from fastenc.models.heads.prediction_head import PredictionHead
from fastenc.models.labels import check_names, config_of, names_to_build
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn import CRF
from fastenc.ops import crf_decode, crf_log_likelihood, crf_marginals, masked_cross_entropy
from fastenc.packing import PackedBatch
from fastenc.text.tags import may_follow, scheme_of

FORBIDDEN = -10_000.0  # far below the score of any path of allowed tags


class TokenClassifier(PretrainedModel):
    """Predicts a label for each token with the family's head, usually dropout and a linear layer.

    With a CRF, the logits of the words' first subwords are its emissions. Its transitions are saved beside the family's
    weights; transformers ignores them.

    Args:
        num_labels, label_names: the classes, stored in config.json.
        crf: whether to add a linear-chain CRF over the words.
    """

    architecture = "ForTokenClassification"
    optional_parts = ("crf",)

    def __init__(
        self,
        config: EncoderConfig,
        num_labels: int | None = None,
        label_names: Sequence[str] | None = None,
        crf: bool = False,
    ):
        super().__init__(config)
        self.label_names = check_names(label_names, num_labels)
        self.encoder = encoder_under_head(config, reads_pooler=False)
        architecture = config.architecture
        p = architecture.token_classifier_dropout_p(config)
        self.head = PredictionHead(config, architecture.token_classifier, len(self.label_names), p)
        self.init_modules(self.head)
        self.crf = CRF(len(self.label_names)) if crf else None
        self.loss_ignores_padding = not crf

    @classmethod
    def build(cls, config: EncoderConfig, hf_config: JsonObject, **options) -> "TokenClassifier":
        names_to_build(hf_config, options)
        options.setdefault("crf", hf_config.get("crf", False))
        return cls(config, **options)

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        word_rows: Tensor | None = None,
        cu_words: Tensor | None = None,
    ) -> ModelOutput:
        """Compute logits, and with labels the loss.

        Args:
            labels: int64 (total_tokens,), -100 for no label.
            word_rows: int64 (total_words,), index among the packed tokens of each word's first subword. The loss of a
                CRF needs it; these tokens must have labels.
            cu_words: int32 (batch+1,), offsets of the sequences in ``word_rows``, for the loss of a CRF.
        Returns: logits (total_tokens, num_labels). With labels also the loss in float32: cross-entropy per labelled
            token, or the CRF's negative log-likelihood per word; 0 if there is none.
        """
        hidden = self.encoder(batch).last_hidden_state
        logits = self.head(hidden)
        if labels is None:
            return ModelOutput(logits=logits)
        if labels.dtype != torch.int64 or labels.shape != logits.shape[:1]:
            raise ValueError(
                f"labels must be int64 of shape ({logits.shape[0]},), one class per packed token, "
                f"got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        if self.crf is None:
            return ModelOutput(masked_cross_entropy(logits, labels), logits)
        if word_rows is None or cu_words is None:
            raise ValueError(
                "the loss of a CRF needs word_rows and cu_words, got none: batches of "
                "fastenc.data.collate_tagging have them"
            )
        emissions, tags = logits.index_select(0, word_rows), labels.index_select(0, word_rows)
        likelihood = crf_log_likelihood(emissions, tags, cu_words, *self.crf.scores())
        return ModelOutput(-likelihood.sum() / max(word_rows.shape[0], 1), logits)

    @torch.no_grad()
    def decode(self, emissions: Tensor, cu_words: Tensor) -> tuple[Tensor, Tensor]:
        """The tags of words and their probabilities.

        Without a CRF that is the best tag of each word. With a CRF it is the best path; for tags of entities, the best
        path that the tagging scheme allows.

        Args:
            emissions: (total_words, num_labels), the logits of the words' first subwords.
            cu_words: int32 (batch+1,), offsets of the sentences.
        Returns: tags int64 (total_words,), and float32 (total_words,), their softmax or CRF marginal probabilities.
        """
        if self.crf is None:
            probabilities, tags = emissions.float().softmax(1).max(1)
            return tags, probabilities
        scores = [s + p.to(s) for s, p in zip(self.crf.scores(), self._penalties(), strict=True)]
        tags, _ = crf_decode(emissions, cu_words, *scores)
        marginals = crf_marginals(emissions, cu_words, *scores)
        return tags, marginals.gather(1, tags[:, None])[:, 0]

    def _penalties(self) -> tuple[Tensor, Tensor, Tensor]:
        """Penalties of the CRF's start, end and transitions: 0 where the tagging scheme allows them, else FORBIDDEN.

        They are used for decoding, which has whole sentences. Training does not use them, because a training example
        can begin inside an entity.
        """
        names, scheme = self.label_names, scheme_of(self.label_names)
        allowed = lambda before, after: scheme is None or may_follow(before, after, scheme)
        score = lambda pairs: torch.tensor([0.0 if allowed(*p) else FORBIDDEN for p in pairs])
        transitions = score([(before, after) for before in names for after in names])
        return (
            score([(None, name) for name in names]),
            score([(name, None) for name in names]),
            transitions.view(len(names), len(names)),
        )

    def init_weights(self, module: nn.Module, name: str = "") -> None:
        if isinstance(module, CRF):
            module.reset_parameters()
        else:
            super().init_weights(module, name)

    def head_names(self) -> dict[str, str]:
        return {**self.head.names("head"), "crf": "crf"}

    def extra_config(self) -> JsonObject:
        return {**config_of(self.label_names), "crf": self.crf is not None}
