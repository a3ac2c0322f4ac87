"""The engine's side of a set whose layout is known: rows of the parameters that the model runs on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from common.messages import Manifest, Receipt, Transport
from common.weights.memory import WeightMemory
from common.weights.reader import Applied, WeightReader
from services.rollout.engines.vllm.placement import Placement


class PlacedReader(WeightReader):
    """Works on the parameters that the model has at that moment: vLLM may have put others in their places."""

    def __init__(
        self, manifest: Manifest, memory: WeightMemory, model: nn.Module, placements: Sequence[Placement],
        transport: Transport, bucket_mib: int,
    ) -> None:  # fmt: skip
        # By module and attribute: names change where vLLM puts its LoRA layers around them.
        paths = [item.parameter.rpartition(".") for item in placements]
        self.places = [
            (model.get_submodule(module), attribute, item)
            for (module, _, attribute), item in zip(paths, placements, strict=True)
        ]
        super().__init__(manifest, memory, self._rows(), transport, bucket_mib)

    def _rows(self) -> dict[str, torch.Tensor]:
        return {
            name: view
            for module, attribute, item in self.places
            for name, view in item.rows(getattr(module, attribute)).items()
        }

    def _look_again(self, manifest: Manifest) -> None:
        rows = self._rows()
        self.tensors = [rows[entry.name] for entry in manifest.tensors]

    def apply(self, manifest: Manifest) -> Applied:
        self._look_again(manifest)
        return super().apply(manifest)

    def receipt(
        self, manifest: Manifest, applied: Applied, canary_logprobs: Sequence[float], stale_tokens: int = 0
    ) -> Receipt:
        self._look_again(manifest)
        return super().receipt(manifest, applied, canary_logprobs, stale_tokens)
