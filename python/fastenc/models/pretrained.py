"""The base class of all models: loading and saving of checkpoints, and weight initialisation."""

import inspect
import warnings
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn

from fastenc._base.json_values import JsonObject
from fastenc.models import checkpoint
from fastenc.models.adapters import adapter_checkpoint
from fastenc.models.architectures import ARCHITECTURES
from fastenc.models.checkpoint_names import CheckpointNames, check_depth, is_mix, with_constants
from fastenc.models.config import LAYER_MIX, EncoderConfig
from fastenc.models.labels import check_labels
from fastenc.nn.frozen_copies import INT8, copies_in
from fastenc.nn.frozen_weights import FrozenWeights
from fastenc.nn.layer_norm import OffsetRMSNorm
from fastenc.nn.scalar_mix import ScalarMix
from fastenc.packing import PackedBatch
from fastenc.text.tokenizer_files import find_tokenizer, save_tokenizer
from fastenc.text.tokenizer_like import TokenizerLike

Model = TypeVar("Model", bound="PretrainedModel")
# Fine-tuned heads. Some families use the same weight names in several of them, for different purposes.
FINE_TUNED = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForSpanClassification",
)


class PretrainedModel(CheckpointNames):
    """An ``nn.Module`` with a config, which is loaded from and saved to checkpoints in transformers' format.

    Attributes:
        tokenizer: the folder's ``tokenizers.Tokenizer``, or None; saved with the model.
        tokenizer_length: the longest text in tokens that the folder names for it, or None.
        base: the folder that the weights were loaded from, or None.
        first_weights: names of the parameters that the folder did not have and that were initialised.
        loss_ignores_padding: whether the loss is a mean over the items whose label is not -100, so that padding items
            with that label do not change it.
        keeps_tasks: whether the model keeps a checkpoint's adaptations for tasks (:meth:`Architecture.tasks`).
        task_options: options of the task that the model was trained for (:mod:`fastenc.tasks`), stored in config.json.
        optional_parts: submodules that a checkpoint of this class may lack.
    """

    optional_parts: ClassVar[tuple[str, ...]] = ()
    tokenizer: TokenizerLike | None = None
    tokenizer_length: int | None = None
    base: str | None = None
    first_weights: frozenset[str] = frozenset()
    loss_ignores_padding: bool = False
    keeps_tasks: ClassVar[bool] = False

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.task_options: JsonObject = {}

    @property
    def positions(self) -> int:
        """The largest number of tokens of a sequence."""
        adapted = getattr(self._encoder(), "adapted", None)
        return self.config.max_positions - (adapted.first_position if adapted is not None else 0)

    def encoder_batch(self, batch: PackedBatch) -> PackedBatch:
        """The batch as the model gives it to its encoder: a head may choose the global tokens."""
        return batch

    def _encoder(self) -> Any:
        return self._modules.get("encoder", self)

    def _frozen(self) -> FrozenWeights | None:
        return getattr(self._encoder(), "frozen", None)

    @property
    def in_8_bits(self) -> bool:
        """Whether the encoder's layers are frozen in int8 (:func:`fastenc.freeze`)."""
        frozen = self._frozen()
        return frozen is not None and frozen.in_8_bits

    # These ask before a module is changed, not when the encoder's turn comes.
    def train(self: Model, mode: bool = True) -> Model:
        frozen = self._frozen()
        if mode and frozen is not None:
            frozen.require_weights("train()")
        return super().train(mode)

    def _apply(self, fn, recurse: bool = True):
        frozen = self._frozen()
        if frozen is not None:
            frozen.check_move(fn)
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        frozen = self._frozen()
        if frozen is not None:
            frozen.require_weights("load_state_dict")
        super()._load_from_state_dict(*arguments, **options)

    def own_tokenizer(self) -> TokenizerLike:
        """The model's tokenizer. Raises: ValueError for a model without one."""
        if self.tokenizer is None:
            raise ValueError(
                "the model must have a tokenizer, got none: load it from a folder with a tokenizer.json"
            )
        return self.tokenizer

    @classmethod
    def build(cls: type[Model], config: EncoderConfig, hf_config: JsonObject, **options) -> Model:
        """A new model as a checkpoint's configuration describes it; ``options`` override the configuration."""
        return cls(config, **options)

    @classmethod
    def from_pretrained(
        cls: type[Model],
        path_or_hub_id: str | Path,
        *,
        dtype: torch.dtype | str = torch.float32,
        layer_mix: bool | None = None,
        **options,
    ) -> Model:
        """Load a checkpoint of any family of ``fastenc.models.architectures``, in evaluation mode.

        Args:
            path_or_hub_id: folder with config.json and safetensors, or a name on the Hugging Face hub.
            dtype: dtype of the model's parameters, or its name, such as "bfloat16". "int8": float32, with the layers'
                weights in 8 bits only, as :func:`fastenc.freeze` makes them. Such a model computes on a CPU without
                gradients; it cannot be trained or saved.
            layer_mix: whether the head reads a learned mix of all states (:class:`fastenc.nn.ScalarMix`) or the last
                state only. None: as the checkpoint says.
            options: arguments of the model's constructor that override the checkpoint's, such as ``num_labels``.
        A head that is not in the checkpoint is initialised; a missing weight of the encoder is an error.
        Raises: ValueError for an unknown family, a missing, corrupt or incomplete checkpoint, a weight of a wrong
            shape, a tokenizer with more tokens than embeddings, a checkpoint that was fine-tuned for another task or
            other labels, an unknown option, or a dtype that there is not. For "int8" also what :func:`fastenc.freeze`
            says.
        """
        cls._check_options(options)
        if dtype != INT8:
            dtype = checkpoint.checked_dtype(dtype)
        folder = checkpoint.resolve(path_or_hub_id)
        values = checkpoint.read_config(folder)
        if layer_mix is not None:
            values = {**values, LAYER_MIX: layer_mix}
        cls.check_task(folder, values)
        if architecture_of(values) == cls.architecture:
            check_labels(folder, values, options)
        plain = dtype if isinstance(dtype, torch.dtype) else torch.float32
        if (folder / checkpoint.ADAPTER_CONFIG).exists():
            model = adapter_checkpoint.load(cls, folder, values, plain, options)
        else:
            model = cls._load(folder, values, plain, options)
        model.read_beside(folder)
        if dtype == INT8:
            for owner, frozen in copies_in(model):
                frozen.replace_weights(owner)
            # The loaded parameters keep the whole file in memory.
            copy_parameters(model)
        return model

    @classmethod
    def _option_names(cls) -> list[str]:
        """The constructor's arguments that :meth:`from_pretrained` takes."""
        _, _, *names = inspect.signature(cls.__init__).parameters
        return names

    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> None:
        known = cls._option_names()
        unknown = [name for name in options if name not in known]
        if unknown:
            remedy = (
                "call .to(device) on the loaded model" if "device" in unknown else "leave it out"
            )
            raise ValueError(
                f"{cls.__name__}.from_pretrained has the options {', '.join(['dtype', 'layer_mix', *known])}, got "
                f"{', '.join(unknown)}: {remedy}"
            )

    @classmethod
    def check_task(cls, folder: Path, hf_config: JsonObject) -> None:
        """Raise ValueError for a checkpoint that was fine-tuned for another task."""
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
        tensors = cls.by_current_names(config, checkpoint.read_tensors(folder), folder)
        lora_of_tasks = config.architecture.take_lora(config, tensors)
        if not cls.keeps_tasks:
            keys = config.architecture.task_keys
            extra = {key: value for key, value in config.extra.items() if key not in keys}
            config = config.replace(extra=extra)
        check_depth(config, tensors, folder)
        config = with_constants(config, cls.constant_tensors(config), tensors, folder)
        try:
            with torch.device("meta"):
                model = cls.build(config, values, **options)
        # A size of more than 64 bits is a TypeError of torch.
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"{folder / checkpoint.CONFIG} describes a model that cannot be built ({error}): is it damaged?"
            ) from error
        state = model._to_canonical(tensors, folder)
        model.load_state_dict(state, strict=False, assign=True)
        missing = [name for name, value in model.named_parameters() if value.is_meta]
        model.first_weights = frozenset(missing)
        cls._check_head(missing, folder)
        for name, module in model.named_modules():
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                module.to_empty(device="cpu", recurse=False)
                model.init_weights(module, name)
        model.to(dtype)
        model._read_tokenizer(folder)
        model.base = str(folder.resolve())
        if cls.keeps_tasks:
            adapter_checkpoint.add_tasks(model, lora_of_tasks, folder)
        if architecture_of(values) == cls.architecture:
            model.task_options = dict(values.get("task_options") or {})
        return model.eval()

    @classmethod
    def _check_head(cls, missing: list[str], folder: Path) -> None:
        """Raise ValueError for a checkpoint of this class that lacks weights of its head, or of its mix of layers.

        Args: missing: the names of the parameters that the checkpoint lacks.
        """
        optional = ("encoder", *cls.optional_parts)
        lost = [name for name in missing if name.partition(".")[0] not in optional]
        stored = checkpoint.read_config(folder)
        if stored.get(LAYER_MIX):
            lost += [name for name in missing if is_mix(name)]
        if lost and architecture_of(stored) == cls.architecture:
            raise ValueError(
                f"{folder} is incomplete: its config.json says {stored['architectures'][0]}, and it lacks the head's "
                f"{', '.join(lost[:3])}: write the checkpoint again"
            )

    def _read_tokenizer(self, folder: Path) -> None:
        """Take the folder's tokenizer, if it has one, and the length of texts that it names."""
        self.tokenizer = _tokenizer_of(folder, self.config)
        self.tokenizer_length = checkpoint.tokenizer_length(folder)
        if self.tokenizer is None:
            return
        _check_tokenizer(self.tokenizer, self.config.vocab_size, folder)
        if checkpoint.cuts_on_the_left(folder):
            warnings.warn(
                f"{folder / checkpoint.TOKENIZER_CONFIG} cuts longer texts at their start, fastenc cuts them at "
                "their end",
                stacklevel=4,
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and the tokenizer in the format of the family's transformers class.

        If an adaptation is in use (:mod:`fastenc.adapt`), files with its weights and the head's are written instead of
        model.safetensors. Without one, such files of an earlier model in the folder are removed. Each file is written
        atomically.
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
        adapted = adapter_checkpoint.is_adapted(self)
        if adapted:
            adapter_checkpoint.write(folder, self)
        else:
            checkpoint.write_tensors(folder, self._tensors())
        checkpoint.write_config(folder, values)
        if not adapted:
            adapter_checkpoint.remove(folder)
        self.write_beside(folder)
        self._write_tokenizer(folder)

    def _write_tokenizer(self, folder: Path) -> None:
        if self.tokenizer is not None:
            save_tokenizer(
                self.tokenizer,
                folder,
                # If the model has one type, transformers cannot look up that of the second text.
                token_types=self.config.type_vocab_size != 1,
                max_length=self.tokenizer_length or self.positions,
            )

    def _class_name(self) -> str:
        """The name of transformers' class for this model."""
        return self.config.architecture.class_name(self.architecture)

    @classmethod
    def stored_in(cls, folder: Path, hf_config: JsonObject) -> bool:
        """Whether a folder with this config.json holds a model of this class with its head."""
        return architecture_of(hf_config) == cls.architecture

    def read_beside(self, folder: Path) -> None:
        """Read the model's further files, beside the weights and config.json."""

    def write_beside(self, folder: Path) -> None:
        """Write the model's further files."""

    def extra_config(self) -> JsonObject:
        """The entries of config.json for the head."""
        return {}

    def init_modules(self, root: nn.Module) -> None:
        """Initialise the weights of all modules of ``root``."""
        for name, module in root.named_modules():
            self.init_weights(module, name)

    def init_weights(self, module: nn.Module, name: str = "") -> None:
        """Initialise one module: weights normally distributed (the architecture gives the standard deviations for the
        module's name), biases 0, norms 1 or the architecture's factor. A module on the meta device stays as it is; see
        :class:`fastenc.nn.embedding_table.EmbeddingTable`."""
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            return
        architecture = self.config.architecture
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d):
            stds = architecture.initial_stds(self.config, name)
            cutoff = architecture.initial_cutoff(self.config)
            for std, part in zip(
                stds, self.parts(f"{name}.weight", module.weight.detach(), len(stds)), strict=True
            ):
                if cutoff is None:
                    nn.init.normal_(part, std=std)
                else:
                    nn.init.trunc_normal_(part, std=std, a=-cutoff * std, b=cutoff * std)
            zero = architecture.initial_zero_row(self.config, name)
            if zero is not None:
                nn.init.zeros_(module.weight.detach()[zero])
        elif isinstance(module, OffsetRMSNorm):
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.constant_(module.weight, architecture.initial_norm(self.config))
        elif isinstance(module, ScalarMix):
            module.reset_parameters()
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)


def copy_parameters(model: nn.Module) -> None:
    """Give every parameter memory of its own. A loaded one lies in the mapped file, at any address."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def another_task(model: type, folder: Path, hf_config: JsonObject) -> ValueError:
    """The error for a checkpoint whose head is of another task than the model's."""
    return ValueError(
        f"{folder} was fine-tuned for another task: it holds {_class_names(hf_config)[0]}, this is "
        f"{model.__name__}: load it with the model of its task, or begin from {checkpoint.without_head(folder)}"
    )


def architecture_of(hf_config: JsonObject) -> str:
    """The model class that a config.json names, without the family ("ForMaskedLM"); "" if it names none."""
    name = (_class_names(hf_config) or [""])[0]
    family = ARCHITECTURES.get(str(hf_config.get("model_type", "")))
    return name if family is None else family.head_of(name)


def _class_names(hf_config: JsonObject) -> list[str]:
    return cast(list[str], hf_config.get("architectures") or [])


def _tokenizer_of(folder: Path, config: EncoderConfig) -> TokenizerLike | None:
    """The folder's tokenizer, or None. The file of a family with a ``word_splitter`` lacks that step: it gives None."""
    splitter, settings = config.architecture.word_splitter, folder / "tokenizer_config.json"
    if splitter is not None:
        if not (folder / "tokenizer.json").exists():
            return None
        given = checkpoint.read_json(settings).get("tokenizer_class") if settings.exists() else None
        if given is None or str(given).startswith(config.architecture.class_prefix):
            warnings.warn(
                f"the model has no tokenizer: {folder / 'tokenizer.json'} lacks the split into words by {splitter}. "
                "Make token ids with transformers' tokenizer",
                stacklevel=5,
            )
            return None
    return find_tokenizer(folder)


def _check_tokenizer(tokenizer: TokenizerLike, rows: int, folder: Path) -> None:
    """Raise ValueError for tokens without an embedding. Special tokens may lack one: ordinary texts do not contain
    them, and published checkpoints have such (BART's mask token)."""
    added = tokenizer.get_added_tokens_decoder()
    lacking = [
        tokenizer.id_to_token(number)
        for number in range(rows, tokenizer.get_vocab_size())
        if not (number in added and added[number].special)
    ]
    if lacking:
        raise ValueError(
            f"{folder}: the tokenizer's ids must be below {rows}, config.json's vocab_size, got {len(lacking)} tokens "
            f"with larger ones, such as {lacking[0]!r}: take the tokenizer that the model was trained with, or add "
            "rows with transformers' resize_token_embeddings"
        )
