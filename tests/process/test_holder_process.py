"""The holder as a process of its own: it joins without a token cache, refuses clearly, and ends when it is told to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.messages import Evaluate, Failed, Hello, HostBuffer, Task
from common.run_files import SharedDirectory
from common.run_lock import RunLock
from services.coordinator.leases import LeaseLost
from tests.wire.wire_support import PATIENT, Star, listening, next_from, play, soon, star, until, welcome

GPU = "GPU-00000000-0000-0000-0000-000000000000"


class Holder:
    """Starts the service's own program with its standard error in a file."""

    def __init__(self, shared: SharedDirectory, log: Path, **environment: str) -> None:
        self.log = log
        command = [sys.executable, "-P", "-m", "services.holder", "--run", shared.path.name.removeprefix("quartet-")]
        root = str(Path(__file__).resolve().parents[2])
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stderr=output, env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"} | environment
            )

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None, "the holder's end")
        return self.process.returncode


@pytest.fixture
def shared(run_lock: RunLock) -> SharedDirectory:
    return run_lock.shared


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    started: list[Holder] = []
    yield started
    for holder in started:
        holder.process.kill()
        holder.process.wait()


async def refusal(coordinator: Star, task: Task) -> str:
    with pytest.raises(LeaseLost) as caught:
        await soon(coordinator.dispatcher.submit("holder", "PUBLISH", 1, task, 20.0))
    assert caught.value.kind == "failed"
    return str(caught.value)


def test_it_refuses_a_gpu_that_is_not_there_and_other_work(
    shared: SharedDirectory, tmp_path: Path, holders: list[Holder]
) -> None:
    async def scenario() -> None:
        async with star(shared, PATIENT) as coordinator:
            holders.append(Holder(shared, tmp_path / "log"))
            await coordinator.ready("holder")
            wanted = HostBuffer(name="policy", nbytes=4096, gpu=GPU)
            assert f"GPU '{GPU}' is not among those that this process sees" in await refusal(coordinator, wanted)
            assert "holder cannot carry out Evaluate" in await refusal(coordinator, Evaluate(refs=[]))
            coordinator.members.stop_all("the test is over")
            assert await coordinator.members.until_all_gone(5.0) == []
            assert await holders[0].ended() == 0

    play(scenario())


def test_it_does_not_start_where_its_memory_could_not_be_shared(
    shared: SharedDirectory, tmp_path: Path, holders: list[Holder]
) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            holders.append(Holder(shared, tmp_path / "log", PYTORCH_ALLOC_CONF="expandable_segments:True"))
            peer, _ = await next_from(router, Hello)
            router.send(peer, welcome(shared, PATIENT))
            _, failed = await next_from(router, Failed)
            assert "PYTORCH_ALLOC_CONF is 'expandable_segments:True'" in failed.message
            assert await holders[0].ended() == 1

    play(scenario())
