"""How weights change: which parameters decay, which optimizer, and the learning rate at each step."""

import math

import torch
from torch import Tensor, nn

from config.schema import OptimConfig
from distributed import slice_like, whole


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Every parameter once: matrices, embeddings too, decay; norm gains and biases do not. A tied one counts once."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101), Muon, or plain SGD; the rate of each step is set before it by `set_learning_rate`."""
    groups = parameter_groups(model, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    if config.name == "muon":
        scale = config.matrix_learning_rate / config.learning_rate
        return Muon(model, groups, lr=config.learning_rate, betas=config.betas, scale=scale)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)


class Muon(torch.optim.Optimizer):
    """Muon for the matrices inside the blocks, AdamW for all else (kellerjordan.github.io/posts/muon).

    Muon moves a matrix along its gradient's momentum with all singular values made nearly one; `scale` is its learning
    rate over AdamW's. Unlike `torch.optim.Muon` it takes all matrices of one shape together, which is faster.
    """

    def __init__(self, model: nn.Module, groups: list[dict], lr: float, betas: tuple[float, float], scale: float):
        hidden = {m.weight for m in model.modules() if isinstance(m, nn.Linear)} - {model.lm_head.weight}
        matrices = [p for group in groups for p in group["params"] if p in hidden]
        rest = [{**group, "params": [p for p in group["params"] if p not in hidden]} for group in groups]
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, fused=True)
        super().__init__([{**groups[0], "params": matrices, "scale": scale}], {"lr": lr * scale, "fused": True})
        self.param_groups += self.adamw.param_groups
        self.adamw.state = self.state  # and the groups are shared: to whoever saves or sets rates it is one optimizer

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.adamw.step()
        group = self.param_groups[0]
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for (n_row, n_column), matrices in by_shape.items():
            gradients = [p.grad for p in matrices]
            momenta = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in matrices]
            torch._foreach_mul_(momenta, MOMENTUM)
            torch._foreach_add_(momenta, gradients)
            ahead = torch._foreach_add(gradients, momenta, alpha=MOMENTUM)  # Nesterov's
            directions = orthogonalise(torch.stack([whole(matrix) for matrix in ahead])).to(matrices[0].dtype)
            slices = [slice_like(direction, p) for direction, p in zip(directions, matrices, strict=True)]
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, slices, alpha=-group["lr"] * math.sqrt(max(1, n_row / n_column)))


MOMENTUM = 0.95


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearly the orthogonal factors of (n, rows, columns), bfloat16: five steps of a quintic Newton-Schulz iteration,
    whose coefficients send every singular value to somewhere between 0.7 and 1.2."""
    x = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    x = x.bfloat16()
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


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
