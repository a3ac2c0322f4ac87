"""One rank of a group that saves or loads a sharded state: ``python -m tests.unit.checkpoint_rank`` (gloo, CPU)."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from common.checkpoints.reader import StateReader
from common.checkpoints.staging import Staging
from common.checkpoints.writer import write_state
from common.config import OptimizerConfig
from common.learner import Learner

STEPS = 3


def new_model(dtype: torch.dtype) -> nn.Module:
    """Shapes that two ranks cannot cut into equal parts; a layer norm that every rank has whole."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.LayerNorm(5)).to(dtype)


def shard(model: nn.Module) -> None:
    """Cuts matrices by rows; what has one dimension is whole on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            place = Shard(0) if parameter.ndim == 2 else Replicate()
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [place])))


def new_learner(model: nn.Module) -> Learner:
    return Learner(model, OptimizerConfig(learning_rate=0.05, weight_decay=0.1, max_grad_norm=0.0), total_steps=8)


def update(learner: Learner, step: int) -> None:
    """Gradients that depend on the parameters alone, so that shards learn by themselves."""
    learner.start_step(step)
    for master in learner.masters:
        master.grad = master.detach() * 3 + step
    learner.optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(learner.parameters, learner.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
    learner.optimizer.zero_grad()


def state_of(model: nn.Module, learner: Learner) -> dict[str, torch.Tensor]:
    return {f"parameter.{name}": tensor.detach() for name, tensor in model.named_parameters()} | learner.state()


def whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies. All ranks must call this where tensors are sharded."""
    full = {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in state.items()}
    return {key: tensor.clone() for key, tensor in full.items()}


def save(target: Path, dtype: torch.dtype, sharded: bool) -> dict[str, torch.Tensor]:
    """Learns, saves, learns on. Returns what was saved."""
    model = new_model(dtype)
    if sharded:
        shard(model)
    learner = new_learner(model)
    for step in range(1, STEPS + 1):
        update(learner, step)
    copies = Staging().copy(state_of(model, learner))
    update(learner, STEPS + 1)
    write_state(target, copies, {"step": STEPS})
    return whole(copies)


def load(source: Path, dtype: torch.dtype, sharded: bool) -> dict[str, torch.Tensor]:
    """What a new learner is after it took the state."""
    model = new_model(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if sharded:
        shard(model)
    learner = new_learner(model)
    saved = StateReader(source)
    saved.load({f"parameter.{name}": tensor for name, tensor in model.named_parameters()})
    learner.load_state(saved.tensors.keys(), saved.load, 0)
    loaded = whole(state_of(model, learner))
    update(learner, STEPS + 1)  # it can learn on
    assert all(torch.isfinite(tensor).all() for tensor in whole(state_of(model, learner)).values())
    return loaded


def main(what: str, rank: int, ranks: int, folder: Path, dtype: str) -> None:
    init = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    work = save if what == "save" else load
    state = work(folder / "step-3" / "trainer", getattr(torch, dtype), True)
    if rank == 0:
        torch.save(state, folder / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
