"""Reading a saved state: nothing is taken from a file whose checksum was not compared, and no object but those that
``torch.distributed.checkpoint`` needs is ever made.

That format keeps its metadata in a pickle, which can name any function of any module. Here it is read by an unpickler
that knows a fixed list of plain classes, and two look-ups: of a layout, and of an enumeration's member, by its name.
Tensors are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Container, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from common.checkpoints.files import COUNTERS, CheckpointError, read_counters, verify
from common.checkpoints.writer import many_ranks

METADATA = ".metadata"

_CLASSES: Final = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,  # pyright: ignore[reportPrivateUsage]
    filesystem._StorageInfo,  # pyright: ignore[reportPrivateUsage]
    torch.Size,
)
_LAYOUT: Final = ("torch.serialization", "_get_layout")
"""What a tensor's layout is pickled as: a look-up of its name."""
_MEMBER: Final = ("builtins", "getattr")
"""What Python 3.11.0 to 3.11.3 pickle a member of an enumeration as: a look-up of its name in the class."""
_DTYPES: Final = frozenset(
    str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)
)


class _PlainUnpickler(pickle.Unpickler):
    """Makes objects of ``_CLASSES`` alone."""

    _known: Final[Mapping[tuple[str, str], Any]] = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (known := self._known.get((module_name, global_name))) is not None:
            return known
        if module_name == "torch" and global_name in _DTYPES:
            return getattr(torch, global_name)
        if (module_name, global_name) == _MEMBER:
            return _member
        if (module_name, global_name) == _LAYOUT:
            return torch.serialization._get_layout  # pyright: ignore[reportPrivateUsage]
        raise pickle.UnpicklingError(f"{module_name}.{global_name} has no business in the metadata of tensors")


def _member(kind: object, name: object) -> Enum:
    """Stands in for ``getattr``, which would get at anything."""
    if isinstance(kind, type) and issubclass(kind, Enum) and kind in _CLASSES and isinstance(name, str):
        found = kind.__members__.get(name)
        if found is not None:
            return found
    raise pickle.UnpicklingError(f"getattr of {name!r} has no business in the metadata of tensors")


class _VerifiedFiles(FileSystemReader):
    """Reads what ``StateReader`` has checked; the metadata are its own."""

    def __init__(self, directory: Path, found: Metadata) -> None:
        super().__init__(directory)
        self._found = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._found


class StateReader:
    """A whole saved state. Raises CheckpointError where it is not.

    ``digest`` is what the save returned, where that is known; checksums in the directory are compared anyway.
    """

    def __init__(self, directory: Path, digest: str = "") -> None:
        self.directory = directory
        files = verify(directory, digest)
        for name in (METADATA, COUNTERS):
            if name not in files:
                raise CheckpointError(f"{directory / name} is missing in the state's checksums")
        self.counters = read_counters(directory)
        self._metadata = read_metadata(directory / METADATA, frozenset(files))
        self.tensors: dict[str, TensorStorageMetadata] = self._metadata.state_dict_metadata  # type: ignore[assignment]
        """Shape and dtype of each, by key."""

    def load(self, targets: Mapping[str, torch.Tensor], group: Any = None) -> None:
        """Reads these keys into these tensors, in place: views of shared memory stay what they are.

        Where there are several ranks all of them call this, with the same keys, each with its own shards. Raises
        CheckpointError before anything is written, for a key that is not there or of another shape or dtype; after
        it, where a file cannot be read.
        """
        self._compare(targets)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = _VerifiedFiles(self.directory, self._metadata)
        state: dict[str, Any] = {key: tensor.detach() for key, tensor in targets.items()}
        try:
            if many_ranks():
                load(state, storage_reader=reader, planner=planner, process_group=group)
                return
            # What ``checkpoint.load`` does for one rank, without its warning that there is one.
            planner.set_up_planner(state, self._metadata, True)
            reader.set_up_storage_reader(self._metadata, True)
            plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
            (plan,) = reader.prepare_global_plan(plans)
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:
            raise CheckpointError(f"{self.directory} cannot be read: {type(error).__name__}: {error}") from error

    def _compare(self, targets: Mapping[str, torch.Tensor]) -> None:
        for key, tensor in targets.items():
            saved = self.tensors.get(key)
            if saved is None:
                raise CheckpointError(f"{self.directory}: no tensor {key!r} was saved: another model's state?")
            found, wanted = (saved.size, saved.properties.dtype), (tensor.shape, tensor.dtype)
            if found != wanted:
                raise CheckpointError(
                    f"{self.directory}: {key!r} is {list(found[0])} of {found[1]}, expected {list(wanted[0])} of "
                    f"{wanted[1]}: another model's state?"
                )


def read_metadata(path: Path, files: Container[str]) -> Metadata:
    """What metadata say of tensors: each is whole, and lies in one of ``files``. Raises CheckpointError otherwise."""
    try:
        found = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        _check(path, found, files)
    except CheckpointError:
        raise
    except Exception as error:  # what is no pickle, or no metadata, raises whatever the first wrong byte leads to
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return found


def _check(path: Path, found: Any, files: Container[str]) -> None:
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path}: holds {type(found).__name__}, expected Metadata")
    for key, tensor in found.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise CheckpointError(f"{path}: {key!r} is {type(tensor).__name__}, expected a tensor")
        if not isinstance(getattr(tensor, "properties", None), metadata.TensorProperties):
            raise CheckpointError(f"{path}: {key!r} has no properties, expected its dtype there")
        covered, wanted = sum(chunk.sizes.numel() for chunk in tensor.chunks), tensor.size.numel()
        if covered != wanted:
            raise CheckpointError(f"{path}: {covered} elements of {key!r} were saved, expected {wanted}")
    for index, place in found.storage_data.items():
        if place.relative_path not in files:
            raise CheckpointError(f"{path}: {index.fqn!r} lies in {place.relative_path!r}, which has no checksum")
