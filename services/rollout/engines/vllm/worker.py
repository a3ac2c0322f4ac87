"""What the rollout service can ask the engine's process for: vLLM mixes this class into its worker.

Arguments and results are JSON, so that nothing is pickled on the way (``collective_rpc`` with plain types only).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from common.messages import Manifest, Receipt
from common.weights.header import WeightsError
from common.weights.reader import Applied, used_bytes
from services.rollout.engines.vllm.lifetime import unname_shared_memory
from services.rollout.engines.vllm.loader import EngineWeights, loaded
from services.rollout.engines.vllm.reloading import ReloadingReader


class EngineFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine says of itself once it has started."""

    pid: int
    transport: str
    why_copy: str
    device: str
    own_bytes: int
    """Parameters and buffers that are not in the shared memory."""
    load_bytes: int
    """By how much the memory in use on the GPU grew while the model was built; 0 on CPU."""
    reloads: bool
    """Weights go through vLLM's own loading, which may keep what it has made of them outside parameters and buffers."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the worker says of a version. A value also where the version is not held: an exception may end vLLM."""

    problem: str = ""
    """Set where the weights are torn or of another version; nothing else counts then."""
    copied_bytes: int = 0
    held: float = 0.0
    receipt: Receipt | None = None


class WorkerExtension:
    """Mixed into vLLM's worker; the names carry a prefix so that they hide none of its own."""

    def quartet_start(self) -> str:
        """Called once when vLLM has started; returns EngineFacts."""
        unname_shared_memory()
        engine = self._quartet_weights()
        device = engine.reader.memory.device if engine.reader.transport == "alias" else torch.device(self._device())
        facts = EngineFacts(
            os.getpid(), engine.reader.transport, engine.why_copy, str(device), engine.own_bytes, engine.load_bytes,
            isinstance(engine.reader, ReloadingReader),
        )  # fmt: skip
        return msgspec.json.encode(facts).decode()

    def quartet_apply(self, version: int) -> str:
        """Holds a committed version; returns an Answer. After one with a problem nothing may be generated."""
        return _answer(lambda: self._quartet_apply(version))

    def quartet_receipt(self, version: int, copied: int, held: float) -> str:
        """An Answer with the receipt of the version applied last, from what the model runs on; without the canary."""
        return _answer(lambda: self._quartet_receipt(version, Applied(copied, held)))

    def _quartet_apply(self, version: int) -> Answer:
        engine = self._quartet_weights()
        applied = engine.reader.apply(_at(engine.manifest, version))
        if engine.adapter is not None:
            applied = engine.adapter.apply(self._quartet_lora_manager(), version, applied)
        return Answer(copied_bytes=applied.copied_bytes, held=applied.held)

    def _quartet_receipt(self, version: int, applied: Applied) -> Answer:
        engine = self._quartet_weights()
        adapted = {} if engine.adapter is None else engine.adapter.checksums(self._quartet_lora_manager())
        receipt = engine.reader.receipt(_at(engine.manifest, version), applied, ())
        if engine.adapter is not None:
            receipt = engine.adapter.completed(receipt, adapted)
        return Answer(receipt=receipt)

    def quartet_memory(self) -> tuple[float, int]:
        """(monotonic time, memory of this GPU in use by all processes)."""
        return time.monotonic(), used_bytes(torch.device(self._device()))

    def _device(self) -> str:
        device = getattr(self, "device", "cpu")
        return str(device)

    def _quartet_lora_manager(self) -> Any:
        """vLLM's keeper of adapters; its worker has no public way to hand one over in memory."""
        worker: Any = self
        return worker.model_runner.lora_manager._adapter_manager

    def _quartet_weights(self) -> EngineWeights:
        return loaded[0]


def _answer(work: Callable[[], Answer]) -> str:
    try:
        answer = work()
    except WeightsError as error:
        answer = Answer(problem=str(error))
    return msgspec.json.encode(answer).decode()


def _at(manifest: Manifest, version: int) -> Manifest:
    return msgspec.structs.replace(manifest, version=version)
