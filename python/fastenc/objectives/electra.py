"""Replaced-token detection: a small masked LM replaces tokens, and the model tells which."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._seeds import derive_seed
from fastenc.models import Encoder, EncoderConfig, LossPart, MaskedLM, ModelOutput, checkpoint
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.encoder_layer import activate
from fastenc.objectives.base import Objective
from fastenc.objectives.mlm import IGNORED, MlmCollator
from fastenc.objectives.parts import weighted_sum
from fastenc.ops._matmul import linear
from fastenc.packing import PackedBatch

DETECTION_WEIGHT = 50.0
GENERATOR_SIZE = 0.25
GENERATOR_FOLDER = "generator"


class ElectraCollator:
    """Masks tokens, each selected one by the mask token, and draws the random numbers that replace them.

    As in the paper; its released code shows the generator 15 % of the selected tokens as they are. Here every token
    that it predicts is hidden from it, as the discriminator's task takes for granted.

    Args: masks: a collator made with ``mask_share=1, random_share=0``.
    Source: Clark et al. 2020, arXiv:2003.10555.
    """

    def __init__(self, masks: MlmCollator):
        if masks.mask_share != 1:
            raise ValueError(
                f"every selected token must become the mask token, got mask_share {masks.mask_share}: make masks "
                "with mask_share=1, random_share=0"
            )
        self.masks = masks

    def __call__(self, sequences: Sequence[Sequence[int]], step: int) -> dict[str, Any]:
        """{"batch", "labels"} of ``MlmCollator``, and "draws": float64 (labelled,), uniform in [0, 1)."""
        masked = self.masks(sequences, step)
        generator = torch.Generator().manual_seed(derive_seed(self.masks.seed, step, "samples"))
        labelled = masked.pop("max_labelled")
        draws = torch.rand(labelled, generator=generator, dtype=torch.float64)
        return {**masked, "draws": draws}

    def items(self, arguments: dict[str, Any]) -> dict[str, int]:
        return {
            "mlm": len(arguments["draws"]),
            "rtd": arguments["batch"].total_tokens,
        }


class Discriminator(PretrainedModel):
    """Tells for every token whether it was replaced: act(hidden W + b) w + c. ElectraForPreTraining's checkpoints."""

    architecture = "ForPreTraining"

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.encoder = Encoder(config.replace(pooler=False))
        width = config.hidden_size
        self.dense, self.out = nn.Linear(width, width), nn.Linear(width, 1)
        self.init_weights(self.dense)
        self.init_weights(self.out)

    def forward(self, batch: PackedBatch) -> ModelOutput:
        """logits: (total_tokens,), positive for tokens that look replaced."""
        hidden = self.encoder(batch).last_hidden_state
        inner = activate(linear(hidden, self.dense.weight), self.dense.bias, self.config.activation)
        return ModelOutput(logits=self.out(inner).squeeze(1))

    def head_names(self) -> dict[str, str]:
        prefix = "discriminator_predictions"
        return {"dense": f"{prefix}.dense", "out": f"{prefix}.dense_prediction"}


class Electra(PretrainedModel):
    """Generator and discriminator with the same word, position and token-type embeddings.

        loss = mean masked-LM loss of the generator + 50 × mean over all tokens of the discriminator's binary
        cross-entropy

    The discriminator reads the text with the generator's samples in place of the masked tokens; a sample that is
    the original token counts as original, and no gradient goes through the sampling. ``save_pretrained`` writes the
    discriminator as ElectraForPreTraining, and the generator as ElectraForMaskedLM in the folder "generator".

    The LayerNorms after the embeddings are two: the paper shares the embeddings, its released code the LayerNorm
    too. Here each network scales its own input, and either checkpoint holds a LayerNorm anyway.

    Args:
        config: of the discriminator; its family must be "electra".
        generator_config: None: the discriminator's, with a ``generator_size`` share of its width and heads.
    Raises: ValueError for another family, embeddings of another size, or a share outside (0, 1].
    Source: Clark et al. 2020, arXiv:2003.10555.
    """

    def __init__(
        self,
        config: EncoderConfig,
        generator_config: EncoderConfig | None = None,
        *,
        generator_size: float = GENERATOR_SIZE,
    ):
        if config.family != "electra":
            raise ValueError(
                f"replaced-token detection needs an ELECTRA model, got family {config.family!r}: its checkpoints "
                "alone have a head for it"
            )
        config = config.replace(pooler=False)
        generator_config = generator_config or small_config(config, generator_size)
        for name in ("vocab_size", "embedding_size", "max_positions", "type_vocab_size"):
            own, other = getattr(config, name), getattr(generator_config, name)
            if own != other:
                raise ValueError(
                    f"generator and discriminator share their embeddings: {name} must be the same, got {other} "
                    f"and {own}"
                )
        super().__init__(config)
        self.discriminator = Discriminator(config)
        self.generator = MaskedLM(generator_config)
        self._share()

    def forward(
        self, batch: PackedBatch, labels: Tensor | None = None, draws: Tensor | None = None
    ) -> ModelOutput:
        """Args: labels as in ``MaskedLM``; draws: exactly one uniform number a labelled token; both or neither.

        Returns: the loss; without labels the discriminator's logits (total_tokens,).
        """
        if labels is None or draws is None:
            return self.discriminator(batch)
        generator = self.generator
        encoded, table = generator.encode(batch)
        rows = generator.labelled(encoded.last_hidden_state, labels, draws.shape[0])
        samples = sample_tokens(rows.hidden, table, generator.head.bias, draws)
        ids = samples
        if rows.places is not None:
            ids = batch.input_ids.index_copy(0, rows.places, samples)
        read = replace(batch, input_ids=ids)
        replaced = ids != torch.where(labels == IGNORED, batch.input_ids, labels)
        logits = self.discriminator(read).logits
        detection = F.binary_cross_entropy_with_logits(logits.float(), replaced.float())
        parts = {
            "mlm": LossPart(generator.loss(rows, table)),
            "rtd": LossPart(detection, DETECTION_WEIGHT),
        }
        return ModelOutput(loss=weighted_sum(parts), parts=parts)

    @classmethod
    def from_pretrained(cls, path_or_hub_id, *, dtype=torch.float32, **options) -> "Electra":
        """As ``PretrainedModel.from_pretrained``; a checkpoint without the folder "generator" gets a new generator."""
        folder = checkpoint.resolve(path_or_hub_id)
        discriminator = Discriminator.from_pretrained(folder, dtype=dtype, **options)
        inner = folder / GENERATOR_FOLDER
        generator = MaskedLM.from_pretrained(inner, dtype=dtype) if inner.is_dir() else None
        if generator is None:
            generator = MaskedLM(small_config(discriminator.config)).to(dtype)
        with torch.device("meta"):
            model = cls(discriminator.config, generator.config)
        model.discriminator, model.generator = discriminator, generator
        model._share()
        model.tokenizer, model.base = discriminator.tokenizer, discriminator.base
        return model.eval()

    def save_pretrained(self, folder: str | Path) -> None:
        self.discriminator.tokenizer = self.generator.tokenizer = self.tokenizer
        self.discriminator.save_pretrained(folder)
        self.generator.save_pretrained(Path(folder) / GENERATOR_FOLDER)

    def _share(self) -> None:
        own, theirs = (model.encoder.embeddings for model in (self.discriminator, self.generator))
        theirs.word, theirs.position, theirs.token_type = own.word, own.position, own.token_type


def small_config(config: EncoderConfig, size: float = GENERATOR_SIZE) -> EncoderConfig:
    """The configuration of a generator with a share of the width and of the heads, and the same embeddings.

    Raises: ValueError unless ``size`` is in (0, 1].
    """
    if not 0 < size <= 1:
        raise ValueError(f"generator_size must be a share of the width in (0, 1], got {size}")
    heads = max(1, round(config.num_heads * size))
    return config.replace(
        num_heads=heads,
        hidden_size=config.hidden_size // config.num_heads * heads,
        intermediate_size=max(1, config.intermediate_size * heads // config.num_heads),
    )


@torch.no_grad()
def sample_tokens(
    hidden: Tensor, weight: Tensor, bias: Tensor, draws: Tensor, max_bytes: int = 2**26
) -> Tensor:
    """A token of each row's distribution softmax(hidden weight^T + bias), by its cumulative distribution.

    Args:
        hidden: (rows, width); weight: (vocabulary, width); bias: (vocabulary,).
        draws: float64 (rows,), uniform in [0, 1): the tokens are a function of them.
        max_bytes: of the distributions that exist at a time, as logits, probabilities and sums; at least one row is
            always taken.
    Returns: int64 (rows,). Nothing is read back from the device.
    Numerics: softmax in fp32, its sums in float64.
    """
    rows = max(1, max_bytes // (16 * weight.shape[0]))
    tokens = []
    for some, own_draws in zip(hidden.split(rows), draws.split(rows), strict=True):
        probabilities = torch.softmax(linear(some, weight, bias).float(), dim=1)
        cumulative = probabilities.cumsum(1, dtype=torch.float64)
        places = own_draws[:, None] * cumulative[:, -1:]
        found = torch.searchsorted(cumulative, places, right=True).squeeze(1)
        tokens.append(found.clamp(max=weight.shape[0] - 1))
    return torch.cat(tokens)


def _collator(
    tokenizer: Any,
    blocks: Sequence[Sequence[int]],
    seed: int,
    *,
    replacement: str = "uniform",
    unigram_counts: Tensor | None = None,
    **masking: Any,
) -> ElectraCollator:
    if replacement != "uniform":
        raise ValueError(
            f"in replaced-token detection the generator replaces tokens, got replacement {replacement!r}: leave it out"
        )
    masks = MlmCollator(tokenizer, mask_share=1.0, random_share=0.0, seed=seed, **masking)
    return ElectraCollator(masks)


ELECTRA = Objective(Electra, ("full-sentences", "doc-sentences"), _collator, family="electra")
