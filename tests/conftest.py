"""What all tests share: one thread a process, reproducible properties, runs with a name of their own, waiting."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Before anything imports torch or numpy, and for every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)

import pytest
from hypothesis import settings

from common.run_files import SharedDirectory
from common.run_lock import RunLock
from tools.clean import clean

settings.register_profile("quartet", deadline=None, derandomize=True, database=None)
settings.load_profile("quartet")

POLL_S = 0.02


def wait_until(holds: Callable[[], bool], what: str, within: float = 20.0) -> None:
    """Polls until ``holds()``; fails the test with ``what`` at the deadline."""
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {within:g} s in vain: {what}", pytrace=True)
        time.sleep(POLL_S)  # the interval of a poll that has a deadline; no test rests on its length


@pytest.fixture(name="wait_until", scope="session")
def wait_until_fixture() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def run_name() -> Iterator[str]:
    """A name that no other run has; whatever a failed test leaves in /dev/shm under it is removed."""
    name = f"test-{uuid.uuid4().hex[:10]}"
    yield name
    clean(name)


@pytest.fixture
def run_lock(run_name: str) -> Iterator[RunLock]:
    """This process coordinates the run ``run_name``."""
    lock = RunLock.acquire(SharedDirectory.of_run(run_name))
    yield lock
    lock.release()
