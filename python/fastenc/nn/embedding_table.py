"""A table of embeddings."""

from torch import nn


class EmbeddingTable(nn.Embedding):
    """:class:`torch.nn.Embedding` that draws no values on the meta device.

    A model that will be loaded is made on that device. To draw there, torch imports its compiler, which takes as long
    as importing torch.
    """

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()
