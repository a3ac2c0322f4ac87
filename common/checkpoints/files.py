"""The files of a saved state: checksums, and names that appear when everything behind them is whole (torch-free)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

CHECKSUMS, COUNTERS = "checksums.json", "counters.json"
PIECE_BYTES = 64 * 2**20
"""A file's digest is that of its pieces' digests, so that several threads can compute it."""
_DIGEST_BYTES = 16
_MAX_THREADS = 8


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


def seal(directory: Path) -> Sealed:
    """Writes the checksums of what lies in a directory, and makes all of it durable."""
    files = {path.name: FileSum(path.stat().st_size, file_digest(path)) for path in sorted(directory.iterdir())}
    digest = _digest_of(files)
    write_durably(directory / CHECKSUMS, msgspec.json.format(msgspec.json.encode(Checksums(files, digest))))
    _sync(directory)
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


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        descriptor = file.fileno()
        starts = range(0, os.fstat(descriptor).st_size, PIECE_BYTES)

        def piece(start: int) -> bytes:
            return blake2b(os.pread(descriptor, PIECE_BYTES, start), digest_size=_DIGEST_BYTES).digest()

        if len(starts) <= 1:
            pieces = [piece(start) for start in starts]
        else:
            with ThreadPoolExecutor(min(_MAX_THREADS, len(starts), os.cpu_count() or 1)) as threads:
                pieces = list(threads.map(piece, starts))
    return blake2b(b"".join(pieces), digest_size=_DIGEST_BYTES).hexdigest()


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
    _sync(target.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
