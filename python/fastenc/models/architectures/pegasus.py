"""Encoders and decoders of Pegasus: mBART's without a norm after the embeddings, and with positions that are not
trained. Source: Zhang et al. 2019, arXiv:1912.08777.
"""

from torch import Tensor

from fastenc.models.architectures.bart import MBart
from fastenc.models.architectures.names import Names
from fastenc.models.architectures.sinusoids import sinusoids

POSITIONS = "embed_positions"


class Pegasus(MBart):
    name = "pegasus"
    class_prefix = "Pegasus"
    defaults = {"eps": 1e-5, "pad_token_id": 0, "position_offset": 0}
    new_config = MBart.new_config | {"pad_token_id": 0, "position_offset": 0}
    start_token_id = 0
    eos_token_id = 1

    def embedding_norm(self, config) -> None:
        return None

    def padding_idx(self, config) -> int:
        return config.pad_token_id  # the first token of a target

    def fixed_positions(self, config) -> Tensor:
        return sinusoids(config.max_positions, config.hidden_size)

    def constant_values(self, config) -> dict[str, Tensor]:
        return {f"{POSITIONS}.weight": self.fixed_positions(config)}

    def names(self, config) -> Names:
        names = super().names(config)
        del names["embeddings.norm"]
        return names
