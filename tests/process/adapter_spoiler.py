"""A worker extension that spoils an adapter's tensor in the engine, as a bug there would."""

from __future__ import annotations

from services.rollout.engines.vllm.worker import WorkerExtension

SPOILER = f"{__name__}.SpoilingExtension"


class SpoilingExtension(WorkerExtension):
    """After each version taken over, changes one number of the tensor that was named last."""

    spoiled = ""

    def quartet_test_spoil(self, name: str) -> None:
        self.spoiled = name

    def quartet_apply(self, version: int) -> str:
        applied = super().quartet_apply(version)
        adapter = self._quartet_weights().adapter
        if self.spoiled and adapter is not None:
            adapter.held(self._quartet_lora_manager())[self.spoiled][3, 5] += 1e-3
        return applied
