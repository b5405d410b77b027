"""Replaced-token detection (ELECTRA): a small masked LM replaces tokens, and the model detects the replacements."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._base.seeds import derive_seed
from fastenc.models import Encoder, EncoderConfig, LossTerm, MaskedLM, ModelOutput, checkpoint
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.layer import activate_plain
from fastenc.objectives.base import Objective
from fastenc.objectives.loss_terms import weighted_sum
from fastenc.objectives.mlm import MlmCollator
from fastenc.ops.activation import ACTIVATIONS
from fastenc.ops.gemm import linear
from fastenc.ops.labelled import IGNORED
from fastenc.packing import ModelArguments, PackedBatch
from fastenc.text.tokenizers import TokenizerLike

DETECTION_WEIGHT = 50.0
GENERATOR_SIZE = 0.25
GENERATOR_FOLDER = "generator"


class ElectraCollator:
    """Replaces all selected tokens by the mask token, and draws the random numbers with which the generator samples.

    As in the paper, the generator sees none of the tokens that it predicts. (The released code leaves 15 % of them
    unchanged.)

    Args:
        mlm_collator: made with ``mask_share=1, random_share=0``.
    Raises: ValueError for an ``mlm_collator`` with another mask_share.
    Source: Clark et al. 2020, arXiv:2003.10555.
    """

    def __init__(self, mlm_collator: MlmCollator):
        if mlm_collator.mask_share != 1:
            raise ValueError(
                "every selected token must become the mask token, got mask_share "
                f"{mlm_collator.mask_share}: give an MlmCollator with mask_share=1, random_share=0"
            )
        self.mlm_collator = mlm_collator

    def __call__(self, sequences: Sequence[Sequence[int]], step: int) -> ModelArguments:
        """The model's arguments.

        Returns: {"batch" and "labels" as ``MlmCollator`` makes them,
            "uniform_samples": float64 (labelled tokens,), in [0, 1)}.
        """
        masked = self.mlm_collator(sequences, step)
        generator = torch.Generator().manual_seed(
            derive_seed(self.mlm_collator.seed, step, "samples")
        )
        labelled = masked.pop("max_labels")
        samples = torch.rand(labelled, generator=generator, dtype=torch.float64)
        return {**masked, "uniform_samples": samples}

    def items(self, arguments: ModelArguments) -> dict[str, int]:
        """Number of items that each term is a mean over, see :func:`fastenc.objectives.loss_terms.count_items`."""
        return {
            "mlm": len(arguments["uniform_samples"]),
            "rtd": arguments["batch"].total_tokens,
        }


class Discriminator(PretrainedModel):
    """ELECTRA's discriminator: for each token the logit that it was replaced, act(hidden W + b) w + c.

    Its checkpoints are those of transformers' ElectraForPreTraining.
    """

    architecture = "ForPreTraining"

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.encoder = Encoder(config.replace(pooler=False))
        width = config.hidden_size
        self.dense, self.out = nn.Linear(width, width), nn.Linear(width, 1)
        self.init_weights(self.dense)
        self.init_weights(self.out)

    def forward(self, batch: PackedBatch) -> ModelOutput:
        """Returns: logits (total_tokens,); positive for a token that is predicted to be replaced."""
        hidden = self.encoder(batch).last_hidden_state
        inner = linear(hidden, self.dense.weight)
        inner = activate_plain(inner, self.dense.bias, ACTIVATIONS[self.config.activation])
        return ModelOutput(logits=self.out(inner).squeeze(1))

    def head_names(self) -> dict[str, str]:
        prefix = "discriminator_predictions"
        return {"dense": f"{prefix}.dense", "out": f"{prefix}.dense_prediction"}


class Electra(PretrainedModel):
    """Generator and discriminator, which share their word, position and token-type embeddings.

        loss = mean masked-LM loss of the generator
             + 50 × mean over all tokens of the discriminator's binary cross-entropy

    The discriminator reads the text with the generator's samples in place of the masked tokens. A sample that equals
    the original token counts as not replaced. No gradient flows through the sampling. ``save_pretrained`` writes the
    discriminator as ElectraForPreTraining, and the generator as ElectraForMaskedLM into the folder "generator".

    As in the paper, each network has a separate LayerNorm after the shared embeddings. (The released code also shares
    the LayerNorm.)

    Args:
        config: of the discriminator; its family must be "electra".
        generator_config: of the generator; None derives it from ``config`` (:func:`small_config`).
        generator_size: the generator's width and number of heads, as a share of the discriminator's.
    Raises: ValueError for another family, for embeddings of different sizes, and for a ``generator_size`` outside
        (0, 1].
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
                f"replaced-token detection needs an ELECTRA model, got family {config.family!r}: only ELECTRA "
                "checkpoints have the head for it"
            )
        config = config.replace(pooler=False)
        generator_config = generator_config or small_config(config, generator_size)
        for name in ("vocab_size", "embedding_size", "max_positions", "type_vocab_size"):
            ours, theirs = getattr(config, name), getattr(generator_config, name)
            if ours != theirs:
                raise ValueError(
                    f"generator and discriminator share their embeddings, so they must have the same {name}, got "
                    f"{theirs} and {ours}: give both the same value"
                )
        super().__init__(config)
        self.discriminator = Discriminator(config)
        self.generator = MaskedLM(generator_config)
        self._share()

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        uniform_samples: Tensor | None = None,
    ) -> ModelOutput:
        """Predict and sample the labelled tokens, and detect the replaced ones.

        Args:
            labels: int64 (total_tokens,), -100 where not masked.
            uniform_samples: float64 (labelled tokens,), in [0, 1).
        Returns: the loss and its terms; if one of the two arguments is None, the discriminator's logits
            (total_tokens,).
        """
        if labels is None or uniform_samples is None:
            return self.discriminator(batch)
        generator = self.generator
        encoded, table = generator.encode(batch)
        rows = generator.labelled(encoded.last_hidden_state, labels, uniform_samples.shape[0])
        bias = generator.head.bias
        assert bias is not None  # ELECTRA's head always has a bias
        samples = sample_tokens(rows.hidden, table, bias, uniform_samples)
        ids = samples
        if rows.indices is not None:
            ids = batch.input_ids.index_copy(0, rows.indices, samples)
        replaced = ids != torch.where(labels == IGNORED, batch.input_ids, labels)
        logits = self.discriminator(replace(batch, input_ids=ids)).logits
        detection = F.binary_cross_entropy_with_logits(logits.float(), replaced.float())
        terms = {
            "mlm": LossTerm(generator.loss(rows, table)),
            "rtd": LossTerm(detection, DETECTION_WEIGHT),
        }
        return ModelOutput(loss=weighted_sum(terms), terms=terms)

    @classmethod
    def from_pretrained(cls, path_or_hub_id, *, dtype=torch.float32, **options) -> "Electra":
        """Like ``PretrainedModel.from_pretrained``. If there is no folder "generator", its weights are random."""
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
        """Write the discriminator into the folder, and the generator into its subfolder "generator"."""
        self.discriminator.tokenizer = self.generator.tokenizer = self.tokenizer
        self.discriminator.save_pretrained(folder)
        self.generator.save_pretrained(Path(folder) / GENERATOR_FOLDER)

    def _share(self) -> None:
        source, target = (m.encoder.embeddings for m in (self.discriminator, self.generator))
        target.word, target.position = source.word, source.position
        target.token_type = source.token_type


def small_config(config: EncoderConfig, size: float = GENERATOR_SIZE) -> EncoderConfig:
    """The generator's configuration: ``size`` times the width and the number of heads, and the same embeddings.

    Raises: ValueError unless ``size`` is in (0, 1].
    """
    if not 0 < size <= 1:
        raise ValueError(
            f"generator_size must be in (0, 1], got {size}: give a share of the discriminator's width, such as 0.25"
        )
    heads = max(1, round(config.num_heads * size))
    return config.replace(
        num_heads=heads,
        hidden_size=config.hidden_size // config.num_heads * heads,
        intermediate_size=max(1, config.intermediate_size * heads // config.num_heads),
    )


@torch.no_grad()
def sample_tokens(
    hidden: Tensor, weight: Tensor, bias: Tensor, uniform_samples: Tensor, max_bytes: int = 2**26
) -> Tensor:
    """Sample a token for each row from softmax(hidden weight^T + bias), by inverting the cumulative distribution.

    Args:
        hidden: (rows, width).
        weight: (vocabulary, width).
        bias: (vocabulary,).
        uniform_samples: float64 (rows,), in [0, 1). No other random numbers are used.
        max_bytes: limit of the logits, probabilities and cumulative sums that exist at a time. At least one row is
            computed at a time.
    Returns: int64 (rows,). The host does not wait for the device.
    Numerics: the softmax is in float32, its cumulative sums are in float64.
    """
    rows = max(1, max_bytes // (16 * weight.shape[0]))
    tokens = []
    for hidden_rows, samples in zip(hidden.split(rows), uniform_samples.split(rows), strict=True):
        probabilities = torch.softmax(linear(hidden_rows, weight, bias).float(), dim=1)
        cumulative = probabilities.cumsum(1, dtype=torch.float64)
        thresholds = samples[:, None] * cumulative[:, -1:]
        sampled = torch.searchsorted(cumulative, thresholds, right=True).squeeze(1)
        tokens.append(sampled.clamp(max=weight.shape[0] - 1))
    return torch.cat(tokens)


def _collator(
    tokenizer: TokenizerLike,
    blocks: Sequence[Sequence[int]],
    seed: int,
    *,
    replacement: str = "uniform",
    unigram_counts: Tensor | None = None,
    **masking: Any,
) -> ElectraCollator:
    if replacement != "uniform":
        raise ValueError(
            "replacement must be uniform, the default, because in replaced-token detection the generator replaces "
            f"tokens, got {replacement!r}: leave it out"
        )
    collator = MlmCollator(tokenizer, mask_share=1.0, random_share=0.0, seed=seed, **masking)
    return ElectraCollator(collator)


ELECTRA = Objective(Electra, ("full-sentences", "doc-sentences"), _collator, family="electra")
