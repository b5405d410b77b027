"""Replaced-token detection (ELECTRA): a small masked LM replaces tokens, and the model detects the replacements."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._base.seeds import derive_seed
from fastenc.models import (
    Discriminator,
    EncoderConfig,
    LossTerm,
    MaskedLM,
    ModelOutput,
    checkpoint,
)
from fastenc.models.pretrained import PretrainedModel
from fastenc.objectives.base import Objective
from fastenc.objectives.loss_terms import weighted_sum
from fastenc.objectives.mlm import MlmCollator
from fastenc.ops.gemm import linear
from fastenc.ops.labelled import IGNORED
from fastenc.packing import ModelArguments, PackedBatch
from fastenc.text.tokenizer_like import TokenizerLike

DETECTION_WEIGHT = 50.0
GENERATOR_SIZE = 0.25
GENERATOR_FOLDER = "generator"
# How the discriminator's embeddings depend on the generator's.
SHARED, DISENTANGLED = "shared", "gradient-disentangled"
SHARING = "embedding_sharing"  # key in config.json
DELTA_FOLDER = "embedding_delta"
TABLES = ("word", "position", "token_type")


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


class DisentangledEmbedding(nn.Module):
    """Embeddings E_D = stop_grad(E_G) + delta: the gradient of the discriminator's loss reaches ``delta`` alone.

    Args:
        source: the generator's embeddings E_G; their weight is read in every call.
        delta: the shape of E_G; None: zeros.
    Source: He et al. 2021, arXiv:2111.09543, section 3.3.
    """

    def __init__(self, source: nn.Embedding, delta: Tensor | None = None):
        super().__init__()
        # A tuple, so that it is not registered as a submodule: it belongs to the generator.
        self._source = (source,)
        weight = source.weight.detach()
        self.delta = nn.Parameter(torch.zeros_like(weight) if delta is None else delta)
        self.num_embeddings, self.padding_idx = source.num_embeddings, source.padding_idx

    @property
    def weight(self) -> Tensor:
        return self._source[0].weight.detach() + self.delta


class Electra(PretrainedModel):
    """Generator and discriminator, and how they share their word, position and token-type embeddings.

        loss = mean masked-LM loss of the generator
             + 50 × mean over all tokens of the discriminator's binary cross-entropy

    The discriminator reads the text with the generator's samples in place of the masked tokens. A sample that equals
    the original token counts as not replaced. No gradient flows through the sampling. ``save_pretrained`` writes the
    discriminator, with its embeddings, as ElectraForPreTraining (DeBERTa: see :class:`Discriminator`), and the
    generator as the family's ForMaskedLM into the folder "generator".

    As in the paper, each network has a separate LayerNorm after the shared embeddings. (The released code also shares
    the LayerNorm.)

    Args:
        config: of the discriminator; its family must have a head for replaced tokens (ELECTRA, DeBERTa).
        generator_config: of the generator; None derives it from ``config`` (:func:`small_config`).
        generator_size: the generator's width and number of heads, as a share of the discriminator's.
        generator_layers: its number of layers; None: the discriminator's.
        embedding_sharing: "shared": one table for both; "gradient-disentangled": :class:`DisentangledEmbedding`. None:
            what the configuration says, or "shared".
    Raises: ValueError for a family without a head for replaced tokens, for embeddings of different sizes, for a
        ``generator_size`` outside (0, 1], and for another ``embedding_sharing``.
    Source: Clark et al. 2020, arXiv:2003.10555; He et al. 2021, arXiv:2111.09543.
    """

    def __init__(
        self,
        config: EncoderConfig,
        generator_config: EncoderConfig | None = None,
        *,
        generator_size: float = GENERATOR_SIZE,
        generator_layers: int | None = None,
        embedding_sharing: str | None = None,
    ):
        sharing = embedding_sharing or config.extra.get(SHARING, SHARED)
        if sharing not in (SHARED, DISENTANGLED):
            raise ValueError(
                f"embedding_sharing must be {SHARED} or {DISENTANGLED}, got {sharing!r}"
            )
        stored = {key: value for key, value in config.extra.items() if key != SHARING}
        config = config.replace(pooler=False, extra=stored)
        if generator_config is None:
            generator_config = small_config(config, generator_size, generator_layers)
        if sharing == DISENTANGLED:
            config = config.replace(extra={**stored, SHARING: DISENTANGLED})
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
        rows, table, _ = generator.encode_labelled(batch, labels, uniform_samples.shape[0])
        bias = generator.head.bias
        assert bias is not None  # the heads of the families that have a detector
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
        inner, changes = folder / GENERATOR_FOLDER, folder / DELTA_FOLDER
        generator = MaskedLM.from_pretrained(inner, dtype=dtype) if inner.is_dir() else None
        if generator is None:
            generator = MaskedLM(small_config(discriminator.config)).to(dtype)
        with torch.device("meta"):
            model = cls(discriminator.config, generator.config)
        model.discriminator, model.generator = discriminator, generator
        if model.disentangled and changes.is_dir():
            model._share(checkpoint.read_tensors(changes))
        elif model.disentangled:
            model._share(model._differences())
        else:
            model._share()
        model.tokenizer, model.base = discriminator.tokenizer, discriminator.base
        # Without a folder "generator", all but the tables that it shares.
        of_generator = generator.first_weights
        if not inner.is_dir():
            of_generator = frozenset(name for name, _ in generator.named_parameters())
        model.first_weights = frozenset(
            f"{part}.{name}"
            for part, names in (
                ("discriminator", discriminator.first_weights),
                ("generator", of_generator),
            )
            for name in names
        )
        return model.eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the discriminator into the folder, and the generator into its subfolder "generator".

        For gradient-disentangled embeddings, the subfolder "embedding_delta" has their deltas to the last bit.
        """
        self.discriminator.tokenizer = self.generator.tokenizer = self.tokenizer
        with self._plain_tables() as deltas:
            self.discriminator.save_pretrained(folder)
        self.generator.save_pretrained(Path(folder) / GENERATOR_FOLDER)
        if deltas:
            checkpoint.write_tensors(Path(folder) / DELTA_FOLDER, deltas)

    @property
    def disentangled(self) -> bool:
        return self.config.extra.get(SHARING, SHARED) == DISENTANGLED

    def _tables(self) -> Iterator[tuple[str, Any, Any]]:
        """(name, the generator's table, the discriminator's) of the tables that there are."""
        ours, theirs = (m.encoder.embeddings for m in (self.generator, self.discriminator))
        for name in TABLES:
            if getattr(ours, name) is not None:
                yield name, getattr(ours, name), getattr(theirs, name)

    def _share(self, deltas: Mapping[str, Tensor] | None = None) -> None:
        for name, ours, theirs in list(self._tables()):
            if self.disentangled:
                added = DisentangledEmbedding(ours, None if deltas is None else deltas[name])
                setattr(self.discriminator.encoder.embeddings, name, added)
            else:
                setattr(self.generator.encoder.embeddings, name, theirs)

    def _differences(self) -> dict[str, Tensor]:
        """The deltas with which the discriminator's tables stay as they are."""
        tables = self._tables()
        return {name: (theirs.weight - ours.weight).detach() for name, ours, theirs in tables}

    @contextmanager
    def _plain_tables(self) -> Iterator[dict[str, Tensor]]:
        """Inside the block the discriminator has plain embeddings. Gives the deltas of those that have one."""
        tables, embeddings = list(self._tables()), self.discriminator.encoder.embeddings
        added = {n: theirs for n, _, theirs in tables if isinstance(theirs, DisentangledEmbedding)}
        for name, table in added.items():
            plain = nn.Embedding.from_pretrained(table.weight.detach(), freeze=False)
            setattr(embeddings, name, plain)
        try:
            yield {name: table.delta for name, table in added.items()}
        finally:
            for name, table in added.items():
                setattr(embeddings, name, table)


def small_config(
    config: EncoderConfig, size: float = GENERATOR_SIZE, layers: int | None = None
) -> EncoderConfig:
    """The generator's configuration: ``size`` times the width and the number of heads, and the same embeddings.

    Args: layers: its number of layers; None: as many.
    Raises: ValueError unless ``size`` is in (0, 1], and for fewer than one layer.
    """
    if layers is not None and layers < 1:
        raise ValueError(f"generator_layers must be at least 1, got {layers}")
    if not 0 < size <= 1:
        raise ValueError(
            f"generator_size must be in (0, 1], got {size}: give a share of the discriminator's width, such as 0.25"
        )
    heads = max(1, round(config.num_heads * size))
    return config.replace(
        num_heads=heads,
        num_layers=layers or config.num_layers,
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
