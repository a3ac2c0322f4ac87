"""A saved state's policy as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from common.adapter import load_policy
from common.checkpoints.files import CheckpointError
from common.checkpoints.reader import StateReader
from common.checkpoints.role import load_saved_weights, saved_weights
from common.config import Config
from common.config_loading import load_config
from common.models import resolve_model
from common.run_files import STATE_FILE, RunDirectory, state_directories
from common.weights.layout import model_tensors
from common.weights.names import is_adapter_tensor
from services.coordinator.states import StateError, read_state
from services.trainer.policy_directory import save_policy


def export_run(run: Path, step: int | None, target: str | None) -> str:
    """Exports the state of a run after ``step``, or the newest whole one, to ``target``; says what was written where.

    Raises CheckpointError where there is no such state, and as ``export`` does.
    """
    files = RunDirectory(run)
    directories = state_directories(files.checkpoints)
    whole = {found: path for found, path in directories.items() if (path / STATE_FILE).exists()}
    chosen = max(whole, default=None) if step is None else step
    if chosen is None or chosen not in whole:
        found = ", ".join(map(str, sorted(whole))) or "none"
        wanted = "whole saved state" if step is None else f"saved state after step {step}"
        raise CheckpointError(f"{files.checkpoints}: there is no {wanted}; states there: {found}")
    config = load_config(str(files.config))
    digest = trainer_digest(whole[chosen], config.run.name, chosen)
    transformers_logging.disable_progress_bar()
    place = Path(target) if target else files.checkpoints / f"export-{chosen}"
    nbytes = export(whole[chosen], place, config, digest)
    return f"{place}: the policy after step {chosen}, {nbytes / 2**20:.1f} MiB"


def trainer_digest(checkpoint: Path, run: str, step: int) -> str:
    """What the trainer's part of a state is known by; empty where nobody noted it. Raises CheckpointError."""
    try:
        state = read_state(checkpoint)
    except StateError as error:
        raise CheckpointError(str(error)) from error
    if (state.run, state.record.step) != (run, step):
        raise CheckpointError(
            f"{checkpoint / STATE_FILE} is of run {state.run!r}, step {state.record.step}; expected run {run!r}, step "
            f"{step}: was the directory copied or renamed?"
        )
    return state.parts.get("trainer", "")


def export(checkpoint: Path, target: Path, config: Config, digest: str = "") -> int:
    """Makes of a checkpoint, ``runs/<name>/checkpoints/step-<n>``, what ``AutoModelForCausalLM`` loads; a LoRA policy's
    adapter is also there by itself, in ``adapter/``. ``config`` is the run's, and ``model.path`` must still be there.
    ``digest`` is what the trainer's part of the state is known by, where somebody noted it.

    Returns the bytes written; ``target`` appears, or is replaced, when it is whole. Raises CheckpointError where the
    state is missing, altered or another model's, OSError where ``target`` cannot be written.
    """
    saved = StateReader(checkpoint / "trainer", digest)
    policy = load_policy(config.model, torch.device("cpu"), config.run.seed)
    tensors = model_tensors(policy)
    if config.model.lora.rank:
        tensors = {name: tensor for name, tensor in tensors.items() if is_adapter_tensor(name)}
    if odd := sorted(tensors.keys() ^ set(saved_weights(saved))):
        raise CheckpointError(f"{saved.directory}: {odd[:3]} are weights of the state or of the config, not of both")
    load_saved_weights(saved, tensors)
    return save_policy(policy, resolve_model(config.model.path), target)
