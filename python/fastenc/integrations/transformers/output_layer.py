"""The output layer of a patched encoder-decoder, which ``generate`` computes for the next token of every target."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastenc.integrations.transformers import base_model
from fastenc.integrations.transformers.hooks import forward_reason
from fastenc.integrations.transformers.live_model import weight_difference
from fastenc.integrations.transformers.lora import base_linear
from fastenc.integrations.transformers.patch_state import PatchState

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def output_layer_of(model: Any) -> nn.Linear | None:
    """The output layer of an encoder-decoder with a loss, without LoRA; None: it is of another class."""
    head = base_linear(model.lm_head)
    return head if type(head) is nn.Linear else None


class OutputLayerOwner:
    """Gives :class:`fastenc.nn.frozen_head.FrozenHead` the weight of a patched encoder-decoder's output layer."""

    def __init__(self, model: "PreTrainedModel"):
        self._model = model

    def output_weight(self) -> Tensor:
        """Raises: ValueError if the output layer has LoRA, or it or its weight is of another class."""
        head: Any = self._model.lm_head
        if type(head) is not nn.Linear:
            home = type(head).__module__
            raise ValueError(
                "the output layer of the model cannot run in int8: it must be a torch.nn.Linear, without LoRA, got "
                f"{home}.{type(head).__name__}: merge the LoRA, or leave out dtype"
            )
        reason = weight_difference(head, head.weight.shape)
        if reason is not None:
            raise ValueError(
                f"the output layer of the model cannot run in int8: {reason}: leave out dtype"
            )
        return head.weight


def output_layer_forward(
    head: Any, state: PatchState, arguments: dict[str, Any], plain: Callable[..., Any]
) -> Any:
    """The logits of any number of tokens: by our product in inference on a CPU, else by the own forward."""
    x: Any = arguments.get("input")
    if not _is_ours(x, head):
        return plain(**arguments)
    logits = state.frozen.linear(x.flatten(0, -2), head.weight, head.bias)
    return logits.unflatten(0, x.shape[:-1])


def _is_ours(x: Any, head: nn.Linear) -> bool:
    if type(x) is not Tensor or torch.is_grad_enabled() or forward_reason(head) is not None:
        return False
    if base_model.inputs_reason(head, {"inputs_embeds": x}) is not None:
        return False
    weight = head.weight
    if x.device.type != "cpu" or (x.dtype, x.device) != (weight.dtype, weight.device):
        return False
    return x.dim() > 1 and weight_difference(head, torch.Size((len(weight), x.shape[-1]))) is None
