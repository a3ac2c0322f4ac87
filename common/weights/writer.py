"""The writer of a weight set: the trainer's own parameters become views of memory that others map.

    begin(v): WRITING(v)  ->  the optimizer writes in place  ->  commit(v): CLEAN(v), manifest  ->  prove(): checksums

Nothing is copied at a commit: what the engine maps is what the optimizer wrote.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from common.messages import AdapterInfo, Manifest, Proof
from common.weights.checksum import tensor_checksums
from common.weights.header import HEADER_BYTES, WeightsError, WeightState, read_state, write_state
from common.weights.layout import plan
from common.weights.memory import WeightMemory, create_file
from common.weights.names import plain_name
from common.weights.placeholders import replace_parameters

Allocate = Callable[[int], tuple[WeightMemory, bool]]
"""Gets memory of so many bytes, and whether it is new; otherwise it holds what the last writer left."""


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by their plain names (``names.plain_name``), tied ones once, and persistent buffers."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True)
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return {plain_name(name): tensor for name, tensor in tensors.items()}


class WeightWriter:
    """The one writer of a weight set. ``model``'s tensors move into the shared memory, wherever they were before.

    In new memory they keep their values. In memory that an earlier writer left they take over what lies there, if that
    is a committed version; ``version`` then says which. Raises WeightsError where it is torn. For memory of an earlier
    writer the parameters may be on the meta device (``EmptyOnMeta``): nothing is read from disk then.
    """

    def __init__(
        self, path: Path, name: str, model: nn.Module, version: int, allocate: Allocate | None = None,
        adapter: AdapterInfo | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.adapter = adapter
        self.path = path
        self._model = model
        tensors = model_tensors(model)
        self.entries, nbytes = plan(tensors)
        self.memory, created = allocate(nbytes) if allocate is not None else (create_file(path, nbytes), True)
        self.version = version if created else _committed(path)
        self._writing: int | None = None
        if created and self.memory.gpu:
            _create_state_page(path)
        with path.open("r+b") as file:
            self._head = mmap.mmap(file.fileno(), HEADER_BYTES)
        self.views = {entry.name: self.memory.view(entry) for entry in self.entries}
        if created:
            write_state(self._head, WeightState.WRITING, version)
            if self.memory.gpu:
                self.memory.buffer[HEADER_BYTES:].zero_()  # padding rows that no tensor covers; a new file is zero
            for tensor_name, tensor in tensors.items():
                self.views[tensor_name].copy_(tensor.detach())
        for tensor_name, tensor in tensors.items():
            if not tensor.is_meta:
                tensor.data = self.views[tensor_name]
        meta = {id(tensor): self.views[name] for name, tensor in tensors.items() if tensor.is_meta}
        replace_parameters(model, meta)
        if created:
            self._synchronize()
            write_state(self._head, WeightState.CLEAN, version)

    def _synchronize(self) -> None:
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)

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

    def commit(self, version: int, canary_ids: tuple[int, ...] = ()) -> Manifest:
        """Call after the last write of an update; returns what the consumers may use from now on.

        Raises WeightsError for another version than the one begun or, between updates, the one committed last.
        """
        expected = self.version if self._writing is None else self._writing
        if version != expected:
            raise WeightsError(
                f"{self.path}: commit of version {version}, expected {expected}: call begin({version}) first"
            )
        self._synchronize()
        write_state(self._head, WeightState.CLEAN, version)
        self.version, self._writing = version, None
        return Manifest(
            name=self.name, version=version, path=str(self.path), identity=self.memory.identity, gpu=self.memory.gpu,
            nbytes=self.memory.buffer.numel(), tensors=self.entries, canary_ids=canary_ids,
            adapter=self.adapter,
        )  # fmt: skip

    def prove(self, canary_logprobs: tuple[float, ...] = ()) -> Proof:
        """What every consumer of the committed version must find.

        Raises WeightsError in the middle of an update, and where the model no longer trains what is shared.
        """
        if self._writing is not None:
            raise WeightsError(f"{self.path}: version {self._writing} is being written and cannot be proved yet")
        for name, tensor in model_tensors(self._model).items():
            if tensor.data_ptr() != self.views[name].data_ptr():
                raise WeightsError(
                    f"{self.path}: the model's tensor {name!r} is no longer the shared one: something has put another "
                    "in its place since (Module.to, an adapter), and engines would never see what is trained"
                )
        checksums = tensor_checksums([self.views[entry.name] for entry in self.entries])
        return Proof(version=self.version, checksums=checksums, canary_logprobs=canary_logprobs)


def _committed(path: Path) -> int:
    found = read_state(path)
    if found.state is not WeightState.CLEAN:
        raise WeightsError(
            f"{path} is {found.state.name}({found.version}): its last writer died in the middle of an update and left "
            "torn weights; restore the last committed version before using them"
        )
    return found.version


def _create_state_page(path: Path) -> None:
    """The file beside a GPU buffer. Always a new one, like the buffer."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, HEADER_BYTES)
    finally:
        os.close(descriptor)
