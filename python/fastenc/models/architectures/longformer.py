"""Longformer: RoBERTa with attention in a window, and global tokens that see all and are seen by all.

Global tokens attend by projections of their own. The batch says which tokens are global. If it does not, the heads for
classes of sequences and for questions choose them.
Source: Beltagy et al. 2020, arXiv:2004.05150.
"""

from dataclasses import replace
from typing import Any

from fastenc.models.architectures.names import BERT_CONFIG, Names
from fastenc.models.architectures.roberta import Roberta
from fastenc.models.architectures.values import ID, Rule
from fastenc.nn.layer_spec import LayerSpec

WINDOW = "attention_window"


def is_width(value: Any) -> bool:
    return type(value) is int and value > 0 and value % 2 == 0


class Longformer(Roberta):
    name = "longformer"
    class_prefix = "Longformer"
    prefix = "longformer"
    # Its heads take the dropout of the hidden states.
    config_names = {
        ours: key for ours, key in BERT_CONFIG.items() if ours != "classifier_dropout_p"
    }
    rules = {
        WINDOW: Rule(
            "an even integer above 0, or a list of one for each layer",
            lambda value: (
                is_width(value) or (isinstance(value, list) and all(map(is_width, value)))
            ),
        ),
        "sep_token_id": ID,
    }

    def check_supported(self, values: dict[str, Any]) -> None:
        super().check_supported(values)
        windows, layers = values.get(WINDOW), values.get("num_hidden_layers")
        if isinstance(windows, list) and layers is not None and len(windows) != layers:
            raise ValueError(
                f"config.json: {WINDOW} must have a number for each of the {layers} layers, got {len(windows)}: is the "
                "file damaged?"
            )

    def new_extra(self, max_positions: int) -> dict[str, Any]:
        return {WINDOW: min(512, max(2, max_positions // 4 * 2))}

    def layer(self, config, number: int) -> LayerSpec:
        """``attention_window`` counts the tokens on both sides together."""
        plain, given = super().layer(config, number), config.extra.get(WINDOW, 512)
        side = (given[number] if isinstance(given, list) else given) // 2
        attention = replace(plain.attention, window=(side, side), global_attention=True)
        return replace(plain, attention=attention)

    def layer_lists(self, config) -> dict[str, list[int]]:
        given = config.extra.get(WINDOW)
        return {WINDOW: given} if isinstance(given, list) else {}

    def separator(self, config) -> int:
        return int(config.extra.get("sep_token_id", 2))

    def names(self, config) -> Names:
        of_globals: Names = {
            f"layers.{i}.global_qkv": tuple(
                f"encoder.layer.{i}.attention.self.{name}_global"
                for name in ("query", "key", "value")
            )
            for i in range(config.num_layers)
        }
        return {**super().names(config), **of_globals}

    def dropout_names(self, config) -> dict[str, str]:
        """Attention's dropout is a number in the configuration, not a module."""
        names = super().dropout_names(config)
        return {name: path for name, path in names.items() if not name.endswith(".attention")}
