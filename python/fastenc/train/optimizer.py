"""AdamW with its parameter groups, and the learning rate of each step."""

import re
from typing import cast

import torch
from torch import nn

from fastenc.models.adapters.adaptations import method_in_use
from fastenc.models.checkpoint_names import is_mix
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.adamw import adamw
from fastenc.train.config import LR_FACTORS, TrainConfig

# Factor on the learning rate of the mix of layers (a learned weighted sum). Adam changes a parameter by about the
# learning rate in a step. The logits of the weights have to differ by about 1 before the weights differ much. With the
# encoder's learning rate, all layers would still have about the same weight at the end of a run. The learning rate of
# an adaptation is already LR_FACTORS times the encoder's; with both factors, one layer would get all the weight in a
# few steps.
MIX_LR_SCALE = 100.0


def parameter_groups(model: nn.Module, weight_decay: float, layer_decay: float = 1.0) -> list[dict]:
    """The groups of trained parameters, as arguments of AdamW.

    Matrices have ``weight_decay``. Biases and norm weights, which have fewer than two dimensions, have none.

    A group's learning rate is multiplied by ``lr_scale``. It is ``layer_decay`` ** (L - l) for layer l of L, where the
    embeddings, their LoRA and a prompt are l = 0 and everything above the layers is l = L. It is MIX_LR_SCALE for the
    mix of layers, divided by the factor that the learning rate of the model's adaptation has.
    Source: Howard and Ruder 2018, arXiv:1801.06146, section 3.2.
    """
    depths = {name: _depth(name) for name, _ in model.named_parameters()}
    top = max((depth for depth in depths.values() if depth is not None), default=0)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        depth = depths[name]
        below = 0 if depth is None or layer_decay == 1.0 else top - depth
        scale = _mix_lr_scale(model) if is_mix(name) else layer_decay**below
        groups.setdefault((scale, parameter.dim() >= 2), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay if is_matrix else 0.0,
            "lr_scale": scale,
        }
        for (scale, is_matrix), parameters in groups.items()
    ]


def _mix_lr_scale(model: nn.Module) -> float:
    return MIX_LR_SCALE / LR_FACTORS[method_in_use(cast(PretrainedModel, model))]


def _depth(name: str) -> int | None:
    """0 for parameters below the layers, i + 1 for those of layer i, None for those above the layers or in all."""
    if match := re.search(r"\blayers?\.(\d+)\.", name):
        return int(match[1]) + 1
    if re.search(r"\bconvolution\.", name):  # after layer 0
        return 1
    # The head of the span-boundary objective has a first_norm too.
    below = r"(?<!\bboundary\.)\b(embeddings|first_norm\.|relative_positions\.|position_norm\.)"
    added = r"\badapted\.(prompts|parts\.\w+\.(word|token_type))\."
    return 0 if re.search(f"{below}|{added}", name) else None


def build_optimizer(
    model: nn.Module, config: TrainConfig, device: torch.device | None = None
) -> torch.optim.AdamW:
    """AdamW for the model's trained parameters, with fused kernels.

    In bfloat16 on a GPU it is :class:`fastenc.nn.adamw.AdamW`, which spares the forward the casts of the weights and
    has the same state. With graphs or shards it is torch's: a graph would not notice that a weight was changed.

    Args: device: where the steps will run; None: the device of the parameters.
    Raises: ValueError if no parameter is trained.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
    """
    groups = parameter_groups(model, config.weight_decay, config.layer_decay)
    if not groups:
        raise ValueError(
            "there is nothing to train, every parameter has requires_grad=False: freeze fewer layers"
        )
    whole = config.parallel != "fsdp" and not config.graph
    return adamw(
        groups,
        next(model.parameters()).device if device is None else device,
        torch.bfloat16 if config.precision == "bf16" and whole else None,
        lr=config.learning_rate or 0.0,
        betas=config.betas,
        eps=config.adam_eps,
    )


def lr_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """The learning rate at optimiser step ``step`` (from 0), as a share of the peak: linear warm-up, linear decay."""
    if step < warmup_steps:
        return step / warmup_steps
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
