"""AdamW with weight decay on matrices only, and the learning rate as a function of the step alone."""

import math

import torch
from torch import nn

from sympow.training.config import TrainingConfig


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


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Returns two AdamW groups: matrices decay; norms, biases and every other vector or scalar do not.

    A parameter that two modules share (a tied head) occurs once.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Makes AdamW over `model` as `config` says; fused where the parameters are on a CUDA device."""
    on_cuda = any(p.is_cuda for p in model.parameters())
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=config.betas,
        fused=on_cuda,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
