"""The states of an encoder: the output of its embeddings, and of each layer."""

from collections.abc import Callable, Sequence

from torch import Tensor

from fastenc.models.embedding.encoder_like import EncoderLike
from fastenc.packing import PackedBatch


def resolve_layers(layers: Sequence[int], num_layers: int, name: str = "layers") -> list[int]:
    """The numbers of the states, from 0 (the embeddings' output) to num_layers.

    Args:
        layers: numbers of states; negative ones count from the last.
        name: the argument or option that gave them, for error messages.
    Raises: ValueError for an empty list, a state that does not exist, or one that is given twice.
    """
    for layer in layers:
        if not -num_layers - 1 <= layer <= num_layers:
            raise ValueError(
                f"{name} must be from 0 (the embeddings' output) to the model's {num_layers}, or -1 to "
                f"{-num_layers - 1} from the last, got {layer}"
            )
    taken = [layer % (num_layers + 1) for layer in layers]
    if not taken or len(set(taken)) < len(taken):
        raise ValueError(
            f"{name} must name at least one layer, and none of them twice, got {list(layers)}: correct it"
        )
    return taken


def visit_states(
    encoder: EncoderLike,
    batch: PackedBatch,
    layers: Sequence[int],
    visit: Callable[[int, Tensor], None],
) -> None:
    """Run the encoder and call ``visit(layer, state)`` with each state of ``layers`` as soon as it is computed.

    Args:
        layers: numbers of states, 0 for the embeddings' output.
        visit: takes a state's number and the state (total_tokens, hidden_size), which it must not change.
    """
    wanted = set(layers)

    def visit_wanted(layer: int, state: Tensor) -> None:
        if layer in wanted:
            visit(layer, state)

    encoder(batch, visit=visit_wanted, pooled=False)
