"""The policy's LoRA adapter in an engine: from the shared memory into vLLM's own stacks, through no file.

vLLM keeps, for each layer, A and B·scaling of every adapter in stacked tensors that its kernels and CUDA graphs read.
At each version the adapter is registered anew under one number, which every request names; so vLLM never loads it.

    set: m.q_proj.lora_A.weight [rank, in]     ->  layers' lora_a_stacked[0][slot, 0]
         m.q_proj.lora_B.weight [out, rank]    ->  layers' lora_b_stacked[0][slot, 0] = B · (alpha / rank), exact
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from common.messages import AdapterInfo, Manifest, Receipt
from common.weights.checksum import tensor_checksums
from common.weights.header import require_clean
from common.weights.memory import WeightMemory
from common.weights.names import LORA_A, LORA_B, adapted_module, adapter_scaling, adapter_tensors
from common.weights.reader import Applied, synchronize
from common.weights.receipts import OWN_COPY
from services.rollout.engines.interface import EngineError

NUMBER = 1
"""vLLM's number of the one adapter."""


def lora_request() -> LoRARequest:
    """What every request carries. The path names no file: the adapter is always there already."""
    return LoRARequest("policy", NUMBER, "quartet:policy")


def lora_arguments(adapter: AdapterInfo | None) -> dict[str, Any]:
    """Keyword arguments of ``AsyncEngineArgs``; layers without adapter are left as they are."""
    if adapter is None:
        return {}
    targets = list(adapter.targets)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter.rank, "lora_target_modules": targets}


class PolicyAdapter:
    """The adapter of a weight set in an engine. ``manager`` is vLLM's ``LoRAModelManager`` in its worker."""

    def __init__(self, manifest: Manifest, adapter: AdapterInfo, memory: WeightMemory) -> None:
        self.manifest = manifest
        self.adapter = adapter
        self.memory = memory
        self.scaling = adapter_scaling(adapter)
        self.entries = adapter_tensors(manifest)

    @torch.no_grad()
    def apply(self, manager: Any, version: int, base: Applied) -> Applied:
        """Holds the adapter of a committed version; ``base`` is what its base has taken.

        Raises WeightsError unless the set is CLEAN at the version before and after. Then, as after any other error,
        what the engine holds is none or a torn adapter: nothing may be generated until the next ``apply``.
        """
        path = Path(self.manifest.path)
        require_clean(path, version)
        manager.remove_all_adapters()
        # vLLM 0.25 takes its tables of slots for current while the mapping stays the same, but sleep has emptied them.
        manager._last_mapping = None
        manager.add_adapter(LoRAModel(NUMBER, self.adapter.rank, self._layers()))
        manager.activate_adapter(NUMBER)
        held = self.held(manager)
        synchronize(next(iter(held.values())).device)
        require_clean(path, version)
        return Applied(base.copied_bytes + sum(tensor.nbytes for tensor in held.values()), time.monotonic())

    def _layers(self) -> dict[str, LoRALayerWeights]:
        """Scaling is applied here: vLLM would do it in place, in the trainer's own memory."""
        views = {entry.name: self.memory.view(entry) for entry in self.entries}
        rank, alpha = self.adapter.rank, self.adapter.alpha
        return {
            module: LoRALayerWeights(
                module, rank, alpha, views[module + LORA_A], views[module + LORA_B] * self.scaling, scaling=1.0
            )
            for module in dict.fromkeys(map(adapted_module, views))
        }

    def held(self, manager: Any) -> dict[str, torch.Tensor]:
        """What the engine computes with, by the names of the set; B multiplied by the scaling.

        Raises EngineError, naming the tensor, where the engine has no place for one or another shape.
        """
        if NUMBER not in manager.lora_index_to_id:
            raise EngineError("the policy's adapter is not active in the engine")
        slot = manager.lora_index_to_id.index(NUMBER)
        found: dict[str, torch.Tensor] = {}
        for name, layer in manager.modules.items():
            parts = manager.packed_modules.get(name, [name])
            for part, a, b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
                found[part + LORA_A], found[part + LORA_B] = a[slot, 0], b[slot, 0]
        for entry in self.entries:
            shape = tuple(found[entry.name].shape) if entry.name in found else None
            if shape != entry.shape:
                raise EngineError(f"the engine's place for tensor {entry.name!r} is {shape}, expected {entry.shape}")
        return {entry.name: found[entry.name] for entry in self.entries}

    @torch.no_grad()
    def checksums(self, manager: Any) -> dict[str, int]:
        """Of what the engine holds, the scaling taken out again, by the names of the set."""
        held = self.held(manager)
        plain = [tensor / self.scaling if name.endswith(LORA_B) else tensor for name, tensor in held.items()]
        return dict(zip(held, tensor_checksums([tensor.contiguous() for tensor in plain]), strict=True))

    def completed(self, receipt: Receipt, checksums: Mapping[str, int]) -> Receipt:
        """The base's receipt with the adapter's tensors in their places in the manifest."""
        base = iter(zip(receipt.offsets, receipt.checksums, strict=True))
        proofs = [
            (OWN_COPY, checksums[entry.name]) if entry.name in checksums else next(base)
            for entry in self.manifest.tensors
        ]
        return msgspec.structs.replace(
            receipt, offsets=tuple(offset for offset, _ in proofs), checksums=tuple(total for _, total in proofs)
        )
