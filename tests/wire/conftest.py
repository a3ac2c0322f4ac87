"""Fixtures of the wire tests: a run's shared directory and the processes that belong to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.run_files import SharedDirectory
from tests.wire.wire_support import Processes


@pytest.fixture
def shared(run_name: str) -> SharedDirectory:
    """The run's directory in shared memory; ``run_name`` removes it."""
    directory = SharedDirectory.of_run(run_name)
    directory.path.mkdir(mode=0o700)
    return directory


@pytest.fixture
def replicas(shared: SharedDirectory, tmp_path: Path) -> Iterator[Processes]:
    started = Processes(shared, tmp_path)
    yield started
    started.close()
