"""Encoders and decoders of Pegasus: Marian's in mBART's order of norms. Source: Zhang et al. 2019, arXiv:1912.08777."""

from fastenc.models.architectures.bart import MBart
from fastenc.models.architectures.marian import Marian


class Pegasus(Marian, MBart):
    name = "pegasus"
    class_prefix = "Pegasus"
    whole_class = MBart.whole_class
    defaults = Marian.defaults | {"pad_token_id": 0}
    supported = MBart.supported
    eos_token_id = 1
