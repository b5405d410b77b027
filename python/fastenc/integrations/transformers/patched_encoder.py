"""A patched transformers model as an :class:`fastenc.Encoder`: our calls on packed batches, its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fastenc.integrations.transformers.live_embeddings import tables_of
from fastenc.integrations.transformers.live_encoder import FrozenOwner, LiveEncoder
from fastenc.integrations.transformers.live_layer import LiveLayer
from fastenc.integrations.transformers.live_reading import Reading
from fastenc.models.adapters.adaptation_state import AdaptationState
from fastenc.models.adapters.adapter_checkpoint import is_adapted, remove
from fastenc.models.encoder import Encoder
from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.embeddings import AddedRows, embed, normalised_words
from fastenc.nn.evaluation_mode import trains
from fastenc.nn.frozen_layers import FrozenLayers
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.layer_weights import LayerWeights
from fastenc.nn.stack import StackModules, StackSpec
from fastenc.packing import PackedBatch
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import without_limits

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PatchedEncoder(Encoder):
    """An encoder that reads its weights from a patched transformers model in every call.

    It computes what every :class:`fastenc.Encoder` computes: packed batches, ``encode``, ``embed_words``,
    :mod:`fastenc.analysis`, CUDA graphs. The weights, the mode (training or evaluation) and the gradients are the
    model's. Weights that change in the model change here. What ``fastenc.adapt`` adds belongs to this object: calls of
    the model itself do not compute it, until a LoRA is merged into the weights.
    """

    def __init__(
        self, model: "PreTrainedModel", live: LiveEncoder, tokenizer: TokenizerLike | None = None
    ):
        nn.Module.__init__(self)
        self.model, self.live, self.tokenizer = model, live, tokenizer
        self.config, self.frozen = live.config, live.frozen
        self.mix, self.sentence, self.adapted = None, None, AdaptationState()
        self.task_options = {}
        self.base = getattr(model.config, "name_or_path", None) or None
        count = live.config.architecture.layer_modules(live.config)
        self.layers = nn.ModuleList(PatchedLayer(self._live_layer, i) for i in range(count))

    @property
    def training(self) -> bool:
        return self.model.training if "model" in self._modules else False

    @training.setter
    def training(self, mode: bool) -> None:
        """The mode is the model's: ``train`` and ``eval`` set it there."""

    @property
    def stack(self) -> StackSpec:  # type: ignore[override]
        return self.live.stack

    @property
    def embeddings(self) -> "LiveEmbeddings":  # type: ignore[override]
        return LiveEmbeddings(self.live, self._read())

    @property
    def first_norm(self) -> Any:  # type: ignore[override]
        return self._read().modules.get("first_norm")

    @property
    def output_projection(self) -> Any:  # type: ignore[override]
        return self._read().modules.get("output_projection")

    @property
    def relative_positions(self) -> Any:  # type: ignore[override]
        return self._read().modules.get("relative_positions")

    @property
    def position_norm(self) -> Any:  # type: ignore[override]
        return self._read().modules.get("position_norm")

    @property
    def convolution(self) -> Any:  # type: ignore[override]
        modules = self._read().modules
        parts = [modules.get(f"convolution.{name}") for name in ("conv", "norm")]
        return nn.ModuleList(part for part in parts if part is not None)

    @property
    def relative_biases(self) -> nn.ModuleList:  # type: ignore[override]
        modules = self._read().modules
        tables = [module for name, module in modules.items() if name.startswith("relative_biases.")]
        return nn.ModuleList(table for table in tables if table is not None)

    def _live_layer(self, index: int) -> LiveLayer:
        return self._read().layers[index]

    def _stack_modules(self, frozen: FrozenLayers | None = None) -> StackModules:
        reading = self._read()
        modules = reading.stack_modules(frozen)
        added = [layer.adapted() for layer in self.layers if isinstance(layer, PatchedLayer)]
        if not any(added):
            return modules
        for adaptation in added:
            if adaptation is not None and adaptation.training != self.training:
                adaptation.train(self.training)
        pairs = zip(reading.layers, added, strict=True)
        return modules._replace(layers=[layer.with_added(each) for layer, each in pairs])

    def layer_weights(self) -> list[tuple[LayerWeights, LayerSpec]]:
        return FrozenOwner(self.model, self.live).layer_weights()

    def position_rows(self) -> Tensor | None:
        return FrozenOwner(self.model, self.live).position_rows()

    def layer_adaptations(self) -> list[LayerAdaptation | None]:
        return FrozenOwner(self.model, self.live).layer_adaptations()

    @property
    def pooler(self) -> Any:  # type: ignore[override]
        return getattr(self.model, "pooler", None)

    def _through_pooler(self, states: Tensor) -> Tensor:
        return self.live.architecture.live_pooled(self.model, states[:, None])

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the adaptation in use, as every :class:`fastenc.Encoder` does; without one, the model itself."""
        if is_adapted(self):
            super().save_pretrained(folder)
            return
        self.model.save_pretrained(folder)
        has_peft_adapter = getattr(self.model, "_hf_peft_config_loaded", False)
        if not has_peft_adapter:  # the model has just written it
            remove(Path(folder))
        self._write_tokenizer(Path(folder))

    def family_names(self, with_prefix: bool) -> dict[str, tuple[str, ...]]:
        """No names: the parameters are the live model's, under its own names, and there is no head of ours."""
        return {}

    def _read(self) -> Reading:
        reading = self.live.read(self.model)
        reason = reading.unsupported_reason or reading.weight_difference()
        if reason is not None:
            raise ValueError(
                f"an encoder of a patched model needs the fused forward, got {type(self.model).__name__}, which runs "
                f"its own forward, because {reason}: undo that"
            )
        # As in encode(), which has no dropout in either mode.
        no_dropout = self.training and not trains(self.model)
        return reading.without_dropout() if no_dropout else reading


class PatchedLayer(nn.Module):
    """The adaptations of one layer of a patched model, in the form in which :class:`EncoderLayer` has them.

    Args:
        live: returns the layer of the live model with this index.
    """

    def __init__(self, live: Callable[[int], LiveLayer], index: int):
        super().__init__()
        self._live, self._index = live, index
        self.adaptations = nn.ModuleDict()
        self.adaptation: str | None = None

    def weights(self) -> LayerWeights:
        return self._live(self._index).weights()

    def adapted(self) -> LayerAdaptation | None:
        """The modules of the adaptation in use, or None."""
        if self.adaptation is None:
            return None
        added = self.adaptations[self.adaptation]
        assert isinstance(added, LayerAdaptation)
        return added

    def requires_grad_(self, requires_grad: bool = True) -> "PatchedLayer":
        self._live(self._index).module.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)


class LiveEmbeddings:
    """The embeddings of a live model, called as :class:`fastenc.nn.embeddings.Embeddings` is."""

    def __init__(self, live: LiveEncoder, reading: Reading):
        self.live, self.reading = live, reading
        self.word = reading.modules["embeddings.word"]
        self.position = reading.modules.get("embeddings.position")

    def __call__(
        self,
        batch: PackedBatch,
        tied_weight: bool = False,
        first_position: int = 0,
        added: AddedRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        types = self.reading.modules.get("embeddings.token_type")
        one_type = types is None or types.weight.shape[0] == 1
        x, table = embed(
            self.live.embeddings,
            tables_of(self.reading),
            batch.input_ids,
            position_ids=None if self.position is None else batch.position_ids,
            position_offset=self.live.config.position_offset + first_position,
            token_type_ids=None if one_type else batch.token_type_ids,
            cu_seqlens=batch.cu_seqlens,
            dropout_p=self.reading.embedding_dropout_p,
            added=added,
        )
        return x, table if tied_weight else None

    def normalised(self, rows: Tensor) -> Tensor:
        """:meth:`fastenc.nn.embeddings.Embeddings.normalised`"""
        return normalised_words(self.live.embeddings, tables_of(self.reading), rows)

    def requires_grad_(self, requires_grad: bool = True) -> "LiveEmbeddings":
        for name, module in self.reading.modules.items():
            if name.startswith("embeddings.") and module is not None:
                module.requires_grad_(requires_grad)
        return self


def backend_of(tokenizer: Any) -> TokenizerLike:
    """A ``tokenizers.Tokenizer`` without padding and truncation, from one or from transformers' fast tokenizer."""
    return without_limits(getattr(tokenizer, "backend_tokenizer", tokenizer))
