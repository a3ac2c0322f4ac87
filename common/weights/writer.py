"""The writer of a weight set: the trainer's own parameters become views of memory that others map.

    begin(v): WRITING(v)  ->  the optimizer writes in place  ->  commit(v): CLEAN(v), manifest  ->  prove(): checksums

Nothing is copied at a commit: what the engine maps is what the optimizer wrote.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from common.messages import NO_STATE, AdapterInfo, Manifest, Proof
from common.weights.checksum import tensor_checksums
from common.weights.header import HEADER_BYTES, SetState, WeightsError, WeightState, read_state, write_state
from common.weights.layout import model_tensors, plan
from common.weights.memory import WeightMemory, open_file
from common.weights.placeholders import replace_parameters

Allocate = Callable[[int], tuple[WeightMemory, bool]]
"""Gets memory of so many bytes, and whether it is new; otherwise it holds what the last writer left."""


class WeightWriter:
    """The one writer of a weight set. ``model``'s tensors move into the shared memory, wherever they were before.

    In new memory they keep their values, and are committed as ``version``. In memory that an earlier writer left
    (``created`` is False) they take over what lies there: ``version`` then says which, or ``NO_STATE`` where that
    writer died in the middle of an update; until ``restore`` such a set is neither written, committed nor proved. For
    memory of an earlier writer the parameters may be on the meta device (``EmptyOnMeta``): nothing is read from disk
    then. Raises WeightsError where a file of another size, or no weight set, lies at ``path``.
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
        self.memory, created = allocate(nbytes) if allocate is not None else open_file(path, nbytes)
        left = None if created else _left_by_earlier(path)
        self.created = left is None
        self.version = version if left is None else left.version if left.state is WeightState.CLEAN else NO_STATE
        self._writing: int | None = None
        if self.created and self.memory.gpu:
            _create_state_page(path)
        with path.open("r+b") as file:
            self._head = mmap.mmap(file.fileno(), HEADER_BYTES)
        self.views = {entry.name: self.memory.view(entry) for entry in self.entries}
        if self.created:
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
        if self.created:
            self._synchronize()
            write_state(self._head, WeightState.CLEAN, version)

    def _synchronize(self) -> None:
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)

    def begin(self, version: int) -> None:
        """Call before the first write of an update.

        Raises WeightsError unless ``version`` is newer than the committed one, and where nothing is committed.
        """
        self._require_committed()
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
        self._require_committed()
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

        Raises WeightsError in the middle of an update, where nothing is committed, and where the model no longer trains
        what is shared.
        """
        self._require_committed()
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

    @torch.no_grad()
    def restore(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Makes the set CLEAN(``version``) with these values, whatever it was; the version may be an older one.

        ``tensors`` are all of the set's, by name, in memory of their own on any device. Where the set is that version
        and the same bit for bit it is left alone, and who runs on it is not disturbed: returns True then. Raises
        WeightsError for tensors of another model, and changes nothing.
        """
        self._compare(tensors)
        found = read_state(self.path)
        clean = self._writing is None and found == SetState(WeightState.CLEAN, version)
        kept = clean and all(_same_bits(self.views[name], tensor) for name, tensor in tensors.items())
        if not kept:
            self.version = NO_STATE
            write_state(self._head, WeightState.WRITING, version)
            for name, tensor in tensors.items():
                self.views[name].copy_(tensor)
            self._synchronize()
            write_state(self._head, WeightState.CLEAN, version)
        self.version, self._writing = version, None
        return kept

    def _compare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if odd := sorted(tensors.keys() ^ self.views.keys()):
            raise WeightsError(f"{self.path}: tensors {odd[:3]} are in the set or in what is restored, not in both")
        for name, tensor in tensors.items():
            found, wanted = (tensor.dtype, tensor.shape), (self.views[name].dtype, self.views[name].shape)
            if found != wanted:
                raise WeightsError(f"{self.path}: {name!r} to be restored is {found}, expected {wanted}")

    def _require_committed(self) -> None:
        if self.version == NO_STATE:
            raise WeightsError(
                f"{self.path}: its last writer died in the middle of an update and left torn weights: restore a saved "
                "state before using them"
            )


def _same_bits(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN is NaN here, and 0 is not -0."""
    mine, other = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (mine, other.to(mine.device)))
    return torch.equal(mine, other)


def _left_by_earlier(path: Path) -> SetState | None:
    """What an earlier writer left. None where it died before it wrote anything: nobody has ever been shown that set."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        blank = not any(file.read(HEADER_BYTES))
    return None if blank else read_state(path)


def _create_state_page(path: Path) -> None:
    """The file beside a GPU buffer. Always a new one, like the buffer."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, HEADER_BYTES)
    finally:
        os.close(descriptor)
