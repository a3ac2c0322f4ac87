"""Fixtures of the wire tests: a run's shared directory and the processes that belong to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.run_files import SharedDirectory
from common.run_lock import RunLock
from tests.wire.wire_support import Processes


@pytest.fixture
def shared(run_lock: RunLock) -> SharedDirectory:
    """The run's directory in shared memory, locked, so that no other run on this machine takes it for a dead one's."""
    return run_lock.shared


@pytest.fixture
def replicas(shared: SharedDirectory, tmp_path: Path) -> Iterator[Processes]:
    started = Processes(shared, tmp_path)
    yield started
    started.close()
