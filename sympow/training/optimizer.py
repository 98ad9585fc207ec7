"""The optimizer of a run, and the learning rate as a function of the step alone."""

import math
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from sympow.layers.base import Mixer
from sympow.models.bodies import Block
from sympow.training.config import TrainingConfig
from sympow.training.muon import Muon

LEAST_SIDE = 64  # of a matrix that Muon moves; smaller ones are maps to a few numbers, or of low rank


def learning_rate(step: int, config: TrainingConfig, stage_start: int = 0) -> float:
    """Returns the learning rate of optimizer step `step` (0-based): linear warmup, then the schedule of the config.

    The rate rises over `warmup_steps` steps to `learning_rate`, which the last of these steps uses. Then it falls to
    `min_lr_ratio * learning_rate`, which the last step of the run uses, unless the schedule is "constant". If a later
    stage of the run starts at step `stage_start`, the rate rises again from near 0 to the schedule over the same number
    of steps.
    """
    if stage_start and step - stage_start < config.warmup_steps:
        return learning_rate(stage_start + config.warmup_steps, config) * (step - stage_start + 1) / config.warmup_steps
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    falling = max(1, config.steps - config.warmup_steps)
    if config.schedule == "wsd":
        falling = config.decay_steps or max(1, min(falling, config.steps // 10))
    progress = min(1.0, max(0.0, (step + 1 - config.steps + falling) / falling))
    if config.schedule == "constant" or progress == 0:
        return config.learning_rate
    above = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * above)


def muon_weights(model: nn.Module) -> list[tuple[nn.Parameter, list[int]]]:
    """Returns the weights that Muon moves, each with the rows of the matrices in it, see `Mixer.fused`.

    They are the weights of linear layers (`nn.Linear`) within blocks, with at least 64 rows and columns, that are
    trained. The layers of an adapter (LoRA of the package PEFT) are left out. A shared weight occurs once.
    """
    found: dict[nn.Parameter, list[int]] = {}
    for block in (module for module in model.modules() if isinstance(module, Block)):
        modules = dict(block.named_modules())
        fused = {
            f"{prefix}.{name}".removeprefix("."): rows
            for prefix, module in modules.items()
            if isinstance(module, Block | Mixer)
            for name, rows in module.fused().items()
        }
        adapters = tuple(f"{name}." for name, module in modules.items() if hasattr(module, "base_layer"))
        for name, module in modules.items():
            if not isinstance(module, nn.Linear) or name.startswith(adapters):
                continue
            weight = module.weight
            if isinstance(weight, nn.Parameter) and weight.requires_grad and min(weight.shape) >= LEAST_SIDE:
                found.setdefault(weight, list(fused.get(name, weight.shape[:1])))
    return list(found.items())


def parameter_groups(model: nn.Module, weight_decay: float, without: Container[nn.Parameter] = ()) -> list[dict]:
    """Returns two AdamW groups: matrices decay; norms, biases and every other vector or scalar do not.

    A parameter that two modules share (a tied head) occurs once. Those in `without` are left out.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and p not in without]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, config: TrainingConfig, **options: Any) -> torch.optim.Optimizer:
    """Makes the optimizer of `model` as `config` says; AdamW is fused where the parameters are on a CUDA device.

    With "muon" the groups are the matrices of `muon_weights`, then the groups of AdamW. `options` are options of AdamW
    that take the place of the config's. A learning rate that is a tensor is read in every step.
    """
    on_cuda = any(p.is_cuda for p in model.parameters())
    own: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "fused": on_cuda}
    options = own | options
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameter_groups(model, config.weight_decay), **options)
    matrices = muon_weights(model)
    others = parameter_groups(model, config.weight_decay, {weight for weight, _ in matrices})
    return Muon(matrices, others, weight_decay=config.weight_decay, rate=config.muon_rate, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
