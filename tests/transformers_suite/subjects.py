"""For each family a TestCase with transformers' tests, whose models are patched when they are made.

Encoder-decoders have two: of the encoder alone, and of the whole models.
"""

import inspect
import unittest
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from unittest import mock

import torch
from transformers import PreTrainedModel

import fastenc
from fastenc.integrations.transformers.encoder_decoder import architecture_of
from tests.helpers.families import (
    BY_NAME,
    ENCODER_DECODERS,
    START_TOKENS,
    config,
    modeling_module,
    padded_batch,
)

_WHOLE = ", whole"
SUBJECTS = (*BY_NAME, *(family + _WHOLE for family in ENCODER_DECODERS))


class ModelTester:
    """What the tests need of a subject: a small configuration and a padded batch."""

    batch_size, seq_length, num_choices = 3, 7, 4

    def __init__(self, subject: str):
        self.family = subject.removesuffix(_WHOLE)
        self.is_encoder_decoder = subject.endswith(_WHOLE)
        entry = BY_NAME[self.family]
        has_heads = not entry.no_heads or bool(entry.heads)
        self.is_training = self.is_encoder_decoder or has_heads  # the encoder alone has no loss
        settings = self.get_config()
        self.num_hidden_layers = settings.num_hidden_layers
        self.num_attention_heads = settings.num_attention_heads
        self.hidden_size = settings.hidden_size

    def get_config(self):
        if self.is_encoder_decoder:
            start = START_TOKENS[self.family]
            return config(self.family, decoder_start_token_id=3 if start is None else start)
        changes = {} if self.is_training else {"is_encoder_decoder": False}
        return config(self.family, **changes)

    def prepare_config_and_inputs_for_common(self):
        settings, inputs = self.get_config(), padded_batch(self.family, (7, 4, 5))
        if self.family == "longformer":  # its class for questions wants three in each text
            inputs["input_ids"][:, 1:4] = settings.sep_token_id
        if (
            self.is_encoder_decoder
        ):  # its class for sequences reads the end token, of which each text has one
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            ids[ids == settings.eos_token_id] = 5
            ids[torch.arange(len(ids)), mask.sum(1) - 1] = settings.eos_token_id
            inputs |= {"decoder_input_ids": ids.clone(), "decoder_attention_mask": mask}
        return settings, inputs


@cache
def case_of(subject: str, mixin: type) -> type[unittest.TestCase]:
    """transformers' tests on every class of the subject that ``patch`` accepts."""

    def __init__(self, name):
        unittest.TestCase.__init__(self, name)
        self.model_tester = ModelTester(subject)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = mixin._prepare_for_class(self, inputs_dict, model_class, return_labels)
        return inputs | _labels(model_class, inputs) if return_labels else inputs

    members = {
        "__init__": __init__,
        "_prepare_for_class": _prepare_for_class,
        "all_model_classes": _classes(subject),
    }
    return type(subject, (mixin, unittest.TestCase), members)


def _labels(model_class: type, inputs: dict) -> dict:
    """Labels that the mixin does not provide, and -100 at padding where the loss would need the model's own forward."""
    mask, taken = inputs["attention_mask"], inspect.signature(model_class.forward).parameters
    labels = {
        name: torch.zeros(len(mask), dtype=torch.long)
        for name in ("next_sentence_label", "sentence_order_label")
        if name in taken
    }
    if "labels" in taken:
        given = inputs.get("labels", torch.zeros_like(mask))
        labels["labels"] = (
            given.masked_fill(mask == 0, -100) if given.shape == mask.shape else given
        )
    return labels


def _classes(subject: str) -> tuple[type, ...]:
    settings = ModelTester(subject).get_config()
    module = modeling_module(settings)
    classes = filter(inspect.isclass, vars(module).values())
    own = (model_class for model_class in classes if model_class.__module__ == module.__name__)
    models = (k for k in own if issubclass(k, PreTrainedModel) and k.config_class is not None)
    # A class of another configuration, such as that of Gemma 3 with images, would be loaded in its default size.
    models = (k for k in models if isinstance(settings, k.config_class))
    models = (k for k in models if _is_patched(k, settings))
    whole = subject.endswith(_WHOLE)
    return tuple(k for k in models if whole == (architecture_of(k(settings)) is not None))


def _is_patched(model_class: type, settings) -> bool:
    try:
        fastenc.patch(model_class(settings))
    except (ValueError, AttributeError, TypeError, NotImplementedError, IndexError):
        # Another family's class, a decoder, an abstract class, or a whole model whose configuration is the encoder's.
        return False
    return True


@contextmanager
def patched(classes: tuple[type, ...]) -> Iterator[None]:
    """A context in which every model of ``classes`` is patched when it is constructed or loaded."""
    with ExitStack() as stack:
        for model_class in classes:
            stack.enter_context(
                mock.patch.object(model_class, "__init__", _constructs(model_class))
            )
            stack.enter_context(
                mock.patch.object(model_class, "from_pretrained", _loads(model_class))
            )
        yield


def _constructs(model_class: type):
    own = model_class.__init__

    @wraps(own)  # patch reads its signature
    def __init__(self, *arguments, **options):
        own(self, *arguments, **options)
        # Without values it is a step of loading, or made by patch itself for comparison.
        if type(self) is model_class and not any(p.is_meta for p in self.parameters()):
            fastenc.patch(self)

    return __init__


def _loads(model_class: type):
    own = model_class.from_pretrained

    def from_pretrained(*arguments, **options):
        loaded = own(*arguments, **options)
        fastenc.patch(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    return from_pretrained
