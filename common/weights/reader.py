"""A consumer of a weight set: its tensors are the writer's (``alias``), or copies of them (``copy``)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from common.messages import Manifest, Receipt, TensorEntry, Transport
from common.weights.checksum import tensor_checksums
from common.weights.header import WeightsError, require_clean
from common.weights.layout import dtype_from_name, entry_bytes, model_tensors
from common.weights.memory import WeightMemory
from common.weights.staging import copy_staged, pieces

Wanted = Literal["auto", "alias", "copy"]
MIB = 1 << 20


@dataclass(frozen=True)
class Applied:
    """What it took to hold a version."""

    copied_bytes: int
    held: float
    """``time.monotonic()``."""


class WeightReader:
    """The consumer's tensors by the names of the set; for a fused matrix these are views of its rows."""

    def __init__(
        self, manifest: Manifest, memory: WeightMemory, tensors: Mapping[str, torch.Tensor], transport: Transport,
        bucket_mib: int,
    ) -> None:  # fmt: skip
        self.identity = memory.identity
        self.memory = memory
        self.path = Path(manifest.path)
        self.transport: Transport = transport
        self.bucket_bytes = bucket_mib * MIB
        self.tensors = [tensors[entry.name] for entry in manifest.tensors]

    def prepare(self, manifest: Manifest) -> None:
        """Called once while an engine is built, when an update may be under way: no version is held yet."""

    @torch.no_grad()
    def apply(self, manifest: Manifest) -> Applied:
        """Holds a committed version from now on.

        Raises WeightsError unless the set is CLEAN at the manifest's version before, between buckets and after.
        """
        require_clean(self.path, manifest.version)
        copied = 0
        if self.transport == "copy":
            for nbytes in self._copies(list(zip(manifest.tensors, self.tensors, strict=True))):
                synchronize(self.tensors[0].device)
                require_clean(self.path, manifest.version)
                copied += nbytes
        return Applied(copied, time.monotonic())

    def _copies(self, pairs: Sequence[tuple[TensorEntry, torch.Tensor]]) -> Iterator[int]:
        """Copies bucket by bucket, and yields the bytes of each once it is under way."""
        device = self.tensors[0].device
        if self.memory.device != device:
            staging = torch.empty(self.bucket_bytes, dtype=torch.uint8, device=device)
            yield from (copy_staged(run, self.memory, staging) for run in pieces(pairs, self.bucket_bytes))
            return
        for bucket in buckets(pairs, self.bucket_bytes):
            torch._foreach_copy_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                [tensor.data for _, tensor in bucket], [self.memory.view(entry) for entry, _ in bucket]
            )
            yield sum(tensor.nbytes for _, tensor in bucket)

    def receipt(
        self, manifest: Manifest, applied: Applied, canary_logprobs: Sequence[float], stale_tokens: int = 0
    ) -> Receipt:
        """Proves what ``apply`` holds, from the tensors themselves, after whatever the device still had to do."""
        device = self.tensors[0].device
        synchronize(device)
        checksums = tensor_checksums(self.tensors)
        require_clean(self.path, manifest.version)
        return Receipt(
            transport=self.transport, identity=self.identity, checksums=checksums,
            offsets=tuple(self.memory.offset(tensor) for tensor in self.tensors),
            canary_logprobs=tuple(canary_logprobs), stale_tokens=stale_tokens, copied_bytes=applied.copied_bytes,
            held=applied.held, device_used_bytes=used_bytes(device),
        )  # fmt: skip


def buckets(
    pairs: Sequence[tuple[TensorEntry, torch.Tensor]], limit: int
) -> Iterator[Sequence[tuple[TensorEntry, torch.Tensor]]]:
    """Runs of consecutive tensors of at most ``limit`` bytes together; a larger tensor is a bucket of its own."""
    start, size = 0, 0
    for index, (entry, _) in enumerate(pairs):
        nbytes = entry_bytes(entry)
        if index > start and size + nbytes > limit:
            yield pairs[start:index]
            start, size = index, 0
        size += nbytes
    if start < len(pairs):
        yield pairs[start:]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def used_bytes(device: torch.device) -> int:
    """Memory of a GPU in use by all processes; 0 on CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def choose_transport(wanted: Wanted, memory: WeightMemory, device: torch.device) -> tuple[Transport, str]:
    """Returns (transport, why not alias). Raises WeightsError where alias is demanded and the devices differ."""
    if wanted == "copy":
        return "copy", "weights.transport = 'copy'"
    if memory.device == device:
        return "alias", ""
    why = f"the weights lie on {memory.device}, the engine runs on {device}"
    if wanted == "alias":
        raise WeightsError(f"weights.transport = 'alias' is not possible: {why}")
    return "copy", why


def attach_model(
    model: nn.Module, manifest: Manifest, memory: WeightMemory, wanted: Wanted = "auto", bucket_mib: int = 512
) -> WeightReader:
    """Attaches a model with the writer's own names. Raises WeightsError, naming the tensor, for another model."""
    tensors = model_tensors(model)
    _require_same_tensors(tensors, manifest)
    transport, _ = choose_transport(wanted, memory, next(iter(tensors.values())).device)
    if transport == "alias":
        for entry in manifest.tensors:
            tensors[entry.name].data = memory.view(entry)
    return WeightReader(manifest, memory, tensors, transport, bucket_mib)


def _require_same_tensors(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
    offered = {entry.name: (dtype_from_name(entry.dtype), torch.Size(entry.shape)) for entry in manifest.tensors}
    for name, tensor in tensors.items():
        if offered.get(name) != (tensor.dtype, tensor.shape):
            mine = (tensor.dtype, tensor.shape)
            raise WeightsError(f"{manifest.path}: tensor {name!r} is {offered.get(name)}, this model has {mine}")
    if extra := sorted(set(offered) - set(tensors)):
        raise WeightsError(
            f"{manifest.path}: tensors {extra[:3]} are not in this model: is model.path the same for every service?"
        )
