"""A table of embeddings."""

from torch import nn


class EmbeddingTable(nn.Embedding):
    """:class:`torch.nn.Embedding`, which on the meta device, where a model is made before it is loaded, draws nothing.

    There torch would import its compiler to draw, which takes as long as importing torch.
    """

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()
