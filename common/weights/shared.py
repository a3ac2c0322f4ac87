"""A weight set in a file under /dev/shm: the ``shm`` transport.

On CPU both sides alias it: the trainer's parameters are views of the file, and so are the engine's, so an optimizer
step is seen by the engine without a byte moved. On a GPU the trainer copies into the file at each commit and the engine
out of it. Either way the protocol is the same: WRITING, writes, CLEAN, manifest, receipt.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.messages import Manifest, Receipt, TensorEntry
from common.weights.checksum import tensor_checksum
from common.weights.header import (
    HEADER_BYTES,
    WeightsError,
    WeightState,
    read_state,
    receipt_digest,
    require_clean,
    write_state,
)  # fmt: skip

ALIGNMENT = 256
"""Bytes to which every tensor is aligned; CUDA allocations are aligned so too."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"unknown dtype {name!r} in a weight manifest")
    return dtype


def _layout(parameters: dict[str, torch.Tensor]) -> tuple[list[TensorEntry], int]:
    entries: list[TensorEntry] = []
    offset = HEADER_BYTES
    for name, tensor in parameters.items():
        entries.append(
            TensorEntry(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), offset=offset, checksum=0)
        )
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return entries, offset


class _MappedFile:
    """The file as one torch storage; tensors are views of it."""

    def __init__(self, path: Path, nbytes: int) -> None:
        found = path.stat().st_size
        if found != nbytes:
            raise WeightsError(f"{path}: {found} bytes, expected {nbytes}: truncated, or another model's weights?")
        self.path = path
        self.storage: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=nbytes)

    def view(self, entry: TensorEntry) -> torch.Tensor:
        flat = torch.tensor([], dtype=dtype_from_name(entry.dtype))
        size = torch.Size(entry.shape)
        stride = torch.empty(size, device="meta").stride()
        return flat.set_(self.storage, entry.offset // flat.element_size(), size, stride)


def model_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name, tied ones once, and persistent buffers."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True)
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return tensors


class WeightWriter:
    """The one writer of a weight set. ``model`` keeps its values; on CPU its tensors move into the shared file."""

    def __init__(self, path: Path, name: str, model: nn.Module, version: int) -> None:
        self.name = name
        self.path = path
        self.tensors = model_parameters(model)
        self.entries, self.nbytes = _layout(self.tensors)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._reserve()
        with path.open("r+b") as file:
            self._head = mmap.mmap(file.fileno(), HEADER_BYTES)
        self.version = version
        self._writing: int | None = None
        write_state(self._head, WeightState.WRITING, version)
        mapped = _MappedFile(path, self.nbytes)
        self.views = {entry.name: mapped.view(entry) for entry in self.entries}
        self.aliased = all(tensor.device.type == "cpu" for tensor in self.tensors.values())
        for tensor_name, tensor in self.tensors.items():
            self.views[tensor_name].copy_(tensor.detach())
            if self.aliased:
                tensor.data = self.views[tensor_name]
        write_state(self._head, WeightState.CLEAN, version)

    def _reserve(self) -> None:
        """Takes the memory now, so that a full /dev/shm is an error here and not a SIGBUS in mid-update.

        Always a new file: truncating one that a consumer still maps would kill the consumer.
        """
        self.path.unlink(missing_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.nbytes)
        except OSError as error:
            self.path.unlink()
            raise WeightsError(
                f"{self.path}: no room for {self.nbytes / 2**20:.0f} MiB of weights ({error.strerror}): "
                "enlarge /dev/shm (docker: shm_size) or stop what fills it"
            ) from error
        finally:
            os.close(descriptor)

    def begin(self, version: int) -> None:
        """Call before the first write of an update.

        Raises WeightsError unless ``version`` is newer than the committed one.
        """
        if version <= self.version:
            raise WeightsError(
                f"{self.path}: update to version {version} asked for, but version {self.version} is committed"
            )
        self._writing = version
        write_state(self._head, WeightState.WRITING, version)

    def commit(
        self, version: int, canary_ids: tuple[int, ...] = (), canary_logprobs: tuple[float, ...] = ()
    ) -> Manifest:
        """Call after the last write of an update; returns what the consumers must see.

        Raises WeightsError for another version than the one begun or, between updates, the one committed last.
        """
        expected = self.version if self._writing is None else self._writing
        if version != expected:
            raise WeightsError(
                f"{self.path}: commit of version {version}, expected {expected}: call begin({version}) first"
            )
        if not self.aliased:
            for name, tensor in self.tensors.items():
                self.views[name].copy_(tensor.detach())
        entries = tuple(
            TensorEntry(
                name=e.name, dtype=e.dtype, shape=e.shape, offset=e.offset, checksum=tensor_checksum(self.views[e.name])
            )
            for e in self.entries
        )
        write_state(self._head, WeightState.CLEAN, version)
        self.version, self._writing = version, None
        return Manifest(
            name=self.name, version=version, path=str(self.path), inode=self.path.stat().st_ino, nbytes=self.nbytes,
            tensors=entries, canary_ids=canary_ids, canary_logprobs=canary_logprobs,
        )  # fmt: skip


class WeightReader:
    """A consumer of a weight set: aliases it into a model on CPU, copies it into a model on a GPU."""

    def __init__(self, model: nn.Module, manifest: Manifest) -> None:
        self.path = Path(manifest.path)
        read_state(self.path)
        self.mapped = _MappedFile(self.path, manifest.nbytes)
        self.inode = self.path.stat().st_ino
        self.tensors = model_parameters(model)
        self._require_same_layout(manifest)
        self.views = {entry.name: self.mapped.view(entry) for entry in manifest.tensors}
        self.aliased = all(tensor.device.type == "cpu" for tensor in self.tensors.values())
        if self.aliased:
            for name, tensor in self.tensors.items():
                tensor.data = self.views[name]

    def _require_same_layout(self, manifest: Manifest) -> None:
        offered = {entry.name: (dtype_from_name(entry.dtype), torch.Size(entry.shape)) for entry in manifest.tensors}
        for name, tensor in self.tensors.items():
            if offered.get(name) != (tensor.dtype, tensor.shape):
                mine = (tensor.dtype, tensor.shape)
                raise WeightsError(f"{self.path}: tensor {name!r} is {offered.get(name)}, this model has {mine}")
        if extra := sorted(set(offered) - set(self.tensors)):
            raise WeightsError(
                f"{self.path}: tensors {extra[:3]} are not in this model: is model.path the same for every service?"
            )

    def apply(self, manifest: Manifest) -> tuple[str, int]:
        """Takes a committed version over.

        Returns (receipt digest, number of tensors), computed from the model's own tensors. Raises WeightsError unless
        the set is CLEAN at the manifest's version before and after.
        """
        require_clean(self.path, manifest.version)
        entries: list[TensorEntry] = []
        for entry in manifest.tensors:
            tensor = self.tensors[entry.name]
            if not self.aliased:
                tensor.data.copy_(self.views[entry.name])
            offset = tensor.data_ptr() - self.mapped.storage.data_ptr() if self.aliased else entry.offset
            entries.append(
                TensorEntry(
                    name=entry.name,
                    dtype=dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                    offset=offset,
                    checksum=tensor_checksum(tensor),
                )
            )
        require_clean(self.path, manifest.version)
        return receipt_digest(manifest.version, self.inode, tuple(entries)), len(entries)


def make_receipt(reader: WeightReader, digest: str, tensors: int, canary_max_error: float, apply_ms: float) -> Receipt:
    return Receipt(
        transport="alias" if reader.aliased else "copy", inode=reader.inode, digest=digest, tensors=tensors,
        canary_max_error=canary_max_error, apply_ms=apply_ms,
    )  # fmt: skip
