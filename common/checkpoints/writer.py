"""Writing a staged state: ``torch.distributed.checkpoint``, checksums, rename."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_crc32_options, set_crc32_options

from common.checkpoints.files import (
    COUNTERS,
    Begun,
    CheckpointError,
    Sealed,
    begin_unfinished,
    publish,
    seal,
    write_durably,
)
from common.checkpoints.trailing import TrailingFiles

Result = TypeVar("Result")


@dataclass(frozen=True)
class Written:
    """A saved state: bytes on disk, how long that took, and its digest (``files.verify``)."""

    nbytes: int
    seconds: float
    digest: str


class _TensorFiles(FileSystemWriter):
    def storage_meta(self) -> None:
        """Otherwise the metadata hold the directory's unfinished name, which is no part of the state."""


def many_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_first(group: Any) -> bool:
    return not many_ranks() or dist.get_rank(group) == 0


def write_state(
    target: Path, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, int], group: Any = None
) -> Written:
    """Writes tensors on the CPU and counters; ``target`` appears, or is replaced, when all of it is durable.

    Where there are several ranks all of them call this, with the same keys: of a DTensor each writes its own shard.
    Raises CheckpointError, naming the directory, where it cannot be written; nothing is left of it then.
    """
    started = time.monotonic()
    try:
        directory = on_first_rank(lambda: begin_unfinished(target), group)
        try:
            with TrailingFiles() as files:
                _write_tensors(directory, tensors, files, group)
                sealed = on_first_rank(lambda: _finish(directory, target, counters, files.begun), group)
        finally:
            if _is_first(group):
                shutil.rmtree(directory, ignore_errors=True)
    except Exception as error:
        # torch has errors of its own for a full disk, and none says which directory.
        raise CheckpointError(f"{target}: the state cannot be saved: {type(error).__name__}: {error}") from error
    return Written(sealed.nbytes, time.monotonic() - started, sealed.digest)


def _finish(directory: Path, target: Path, counters: Mapping[str, int], begun: Begun) -> Sealed:
    write_durably(directory / COUNTERS, msgspec.json.encode(counters))
    sealed = seal(directory, begun)
    publish(directory, target)
    return sealed


@contextmanager
def _without_crc32() -> Generator[None]:
    """torch.save sums each tensor for whoever unzips the file; torch.load does not look, and ``seal`` sums it all."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


@_without_crc32()
def _write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], files: TrailingFiles, group: Any) -> None:
    # Keys are flat already. Several threads of torch's writer would lose the errors of all but one of them, and reading
    # ahead is for tensors on a GPU.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = _TensorFiles(directory, thread_count=1, per_thread_copy_ahead=0)
    writer.fs = files
    state: dict[str, Any] = dict(tensors)
    if many_ranks():
        save(state, storage_writer=writer, planner=planner, process_group=group)
        return
    # What ``checkpoint.save`` does for one rank, without its warning that there is one.
    writer.reset()
    planner.set_up_planner(state, storage_meta=None, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def on_first_rank(work: Callable[[], Result], group: Any = None) -> Result:
    """The result of the first rank's work on all of them, or its error. All ranks must call this."""
    if not many_ranks():
        return work()
    if not _is_first(group):
        result, failed = _from_first((None, ""), group)
        if failed:
            raise CheckpointError(f"the first rank failed: {failed}")
        return result
    try:
        result = work()
    except Exception as error:
        _from_first((None, f"{type(error).__name__}: {error}"), group)
        raise
    _from_first((result, ""), group)
    return result


def _from_first(answer: tuple[Any, str], group: Any) -> tuple[Any, str]:
    box = [answer]
    dist.broadcast_object_list(box, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return box[0]
