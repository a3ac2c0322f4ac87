"""Creating and opening the token cache's file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec

from common.token_cache.header import Creator, Header, read_header, verify_header
from common.token_cache.layout import CacheError, Geometry, Layout

_GIB = 2**30


def create_file(path: Path, run: str, fingerprint: str, geometry: Geometry) -> int:
    """Creates the file under its final name only when it is complete; returns its descriptor."""
    layout = Layout.of(geometry)
    header = Header(geometry, layout.file_size, run, fingerprint, Creator.current()).pack(path)
    if path.exists():
        raise _exists(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise CacheError(f"{path}: cannot be created: {error.strerror}; its directory must exist") from error
    try:
        _fill(path, fd, layout, header)
        os.link(draft, path)
    except FileExistsError:
        os.close(fd)
        raise _exists(path) from None
    except BaseException:
        os.close(fd)
        raise
    finally:
        draft.unlink()
    return fd


def open_file(path: Path, run: str, fingerprint: str, write: bool) -> tuple[int, Header]:
    """Opens and verifies a cache; returns its descriptor and header."""
    try:
        fd = os.open(path, os.O_RDWR if write else os.O_RDONLY)
    except OSError as error:
        raise CacheError(
            f"{path}: cannot be opened: {error.strerror}; expected the cache of run {run!r}; its coordinator creates "
            "it, so start that first"
        ) from error
    try:
        header = read_header(path, fd)
        verify_header(path, header, run, fingerprint)
    except BaseException:
        os.close(fd)
        raise
    return fd, header


def take_over(path: Path, fd: int, header: Header) -> None:
    """Writes this process into the header as the creator."""
    os.pwrite(fd, msgspec.structs.replace(header, creator=Creator.current()).pack(path), 0)


def _fill(path: Path, fd: int, layout: Layout, header: bytes) -> None:
    space = os.fstatvfs(fd)
    free = space.f_bavail * space.f_frsize
    # A tmpfs without a limit reports no blocks at all.
    if space.f_blocks and layout.file_size > free:
        raise _too_large(path, layout, free)
    try:
        os.truncate(fd, layout.file_size)
        os.posix_fallocate(fd, 0, layout.fixed_end)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
            raise _too_large(path, layout, free) from error
        raise
    os.pwrite(fd, header, 0)


def _too_large(path: Path, layout: Layout, free: int) -> CacheError:
    g = layout.geometry
    return CacheError(
        f"{path}: the token cache needs {_size(layout.file_size)}, but {_size(free)} are free in {path.parent}: "
        f"{g.slots} slots take {_size(layout.stride * g.slots)} ({g.max_response_tokens} response tokens each), "
        f"{g.prompts} prompts take {_size(layout.bodies - layout.slot_table)} ({g.max_prompt_tokens} tokens each); "
        "lower cache.slots, cache.prompts or rollout.max_new_tokens, or make the file system larger"
    )


def _exists(path: Path) -> CacheError:
    return CacheError(
        f"{path}: exists already, expected no file; another coordinator runs, or one died: adopt() it, or remove what "
        "it left with 'quartet clean'"
    )


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB // 100 else f"{count / 1024:.0f} KiB"
