"""Encoders and decoders of Marian (the translators of OPUS-MT): BART's without a norm after the embeddings, and with
positions that are not trained. Source: Junczys-Dowmunt et al. 2018, arXiv:1804.00344.
"""

from torch import Tensor

from fastenc.models.architectures.bart import Bart
from fastenc.models.architectures.names import Names
from fastenc.models.architectures.sinusoids import sinusoids
from fastenc.models.architectures.values import ConfigValues

POSITIONS = "embed_positions"


class Marian(Bart):
    name = "marian"
    class_prefix = "Marian"
    whole_class = "MTModel"
    defaults = {"eps": 1e-5, "pad_token_id": 58100, "position_offset": 0}
    new_config = Bart.new_config | {"pad_token_id": 0, "position_offset": 0}
    supported = Bart.supported | {"share_encoder_decoder_embeddings": True}
    eos_token_id = 0
    target_start = "padding"

    def embedding_norm(self, config) -> None:
        return None

    def takes_inputs_embeds(self, config) -> bool:
        # transformers' decoder scales given vectors, too.
        return not config.is_decoder or self.embedding_scale(config) == 1.0

    def padding_idx(self, config) -> int:
        return config.pad_token_id

    def write(self, config) -> ConfigValues:
        # What is missing, transformers takes from OPUS-MT's.
        return super().write(config) | {"decoder_start_token_id": self.decoder_start(config)}

    def fixed_positions(self, config) -> Tensor:
        return sinusoids(config.max_positions, config.hidden_size)

    def constant_values(self, config) -> dict[str, Tensor]:
        return {f"{POSITIONS}.weight": self.fixed_positions(config)}

    def names(self, config) -> Names:
        names = super().names(config)
        del names["embeddings.norm"]
        return names
