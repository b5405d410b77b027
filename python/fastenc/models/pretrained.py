"""What every model shares: loading and saving under its family's names, and first weights."""

import re
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fastenc.models import adapter_checkpoint, checkpoint
from fastenc.models.architectures import ARCHITECTURES
from fastenc.models.architectures.base import Names
from fastenc.models.config import LAYER_MIX, EncoderConfig
from fastenc.models.labels import check_labels
from fastenc.models.tokenizers import load_tokenizer, save_tokenizer
from fastenc.nn.scalar_mix import ScalarMix

Model = TypeVar("Model", bound="PretrainedModel")
# Heads of these bear the same names in some families and mean different things.
FINE_TUNED = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForSpanClassification",
)

# Entries of older checkpoints that count from 0 or are 0, which a model makes itself.
BUFFERS = (".position_ids", ".token_type_ids")
# Parameters that fastenc.adapt has added to the encoder.
ADDED = re.compile(r"(^|\.)(adaptations|prompts)\.")


class PretrainedModel(nn.Module):
    """An ``nn.Module`` with a config that loads from and saves to a family's own checkpoint format.

    ``tokenizer`` is the folder's tokenizer (a ``tokenizers.Tokenizer``), or None where there is none; it is
    saved with the model. ``base`` is the folder that the weights came from, if any, and ``first_weights`` names the
    parameters that it did not have. ``loss_ignores_padding`` says that the loss is a mean over the items whose label is
    not -100, whatever else the batch holds. ``task_options`` are those of the task that the model was trained for
    (:mod:`fastenc.tasks`), kept in config.json.
    """

    architecture: ClassVar[str]  # transformers' class name without the family: "ForMaskedLM"
    optional_parts: ClassVar[tuple[str, ...]] = ()  # of the head, that a checkpoint of it may lack
    tokenizer: Any = None
    base: str | None = None
    first_weights: frozenset[str] = frozenset()
    loss_ignores_padding: bool = False

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.task_options: dict[str, Any] = {}

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence."""
        encoder: Any = self._modules.get("encoder", self)
        adapted = getattr(encoder, "adapted", None)
        return self.config.max_positions - (adapted.first_position if adapted is not None else 0)

    def head_names(self) -> dict[str, str]:
        """Parameter or module of the head → the family's full name."""
        return {}

    @classmethod
    def build(
        cls: type[Model], config: EncoderConfig, hf_config: dict[str, Any], **options
    ) -> Model:
        """The model that a checkpoint's configuration describes."""
        return cls(config, **options)

    @classmethod
    def from_pretrained(
        cls: type[Model],
        path_or_hub_id: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        layer_mix: bool | None = None,
        **options,
    ) -> Model:
        """Load a checkpoint of any family of ``fastenc.models.architectures``, in evaluation mode.

        Args:
            path_or_hub_id: folder with config.json and safetensors, or a name on the Hugging Face hub.
            dtype: of the loaded parameters.
            layer_mix: whether the head reads a learned mix of all states (:class:`fastenc.nn.ScalarMix`) or the last
                alone; None: what the checkpoint says.
            options: overrides for the model's constructor, such as ``num_labels``.
        A head that the checkpoint lacks gets first weights; a missing encoder weight is an error.
        Raises: ValueError for an unknown family, a missing, corrupt or incomplete checkpoint, a wrong shape, or one
            that was fine-tuned for another task or other labels.
        """
        folder = checkpoint.resolve(path_or_hub_id)
        values = checkpoint.read_config(folder)
        if layer_mix is not None:
            values = {**values, LAYER_MIX: layer_mix}
        cls.check_task(folder, values)
        if architecture_of(values) == cls.architecture:
            check_labels(folder, values, options)
        if (folder / checkpoint.ADAPTER_CONFIG).exists():
            model = adapter_checkpoint.load(cls, folder, values, dtype, options)
        else:
            model = cls._load(folder, values, dtype, options)
        model.read_beside(folder)
        return model

    @classmethod
    def check_task(cls, folder: Path, hf_config: dict[str, Any]) -> None:
        """Raises: ValueError for a checkpoint that was fine-tuned for another task."""
        stored = architecture_of(hf_config)
        if {stored, cls.architecture} <= {*FINE_TUNED} and stored != cls.architecture:
            raise another_task(cls, folder, hf_config)

    @classmethod
    def _load(
        cls: type[Model],
        folder: Path,
        values: dict[str, Any],
        dtype: torch.dtype,
        options: dict[str, Any],
    ) -> Model:
        """The model that a config.json's ``values`` describe, with the folder's weights."""
        config = EncoderConfig.from_hf(values)
        tensors = _under_present_names(config, checkpoint.read_tensors(folder))
        _check_depth(config, tensors, folder)
        try:
            with torch.device("meta"):
                model = cls.build(config, values, **options)
        except RuntimeError as error:
            raise ValueError(
                f"{folder / checkpoint.CONFIG} describes a model that cannot be built ({error}): is it damaged?"
            ) from error
        state = model._to_canonical(tensors, folder)
        model.load_state_dict(state, strict=False, assign=True)
        missing = [name for name, value in model.named_parameters() if value.is_meta]
        model.first_weights = frozenset(missing)
        optional = ("encoder", *cls.optional_parts)
        lost = [name for name in missing if name.partition(".")[0] not in optional]
        stored = checkpoint.read_config(folder)
        if stored.get(LAYER_MIX):
            lost += [name for name in missing if is_mix(name)]
        if lost and architecture_of(stored) == cls.architecture:
            raise ValueError(
                f"{folder} is incomplete: its config.json says {values['architectures'][0]}, and it lacks the head's "
                f"{', '.join(lost[:3])}. Write the checkpoint again"
            )
        for name, module in model.named_modules():
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                module.to_empty(device="cpu", recurse=False)
                model.init_weights(module, name)
        model.to(dtype)
        if (folder / "tokenizer.json").exists():
            model.tokenizer = load_tokenizer(folder)
        model.base = str(folder.resolve())
        if architecture_of(values) == cls.architecture:
            model.task_options = dict(values.get("task_options") or {})
        return model.eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and the tokenizer, as the family's transformers class reads them.

        With an adaptation in use (:mod:`fastenc.adapt`) only its weights and the head are written, in the place of
        model.safetensors. Each file is replaced as a whole or not at all.
        """
        folder = Path(folder)
        values = {
            **self.config.to_hf(),
            **self.extra_config(),
            "architectures": [self._class_name()],
            "dtype": checkpoint.dtype_name(next(self.parameters()).dtype),
        }
        if self.task_options:
            values["task_options"] = self.task_options
        if adapter_checkpoint.is_adapted(self):
            adapter_checkpoint.write(folder, self)
        else:
            checkpoint.write_tensors(folder, self._tensors())
        checkpoint.write_config(folder, values)
        self.write_beside(folder)
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, folder)

    def _class_name(self) -> str:
        """Of transformers' class whose checkpoint this is."""
        kind = self.config.architecture
        ours = self.architecture
        return kind.class_prefix + (kind.bare_class if ours == "Model" else ours)

    def _tensors(self) -> dict[str, Tensor]:
        """The weights under the family's names."""
        tensors: dict[str, Tensor] = {}
        state = self.state_dict()
        for ours, theirs in self.family_names(with_prefix=self.architecture != "Model").items():
            tensors.update(zip(theirs, state[ours].chunk(len(theirs)), strict=True))
        return self.config.architecture.written(tensors, self.config)

    @classmethod
    def stored_in(cls, folder: Path, hf_config: dict[str, Any]) -> bool:
        """Whether a folder with this config.json holds a model of this class, head and all."""
        return architecture_of(hf_config) == cls.architecture

    def read_beside(self, folder: Path) -> None:
        """Read what the model keeps in files beside the weights and config.json."""

    def write_beside(self, folder: Path) -> None:
        """Write them."""

    def extra_config(self) -> dict[str, Any]:
        """Entries of config.json that belong to the head."""
        return {}

    def init_modules(self, root: nn.Module) -> None:
        """Give ``root``'s modules first weights."""
        for name, module in root.named_modules():
            self.init_weights(module, name)

    def init_weights(self, module: nn.Module, name: str = "") -> None:
        """Give one module first weights: normal as its architecture says by its name, biases 0, norms 1."""
        if isinstance(module, nn.Linear | nn.Embedding):
            kind = self.config.architecture
            std = kind.initial_std(self.config, name.rpartition(".")[2])
            cutoff = kind.initial_cutoff(self.config)
            if cutoff is None:
                nn.init.normal_(module.weight, std=std)
            else:
                nn.init.trunc_normal_(module.weight, std=std, a=-cutoff * std, b=cutoff * std)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, ScalarMix):
            module.reset_parameters()
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)

    def family_names(self, with_prefix: bool) -> dict[str, tuple[str, ...]]:
        """Canonical parameter name → the family's names, whose tensors are stacked."""
        kind = self.config.architecture
        prefix = f"{kind.prefix}." if with_prefix and kind.prefix else ""
        encoder_names = {**kind.names(self.config), "mix": LAYER_MIX}
        head_names = self.head_names()
        table: dict[str, tuple[str, ...]] = {}
        for key in self.state_dict():
            if ADDED.search(key):
                continue
            if key in head_names:
                table[key] = (head_names[key],)
                continue
            module, leaf = key.rsplit(".", 1)
            if module in head_names:
                table[key] = (f"{head_names[module]}.{leaf}",)
                continue
            theirs = encoder_names[module.removeprefix("encoder.")]
            several = (theirs,) if isinstance(theirs, str) else theirs
            table[key] = tuple(f"{prefix}{name}.{leaf}" for name in several)
        return table

    def _to_canonical(self, found: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        kind = self.config.architecture
        state, missing = {}, []
        read: set[str] = set()
        state, heads = self.state_dict(), self.head_names()
        for ours, theirs in self.family_names(with_prefix=False).items():
            absent = [name for name in theirs if name not in found]
            # Not every checkpoint of a family has a pooler, a mix of layers or this head.
            optional = ours in heads or ours.rsplit(".", 1)[0] in heads
            optional = optional or "pooler" in ours or is_mix(ours)
            if absent:
                if not optional:
                    missing += absent
                continue
            rows, *columns = state[ours].shape
            expected = (rows // len(theirs), *columns)
            for name in theirs:
                if found[name].shape != expected:
                    raise ValueError(
                        f"{checkpoint.weights_file(folder)}: {name} has shape {tuple(found[name].shape)}, but "
                        f"config.json asks for {expected}: do the two files belong together?"
                    )
                if not found[name].is_floating_point():
                    raise ValueError(
                        f"{checkpoint.weights_file(folder)}: {name} must be floating point, got {found[name].dtype}: "
                        "write the checkpoint again, without quantization"
                    )
            several = [found[name] for name in theirs]
            state[ours] = torch.cat(several) if len(several) > 1 else several[0]
            read.update(theirs)
        if missing:
            raise ValueError(
                f"{folder} is incomplete: it lacks {_few(missing)}. Write the checkpoint again, or check that "
                "config.json belongs to it"
            )
        encoder = _modules_of_encoder(kind.names(self.config))
        unread = [
            name
            for name in sorted({*found} - read)
            if name.startswith(encoder) and not name.endswith(BUFFERS)
        ]
        if unread:
            raise ValueError(
                f"{checkpoint.weights_file(folder)} has {_few(unread)}, which the model of config.json has not: do the "
                "two files belong together?"
            )
        return state


def is_mix(name: str) -> bool:
    """Whether a parameter is of the encoder's mix of layers."""
    return name.removeprefix("encoder.").startswith("mix.")


def another_task(model: type, folder: Path, hf_config: dict[str, Any]) -> ValueError:
    """The error that a checkpoint's head would not be this model's."""
    return ValueError(
        f"{folder} was fine-tuned for another task: it holds {hf_config['architectures'][0]}, this is "
        f"{model.__name__}. Load it as what it is, or begin from {checkpoint.without_head(folder)}"
    )


def architecture_of(hf_config: dict[str, Any]) -> str:
    """The model class that a config.json names, without the family ("ForMaskedLM"); "" where it names none."""
    names = hf_config.get("architectures") or [""]
    kind = ARCHITECTURES.get(hf_config.get("model_type", ""))
    if kind is None:
        return names[0]
    name = names[0].removeprefix(kind.class_prefix)
    return "Model" if name == kind.bare_class else name


def _under_present_names(config: EncoderConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names that the architecture knows, without the prefix."""
    kind = config.architecture
    prefix = f"{kind.prefix}." if kind.prefix else ""
    plain = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return kind.modernised(plain, config)


def _check_depth(config: EncoderConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    """Compare the number of layers before any is built, which takes as long as config.json wants."""
    kind = config.architecture
    path = kind.layers_path
    if path is None:
        return
    layer = re.compile(rf"{re.escape(path)}\.(\d+)\.")
    found = [int(match[1]) + 1 for match in map(layer.match, tensors) if match]
    if max(found, default=0) != config.num_layers:
        raise ValueError(
            f"{checkpoint.weights_file(folder)} has {max(found, default=0)} layers, but config.json says "
            f"{kind.config_names['num_layers']} {config.num_layers}: do the two files belong together?"
        )


def _modules_of_encoder(names: Names) -> tuple[str, ...]:
    """What the names of an encoder's weights begin with, pooler apart: those that must not be left unread."""
    flat = [
        name
        for ours, theirs in names.items()
        if ours != "pooler"
        for name in ((theirs,) if isinstance(theirs, str) else theirs)
    ]
    return tuple({f"{name.split('.')[0]}." for name in flat if "." in name})


def _few(names: list[str]) -> str:
    """The first of some names, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
