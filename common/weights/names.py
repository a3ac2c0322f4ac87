"""Names of a weight set's tensors: Hugging Face's own for the base, ``<module>.lora_A.weight`` for an adapter (pure).

PEFT puts modules of its own around those that it adapts, which changes the names of the base's tensors; consumers
know the plain ones.
"""

from __future__ import annotations

import msgspec

from common.messages import AdapterInfo, Manifest, TensorEntry

_WRAPPER = "base_model.model."
_INNER = ".base_layer."
_ADAPTER_NAME = "default"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


def plain_name(name: str) -> str:
    """A parameter's name in a PEFT model -> its name in the weight set; names of plain models stay as they are.

    ``base_model.model.m.q_proj.base_layer.weight`` -> ``m.q_proj.weight``;
    ``base_model.model.m.q_proj.lora_A.default.weight`` -> ``m.q_proj.lora_A.weight``.
    """
    name = name.removeprefix(_WRAPPER).replace(_INNER, ".")
    for kind in ("lora_A", "lora_B"):
        name = name.replace(f".{kind}.{_ADAPTER_NAME}.", f".{kind}.")
    return name


def is_adapter_tensor(name: str) -> bool:
    """Whether a tensor of the set belongs to its adapter, by its plain name."""
    return name.endswith((LORA_A, LORA_B))


def adapted_module(name: str) -> str:
    """``m.q_proj.lora_A.weight`` -> ``m.q_proj``."""
    return name.removesuffix(LORA_A).removesuffix(LORA_B)


def without_adapter(manifest: Manifest) -> Manifest:
    """The manifest of the base alone."""
    if manifest.adapter is None:
        return manifest
    base = tuple(entry for entry in manifest.tensors if not is_adapter_tensor(entry.name))
    return msgspec.structs.replace(manifest, tensors=base, adapter=None)


def adapter_tensors(manifest: Manifest) -> tuple[TensorEntry, ...]:
    """The tensors of the set's adapter; empty where it has none."""
    if manifest.adapter is None:
        return ()
    return tuple(entry for entry in manifest.tensors if is_adapter_tensor(entry.name))


def adapter_scaling(adapter: AdapterInfo) -> float:
    """Factor of B·A: alpha / rank, a power of two, so that multiplying with it is exact."""
    return adapter.alpha / adapter.rank
