"""A worker extension through which tests look into an engine's process, and spoil there what a bug would spoil."""

from __future__ import annotations

import os
from typing import Any

import torch

from services.rollout.engines.vllm.worker import WorkerExtension

PROBE = f"{__name__}.ProbeExtension"


class ProbeExtension(WorkerExtension):
    """Names as vLLM has them for its own parameters, as the weight set has them for its tensors."""

    spoiled: tuple[tuple[str, int, float], ...] = ()
    kept: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def quartet_test_spoil(self, name: str, index: int, change: float) -> None:
        """After every version taken over from now on, changes one element of a parameter or buffer."""
        self.spoiled += ((name, index, change),)

    def quartet_test_mend(self) -> None:
        """Spoils nothing any more; buffers, which no update writes, are as they were."""
        for tensor, before in reversed(self.kept):
            tensor.data.copy_(before)
        self.spoiled, self.kept = (), ()

    def quartet_apply(self, version: int) -> str:
        applied = super().quartet_apply(version)
        model = self._quartet_test_model()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.kept += tuple((tensors[name], tensors[name].data.clone()) for name, _, _ in self.spoiled)
        for name, index, change in self.spoiled:
            tensors[name].data.view(-1)[index] += change
        return applied

    def quartet_test_pid(self) -> int:
        return os.getpid()

    def quartet_test_detach(self, name: str) -> None:
        """Has the model run on a copy of a parameter, of the same values."""
        found = self._quartet_test_model().get_parameter(name)
        self.attached = found, found.data
        found.data = found.data.clone()

    def quartet_test_attach(self) -> None:
        """Undoes it."""
        parameter, data = self.attached
        parameter.data = data

    def quartet_test_offsets(self) -> dict[str, int]:
        """Where each parameter of the model lies in the shared memory; -1 for the engine's own."""
        memory = self._quartet_weights().reader.memory
        return {name: memory.offset(tensor) for name, tensor in self._quartet_test_model().named_parameters()}

    def quartet_test_tied(self) -> bool:
        """Whether the head multiplies with the embedding itself."""
        model = self._quartet_test_model()
        return model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()

    def _quartet_test_model(self) -> Any:
        worker: Any = self
        return worker.model_runner.get_model()
