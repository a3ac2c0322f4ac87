"""vLLM's side of a weight set: a model loader that builds the model on memory that is there already.

Imported in the engine's own process, where importing registers the loader (``worker.py`` is named as the worker
extension, which imports this module before the model is loaded, and so before CUDA graphs are captured).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
from msgspec import Struct
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from common.messages import CudaHandle, Manifest
from common.weights.memory import WeightMemory, map_set
from common.weights.names import without_adapter
from common.weights.placeholders import EmptyOnMeta, replace_parameters
from common.weights.reader import Wanted, WeightReader, choose_transport, used_bytes
from services.rollout.engines.vllm.adapter import PolicyAdapter
from services.rollout.engines.vllm.lifetime import end_with
from services.rollout.engines.vllm.placed import PlacedReader
from services.rollout.engines.vllm.placement import LayoutUnknown, Placement, place
from services.rollout.engines.vllm.reloading import ReloadingReader

log = logging.getLogger("vllm.quartet")

LOAD_FORMAT = "quartet"
ORDER = "order"
"""Key of the loader's configuration under which the order lies, as JSON."""
FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures whose layout in vLLM is known to be the set's. Any other is loaded through vLLM's own loading."""


class LoadOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """What the rollout service tells the engine's process at its start."""

    manifest: Manifest
    handle: CudaHandle | None
    transport: Wanted
    bucket_mib: int
    service: int = 0
    """Process that the engine ends with, since it may be killed without a word; ``VLLMEngine`` fills it in."""


@dataclass(frozen=True)
class EngineWeights:
    """The engine's weights as the worker extension finds them; one model a process."""

    manifest: Manifest
    reader: WeightReader
    why_copy: str
    own_bytes: int
    load_bytes: int
    adapter: PolicyAdapter | None = None
    """``manifest`` and ``reader`` are those of the base then."""


loaded: list[EngineWeights] = []
"""Filled by the loader; the worker extension has no other way to what the loader made."""


@register_model_loader(LOAD_FORMAT)
class SharedWeightsLoader(BaseModelLoader):
    """Builds the model on the policy's memory (alias), or beside it (copy)."""

    def download_model(self, model_config: ModelConfig) -> None:
        """There is nothing to download: the weights are in memory."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """vLLM's own reloading, which Quartet never asks for: the weights are where they were."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        order = msgspec.json.decode(self.load_config.model_loader_extra_config[ORDER], type=LoadOrder)
        end_with(order.service)
        device = engine_device(vllm_config)
        used_before = used_bytes(device)
        memory = map_set(order.manifest, order.handle)
        info = order.manifest.adapter
        adapter = None if info is None else PolicyAdapter(order.manifest, info, memory)
        order = msgspec.structs.replace(order, manifest=without_adapter(order.manifest))
        with set_default_torch_dtype(model_config.dtype):
            try:
                model, reader, why_copy = self._build_placed(vllm_config, model_config, prefix, order, memory, device)
            except LayoutUnknown as error:
                if order.transport == "alias" or adapter is not None:  # vLLM cannot load anew beneath its LoRA layers
                    raise
                why_copy = f"layout not known: {error}"
                forget_layers(vllm_config)
                with device:
                    model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                reader = ReloadingReader(order.manifest, memory, model, order.bucket_mib)
            keep_weights(model)
            reader.prepare(order.manifest)
            process_weights_after_loading(model, model_config, device)
            run_on_parameters(model)
        own, grown = own_bytes(model, memory), used_bytes(device) - used_before
        loaded[:] = [EngineWeights(order.manifest, reader, why_copy, own, grown, adapter)]
        return model.eval().requires_grad_(False)

    def _build_placed(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str, order: LoadOrder, memory: WeightMemory,
        device: torch.device,
    ) -> tuple[nn.Module, WeightReader, str]:  # fmt: skip
        if model_config.architecture not in FAMILIES:
            raise LayoutUnknown(f"{model_config.architecture} is not one of {', '.join(sorted(FAMILIES))}")
        transport, why_copy = choose_transport(order.transport, memory, device)
        with device, EmptyOnMeta():
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        if meta := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
            raise LayoutUnknown(f"buffer {meta[0]!r} is not computed but allocated")
        parameters = dict(model.named_parameters())
        packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        placements = place(parameters, order.manifest, packed)
        tensors = {
            placement.parameter: memory_of(placement, memory)
            if transport == "alias"
            else torch.empty(placement.shape, dtype=parameters[placement.parameter].dtype, device=device)
            for placement in placements
        }
        replace_parameters(model, {id(parameters[name]): tensor for name, tensor in tensors.items()})
        return model, PlacedReader(order.manifest, memory, model, placements, transport, order.bucket_mib), why_copy


def forget_layers(vllm_config: VllmConfig) -> None:
    """Takes the layers of a model that was built and given up out of the registers in which names must be new."""
    vllm_config.compilation_config.static_forward_context.clear()
    vllm_config.compilation_config.static_all_moe_layers.clear()


def engine_device(vllm_config: VllmConfig) -> torch.device:
    device = torch.device(vllm_config.load_config.device or vllm_config.device_config.device or "cpu")
    return torch.device(device.type, torch.cuda.current_device()) if device.type == "cuda" else device


def memory_of(placement: Placement, memory: WeightMemory) -> torch.Tensor:
    return memory.span(placement.offset, placement.entries[0].dtype, placement.shape, placement.parameter)


def own_bytes(model: nn.Module, memory: WeightMemory) -> int:
    """Memory of parameters and buffers outside the shared memory, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if memory.offset(tensor) < 0}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def keep_weights(model: nn.Module) -> None:
    """On CPU vLLM repacks linear weights once and drops or ignores the originals; here those change at every update.

    vLLM leaves layers alone that say so (from 0.32); ``run_on_parameters`` undoes it for the others.
    """
    for module in model.modules():
        if hasattr(module, "quant_method"):
            module.__dict__["_cpu_skip_gemm_dispatch"] = True


def run_on_parameters(model: nn.Module) -> None:
    """Has every CPU layer multiply with its parameter itself, not with a packed copy made when it was loaded."""
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.__dict__["cpu_linear"] = torch.nn.functional.linear
