"""The lock that keeps a run's directory to one user: who starts in another /dev/shm knows nothing of this run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_folder(folder: Path) -> int | None:
    """Locks an existing directory until the returned descriptor is closed; None where somebody else has it.

    Raises OSError where it cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
