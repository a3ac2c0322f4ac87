"""The optimizer of a model: AdamW with float32 masters, schedule, accumulation, clipping and a finiteness check."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import nn

from common.config import OptimizerConfig

log = logging.getLogger("learner")

MAX_SKIPPED = 3


class NonFiniteGradients(Exception):
    """Several updates in a row had gradients that are NaN or infinite."""


@dataclass(frozen=True)
class GradientStep:
    """One optimizer step: global gradient norm before clipping, and whether it was applied."""

    norm: float
    applied: bool


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of PPO step ``step`` (from 1): linear warm-up, then constant, linear or cosine to ``min_ratio``."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    match config.schedule:
        case "constant":
            ratio = 1.0
        case "linear":
            ratio = 1.0 - progress * (1.0 - config.min_ratio)
        case "cosine":
            ratio = config.min_ratio + (1.0 - config.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * ratio


class Learner:
    """Owns the optimizer of a model's trainable parameters.

    Parameters that are not float32 get float32 masters; gradients are accumulated in float32 either way, so that the
    number of micro-batches does not change the result beyond the order of summation.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [
            parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())
            for parameter in self.parameters
        ]
        matrices = [master for master in self.masters if master.ndim >= 2]
        vectors = [master for master in self.masters if master.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.skipped_in_row = 0

    def start_step(self, step: int) -> float:
        """Sets and returns the learning rate of a PPO step."""
        rate = learning_rate(self.config, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def accumulate(self, loss: torch.Tensor) -> None:
        """Adds a micro-batch's share of the gradient."""
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is master or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def apply(self) -> GradientStep:
        """Clips, checks and applies what was accumulated. A gradient that is not finite is dropped and logged.

        Raises NonFiniteGradients after several in a row: the run cannot recover by itself.
        """
        limit = self.config.max_grad_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, limit))
        applied = math.isfinite(norm)
        if applied:
            self.optimizer.step()
            self.skipped_in_row = 0
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)
        else:
            self.skipped_in_row += 1
            log.warning("gradient norm is %s: this optimizer step is skipped (%d in a row)", norm, self.skipped_in_row)
        self.optimizer.zero_grad(set_to_none=True)
        if self.skipped_in_row >= MAX_SKIPPED:
            raise NonFiniteGradients(
                f"{MAX_SKIPPED} optimizer steps in a row had gradients that are not finite: lower learning_rate in the "
                "[optimizer] of this service (trainer or critic), or use model.dtype = 'float32'"
            )
        return GradientStep(norm, applied)
