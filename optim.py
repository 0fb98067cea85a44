"""How weights change: which parameters decay, which optimizer, and the learning rate at each step."""

import math

import torch
from torch import nn

from config.schema import OptimConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Every parameter once: matrices, embeddings too, decay; norm gains and biases do not. A tied one counts once."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) or plain SGD; the learning rate is set before each step by `set_learning_rate`."""
    groups = parameter_groups(model, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of optimizer step `step` (from 0) in a run of `steps`.

    Warm-up rises linearly from above zero and reaches `learning_rate` exactly, at step `warmup_steps` - 1. Then cosine
    falls along half a wave, wsd stays and falls linearly over the last `decay_fraction` of all steps, noam falls with
    1/sqrt(step) ("Attention Is All You Need", 5.3, with the peak given), and none goes below `min_learning_rate`.
    """
    warm = min(config.warmup_steps, steps)
    if step < warm:
        return config.learning_rate * ((step + 1) / warm)  # the last share is exactly one
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "noam":
        share = math.sqrt(max(warm, 1) / (step + 1))
    elif config.schedule == "wsd":
        share = (steps - step) / (steps * config.decay_fraction)
    else:
        share = 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))
    share = min(max(share, 0.0), 1.0)
    if config.schedule == "noam":
        return max(config.learning_rate * share, config.min_learning_rate)
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * share
