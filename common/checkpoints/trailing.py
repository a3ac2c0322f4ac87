"""torch's files of a state, digested and brought to the disk while they grow: neither is left to do at their end."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem

from common.checkpoints.files import PIECE_BYTES, digest_threads, piece_digest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BUFFER_BYTES = 2**20


class TrailingFiles(FileSystem):
    """What ``FileSystemWriter`` writes through; a context, at whose end no thread of it works any more."""

    def __init__(self) -> None:
        self.begun: dict[str, dict[int, Future[bytes]]] = {}
        """For ``files.seal``: digests of whole pieces."""
        self._digesting = digest_threads()
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="disk")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for threads in (self._digesting, self._syncing):
            threads.shutdown(cancel_futures=True)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        place = Path(path)
        if mode != "wb" or place.suffix != DEFAULT_SUFFIX:
            with super().create_stream(place, mode) as stream:
                yield stream
            return
        pieces = self.begun[place.name] = {}
        syncs: list[Future[None]] = []

        def whole(start: int) -> None:
            pieces[start] = self._digesting.submit(piece_digest, place, start)
            if not syncs or syncs[-1].done():  # a disk that is slower gets more at a time
                syncs.append(self._syncing.submit(_sync, place))

        with io.BufferedWriter(_Growing(place, whole), _BUFFER_BYTES) as stream:
            yield stream
        for sync in syncs:
            sync.result()


class _Growing(io.FileIO):
    """A file that is written from its beginning to its end, once; ``whole`` is told the first byte of each piece."""

    def __init__(self, path: Path, whole: Callable[[int], None]) -> None:
        super().__init__(path, "wb")
        self._whole = whole
        self._end = self._told = 0

    def write(self, data: ReadableBuffer, /) -> int:
        if self.tell() != self._end:
            raise OSError(f"{self.name}: written at byte {self.tell()}, expected the end, {self._end}")
        count = super().write(data)
        self._end += count
        while self._end - self._told >= PIECE_BYTES:
            self._whole(self._told)
            self._told += PIECE_BYTES
        return count


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
