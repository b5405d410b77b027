"""Encoders and decoders of M2M100 and NLLB: Pegasus's, with positions that begin after the padding token's row.

Sources: Fan et al. 2020, arXiv:2010.11125; NLLB Team 2022, arXiv:2207.04672 (dense models).
"""

from torch import Tensor

from fastenc.models.architectures.bart import LAYERDROPS
from fastenc.models.architectures.marian import POSITIONS
from fastenc.models.architectures.pegasus import Pegasus
from fastenc.models.architectures.sinusoids import tensor2tensor_sinusoids
from fastenc.models.architectures.values import ConfigValues

MORE_ROWS = 2  # rows of the position table beyond max_position_embeddings
LENGTH = "max_position_embeddings"


class M2M100(Pegasus):
    name = "m2m_100"
    class_prefix = "M2M100"
    positions_after_padding = True
    grows_positions = True
    defaults = {"eps": 1e-5, "pad_token_id": 1}
    new_config = Pegasus.new_config | {
        "pad_token_id": 1,
        "position_offset": 2,
        "activation": "relu",
    }
    eos_token_id = 2
    target_start = "end"
    # Older files have the table, which follows from the configuration.
    unread = tuple(f"{part}{POSITIONS}." for part in ("", "encoder.", "decoder."))

    def read(self, values: ConfigValues) -> ConfigValues:
        return super().read(values | {LENGTH: values[LENGTH] + MORE_ROWS})

    def write(self, config) -> ConfigValues:
        rows = config.max_positions + config.position_offset
        # transformers' default is 0.05.
        layerdrops = {name: config.extra.get(name, 0.0) for name in LAYERDROPS}
        return super().write(config) | layerdrops | {LENGTH: rows - MORE_ROWS}

    def takes_inputs_embeds(self, config) -> bool:
        return True  # transformers' table of words scales its own vectors alone

    def embedding_scale(self, config) -> float:
        return config.hidden_size**0.5 if config.extra.get("scale_embedding", True) else 1.0

    def fixed_positions(self, config) -> Tensor:
        rows = config.max_positions + config.position_offset
        return tensor2tensor_sinusoids(rows, config.hidden_size, config.pad_token_id)

    def constant_values(self, config) -> dict[str, Tensor]:
        return {}  # transformers writes no position table

    def has_logits_bias(self, config) -> bool:
        return False
