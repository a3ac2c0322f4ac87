"""The optimizer of a model: AdamW with float32 masters, schedule, accumulation, clipping and a finiteness check."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn

from common.config import OptimizerConfig
from common.weights.names import plain_name

log = logging.getLogger("learner")

MAX_SKIPPED = 3
_MASTER, _STEP = "master.", "step."
_AFTER_UPDATE = ("exp_avg.", "exp_avg_sq.", _STEP)


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
        named = {plain_name(name): tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        self.names, self.parameters = list(named), list(named.values())
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

    # ---------------------------------------------------------------- state

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors themselves, by kind and plain name of the parameter: ``master.<name>`` of those that are not
        float32; ``exp_avg.<name>``, ``exp_avg_sq.<name>`` and ``step.<name>`` of those that have been updated.
        """
        state: dict[str, torch.Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if master is not parameter:
                state[_MASTER + name] = master.detach()
            for kind, tensor in self.optimizer.state.get(master, {}).items():
                state[f"{kind}.{name}"] = tensor
        return state

    def state_names(self) -> tuple[set[str], set[str]]:
        """Names in a state: those of every state, and those that are there after the first update."""
        pairs = zip(self.names, self.parameters, self.masters, strict=True)
        masters = {_MASTER + name for name, parameter, master in pairs if master is not parameter}
        return masters, {kind + name for name in self.names for kind in _AFTER_UPDATE}

    def full_bytes(self) -> int:
        """Size of ``state`` after the first update."""
        masters = sum(m.nbytes for p, m in zip(self.parameters, self.masters, strict=True) if m is not p)
        return masters + sum(2 * master.nbytes + 4 for master in self.masters)

    def load_state(
        self, names: Collection[str], read: Callable[[dict[str, torch.Tensor]], None], skipped_in_row: int
    ) -> None:
        """Becomes what was saved under ``names``: ``read`` fills tensors by their names, in place.

        The parameters themselves have been put back before; gradients are dropped.
        """
        self._drop_gradients()
        for name, master in zip(self.names, self.masters, strict=True):
            if _STEP + name not in names:
                self.optimizer.state.pop(master, None)
            elif not self.optimizer.state.get(master):
                # As AdamW itself makes them in its first, fused step.
                layout = torch.preserve_format
                self.optimizer.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    "exp_avg": torch.zeros_like(master, memory_format=layout),
                    "exp_avg_sq": torch.zeros_like(master, memory_format=layout),
                }
        read(self.state())
        self.skipped_in_row = skipped_in_row

    @torch.no_grad()
    def reset(self) -> None:
        """Becomes a new learner of the parameters as they are now."""
        self._drop_gradients()
        self.optimizer.state.clear()
        self.skipped_in_row = 0
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.copy_(parameter)

    def _drop_gradients(self) -> None:
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None
