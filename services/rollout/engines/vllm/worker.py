"""What the rollout service can ask the engine's process for: vLLM mixes this class into its worker.

Arguments and results are JSON, so that nothing is pickled on the way (``collective_rpc`` with plain types only).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from common.messages import Manifest
from common.weights.reader import Applied, used_bytes
from services.rollout.engines.vllm.loader import EngineWeights, loaded


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


class WorkerExtension:
    """Mixed into vLLM's worker; the names carry a prefix so that they hide none of its own."""

    def quartet_start(self, parent: int) -> str:
        """Ties this process to the service's, which may be killed without a word, and tells about the engine."""
        end_with(parent)
        unname_shared_memory()
        engine = self._quartet_weights()
        device = engine.reader.memory.device if engine.reader.transport == "alias" else torch.device(self._device())
        facts = EngineFacts(
            os.getpid(), engine.reader.transport, engine.why_copy, str(device), engine.own_bytes, engine.load_bytes
        )
        return msgspec.json.encode(facts).decode()

    def quartet_apply(self, version: int) -> tuple[int, float]:
        """Holds a committed version; returns (bytes copied, monotonic time)."""
        engine = self._quartet_weights()
        applied = engine.reader.apply(_at(engine.manifest, version))
        if engine.adapter is not None:
            applied = engine.adapter.apply(self._quartet_lora_manager(), version, applied)
        return applied.copied_bytes, applied.held

    def quartet_receipt(self, version: int, copied: int, held: float) -> str:
        """The receipt of the version applied last, from the tensors that the model runs on; without the canary."""
        engine = self._quartet_weights()
        adapted = {} if engine.adapter is None else engine.adapter.checksums(self._quartet_lora_manager())
        receipt = engine.reader.receipt(_at(engine.manifest, version), Applied(copied, held), ())
        if engine.adapter is not None:
            receipt = engine.adapter.completed(receipt, adapted)
        return msgspec.json.encode(receipt).decode()

    def quartet_peak(self) -> int:
        """Bytes by which this process's GPU allocations exceeded what it holds now, since the last call; 0 on CPU."""
        if not torch.cuda.is_available():
            return 0
        extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return extra

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


def unname_shared_memory() -> None:
    """vLLM's queue between its processes is mapped by now; without a name it goes with them, however they end."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.parent == Path("/dev/shm") and path.name.startswith("psm_"):
            path.unlink(missing_ok=True)


def end_with(service: int) -> None:
    """Ends the engine when the service's process ends: this one, and the one between them where vLLM has put one."""
    above = os.getppid()
    watched = os.pidfd_open(service)

    def watch() -> None:
        select.select([watched], [], [])
        if above != service and os.getppid() == above:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
                os.kill(above, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=watch, name="end-with-service", daemon=True).start()


def _at(manifest: Manifest, version: int) -> Manifest:
    return msgspec.structs.replace(manifest, version=version)
