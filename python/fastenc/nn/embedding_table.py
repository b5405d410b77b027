"""Tables of embeddings."""

from torch import Tensor, nn


class EmbeddingTable(nn.Embedding):
    """:class:`torch.nn.Embedding` that draws no values on the meta device.

    A model that will be loaded is made on that device. To draw there, torch imports its compiler, which takes as long
    as importing torch.
    """

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class FixedEmbeddingTable(nn.Module):
    """A table that follows from the configuration: it is neither trained nor in the state dict.

    Args: values: (rows, width).
    """

    weight: Tensor

    def __init__(self, values: Tensor):
        super().__init__()
        self.register_buffer("weight", values, persistent=False)
