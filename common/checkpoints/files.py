"""The files of a saved state: checksums, and names that appear when everything behind them is whole (torch-free)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from common.records import sync_directory

CHECKSUMS, COUNTERS = "checksums.json", "counters.json"
PIECE_BYTES = 64 * 2**20
"""A file's digest is that of its pieces' digests, so that several threads can compute it."""
_READ_BYTES = 2**20
_DIGEST_BYTES = 16
_MAX_THREADS = 8
Begun = Mapping[str, Mapping[int, "Future[bytes]"]]
"""Digests of pieces that are known, or under way: by file name, then by the piece's first byte."""


class CheckpointError(Exception):
    """A saved state is missing, torn, altered or another model's, or cannot be written; names the file and the key."""


class FileSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nbytes: int
    digest: str


class Checksums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, FileSum]
    digest: str
    """Of ``files``; whoever keeps it elsewhere knows that this is the very state that was saved."""


@dataclass(frozen=True)
class Sealed:
    """A whole directory: bytes of all its files, and the digest that stands for all of them."""

    nbytes: int
    digest: str


def seal(directory: Path, begun: Begun | None = None) -> Sealed:
    """Writes the checksums of what lies in a directory, and makes all of it durable.

    ``begun``: what is known already of pieces that are not written to any more.
    """
    known = begun or {}
    files = {
        path.name: FileSum(path.stat().st_size, file_digest(path, known.get(path.name, {})))
        for path in sorted(directory.iterdir())
    }
    digest = _digest_of(files)
    write_durably(directory / CHECKSUMS, msgspec.json.format(msgspec.json.encode(Checksums(files, digest))))
    sync_directory(directory)
    nbytes = sum(file.nbytes for file in files.values()) + (directory / CHECKSUMS).stat().st_size
    return Sealed(nbytes, digest)


def verify(directory: Path, digest: str = "") -> Mapping[str, FileSum]:
    """The files of a whole directory, every byte of which has been read and compared.

    ``digest`` is what ``seal`` returned, where that is known. Raises CheckpointError, naming the file, for one that is
    missing or differs.
    """
    path = directory / CHECKSUMS
    try:
        sums = msgspec.json.decode(path.read_bytes(), type=Checksums)
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory}: there is no whole saved state here: {CHECKSUMS} is missing") from error
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if (found := _digest_of(sums.files)) != sums.digest:
        raise CheckpointError(f"{path}: digest {found}, expected {sums.digest}: this file was altered")
    if digest and digest != sums.digest:
        raise CheckpointError(f"{path}: digest {sums.digest}, expected {digest}: this is not the state that was saved")
    for name, expected in sums.files.items():
        _verify_file(directory, name, expected)
    return sums.files


def _verify_file(directory: Path, name: str, expected: FileSum) -> None:
    path = directory / name
    if Path(name).name != name:
        raise CheckpointError(f"{directory / CHECKSUMS}: {name!r} is no file of this directory")
    try:
        nbytes = path.stat().st_size
        if nbytes != expected.nbytes:
            raise CheckpointError(f"{path}: {nbytes} bytes, expected {expected.nbytes}")
        found = file_digest(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if found != expected.digest:
        raise CheckpointError(f"{path}: digest {found}, expected {expected.digest}: its content was altered")


def read_counters(directory: Path) -> dict[str, int]:
    """Raises CheckpointError where the file is not what ``write_durably`` was given."""
    path = directory / COUNTERS
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def digest_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="checksums")


def file_digest(path: Path, begun: Mapping[int, Future[bytes]] | None = None) -> str:
    """``begun``: pieces whose digest is known, or under way elsewhere. Raises OSError."""
    known = dict(begun or {})
    starts = range(0, path.stat().st_size, PIECE_BYTES)
    with digest_threads() as threads:
        pieces = [known.get(start) or threads.submit(piece_digest, path, start) for start in starts]
        digests = [piece.result() for piece in pieces]
    return blake2b(b"".join(digests), digest_size=_DIGEST_BYTES).hexdigest()


def piece_digest(path: Path, start: int) -> bytes:
    """Of ``PIECE_BYTES`` from ``start``, or of those up to the file's end. Raises OSError."""
    digest, buffer = blake2b(digest_size=_DIGEST_BYTES), memoryview(bytearray(_READ_BYTES))
    end = start + PIECE_BYTES
    with path.open("rb", buffering=0) as file:
        # Little by little into the same memory: new memory for each piece costs as much as its digest.
        while start < end and (count := os.preadv(file.fileno(), [buffer[: end - start]], start)):
            digest.update(buffer[:count])
            start += count
    return digest.digest()


def _digest_of(files: Mapping[str, FileSum]) -> str:
    return blake2b(msgspec.json.encode(files, order="deterministic"), digest_size=_DIGEST_BYTES).hexdigest()


# ---------------------------------------------------------------- names


def begin_unfinished(target: Path) -> Path:
    """An empty directory in which this process makes what will be ``target``.

    What earlier processes left unfinished there is removed: of a role there is one at a time.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(left)
    directory = target.with_name(f".{target.name}.{os.getpid()}")
    directory.mkdir()
    return directory


def publish(directory: Path, target: Path) -> None:
    """Gives a sealed directory its name, in the place of an earlier one.

    Killed between the two renames, a process leaves nothing under the name, and never a half of either.
    """
    earlier = directory.with_name(directory.name + ".earlier")
    if target.exists():
        target.rename(earlier)
    directory.rename(target)
    sync_directory(target.parent)
    shutil.rmtree(earlier, ignore_errors=True)
