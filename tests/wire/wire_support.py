"""What the wire tests share: processes, a coordinator's end of the bus, and waiting with deadlines."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from common import bus, config_loading, processes
from common.config import Config, CriticConfig, RolloutConfig, TimeoutsConfig, TrainerConfig
from common.config_loading import to_json
from common.config_values import learner_roles
from common.messages import PROTOCOL, Evaluate, Hello, Lease, Message, Ready, Role, UpdateCommitted, Welcome
from common.run_files import SharedDirectory
from services.coordinator.conversation import Conversation
from services.coordinator.dispatch import Dispatcher
from services.coordinator.journal import Journal
from services.coordinator.learners import Learners
from services.coordinator.ledger import Ledger
from services.coordinator.member import Member
from services.coordinator.members import Members
from services.coordinator.publisher import Publisher
from services.coordinator.states import SavedStates
from tests.wire.scripted_values import committed, proved

SCRIPT = str(Path(__file__).with_name("scripted_replica.py"))
WITHIN_S = 20.0
T = TypeVar("T")
M = TypeVar("M", bound=Message)


def play(scenario: Coroutine[Any, Any, T], within: float = 60.0) -> T:
    """Runs a scenario on the services' event loop; TimeoutError at the deadline."""

    async def limited() -> T:
        return await asyncio.wait_for(scenario, within)

    return uvloop.run(limited())


async def until(holds: Callable[[], bool], what: str, within: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {within:g} s in vain: {what}")
        await asyncio.sleep(0.01)


async def soon(waited: Awaitable[T], within: float = WITHIN_S) -> T:
    return await asyncio.wait_for(waited, within)


class Processes:
    """Starts scripted replicas and leaves none behind."""

    def __init__(self, shared: SharedDirectory, folder: Path) -> None:
        self.shared = shared
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, role: Role, number: int = 0, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, SCRIPT, role, str(number), self.shared.endpoint, str(self.folder), *words]
        with (self.folder / f"log-{len(self.started)}").open("wb") as log:
            process = subprocess.Popen(command, stderr=log)
        self.started.append(process)
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"log-{self.started.index(process)}").read_text()

    async def ended(self, process: subprocess.Popen[bytes], within: float = WITHIN_S) -> tuple[int, str]:
        """Exit code and standard error of a process that ends by itself."""
        await until(lambda: process.poll() is not None, f"the end of process {process.pid}", within)
        return process.returncode, self.log(process)

    def go(self) -> None:
        """Lets blocked services work."""
        (self.folder / "go").touch()

    def noted(self, role: Role, number: int = 0) -> list[str]:
        """What the service wrote down about its leases."""
        path = self.folder / f"leases-{role}-{number}"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


def welcome(shared: SharedDirectory, config: Config, epoch: int = 1, cache_path: str = "") -> Welcome:
    return Welcome(
        epoch=epoch,
        run=shared.path.name.removeprefix("quartet-"),
        cache_path=cache_path,
        run_directory=str(shared.path),
        shm_directory=str(shared.path),
        config=config_loading.to_json(config),
    )


def patient(device: str = "cpu", /, **timeouts: float) -> Config:
    """Two rollout replicas at most, quick heartbeats, and the given timeouts."""
    return Config(
        rollout=RolloutConfig(replicas=1, device=device),
        trainer=TrainerConfig(device=device),
        critic=CriticConfig(device=device),
        timeouts=TimeoutsConfig(**{"heartbeat": 0.2, "stop": 4.0} | timeouts),
    )


PATIENT = patient(start=30.0)


class Star:
    """The coordinator's end without the training loop: members, leases, learners, publishing, and the conversation.

    Another one in the same directory is the run's next coordinator: it has the next epoch, and the same ledger.
    """

    def __init__(self, shared: SharedDirectory, config: Config, cache_path: str = "") -> None:
        self.ledger = Ledger(shared.path / "ledger.sqlite", to_json(config), 0)
        self.journal = Journal(self.ledger)
        self.router = bus.Router(shared.endpoint)
        self.members = Members(self.router, welcome(shared, config, self.ledger.epoch, cache_path), shared.processes)
        self.dispatcher = Dispatcher(self.members, config.timeouts.start, self.journal)
        self.publisher = Publisher(self.members, self.dispatcher.next_work, config.timeouts.update)
        roles = learner_roles(config)
        directory, run = shared.path / "checkpoints", self.members.welcome.run
        self.states = SavedStates(directory, run, self.ledger.epoch, roles, config.checkpoint)
        self.states.scan()
        self.learners = Learners(config, self.members, self.dispatcher, self.publisher, self.states)
        self.talk = Conversation(
            config, self.router, self.members, self.dispatcher, self.publisher, self.ledger, self.learners
        )
        self.deaths: list[tuple[str, str, float]] = []
        bury = self.talk.on_death

        def on_death(member: Member, reason: str) -> None:
            self.deaths.append((member.name, reason, time.monotonic()))
            bury(member, reason)

        self.members.on_death = on_death

    def commit(self, version: int, gpu: str = "") -> None:
        """What a trainer commits, without its proof."""
        manifest = committed(version, gpu)
        self.publisher.committed(UpdateCommitted(epoch=self.ledger.epoch, work=0, manifest=manifest))
        self.talk.weights.changed()

    def prove(self, version: int) -> None:
        self.publisher.proved(proved(version))

    async def ready(self, role: Role, count: int = 1) -> list[Member]:
        await until(lambda: len(self.members.of_role(role)) == count, f"{count} ready {role}")
        return self.members.of_role(role)


@asynccontextmanager
async def star(shared: SharedDirectory, config: Config, cache_path: str = "") -> AsyncGenerator[Star]:
    """A coordinator's end that listens; fails if listening failed and the test did not expect it."""
    coordinator = Star(shared, config, cache_path)
    tasks = [asyncio.create_task(coordinator.talk.listen()), asyncio.create_task(coordinator.talk.probe())]
    try:
        yield coordinator
        failed = [task.exception() for task in tasks if task.done()]
        assert not failed, f"the conversation failed: {failed}"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        coordinator.dispatcher.close()
        coordinator.learners.close()
        coordinator.talk.close()
        coordinator.members.close()
        coordinator.router.close()
        coordinator.ledger.close()


def hello(
    role: Role, identity: str, *, epoch: int = 0, protocol: int = PROTOCOL, pid_space: str = "elsewhere"
) -> Hello:
    """A greeting of a replica on another host: its process cannot be watched."""
    return Hello(
        epoch=epoch,
        role=role,
        replica=0,
        identity=identity,
        protocol=protocol,
        host="elsewhere",
        pid_space=pid_space,
        pid=1,
        pid_start=processes.process_start(1),
    )


async def next_from(router: bus.Router, kind: type[M], within: float = WITHIN_S) -> tuple[bytes, M]:
    """The next message of a kind; others are skipped."""
    deadline = time.monotonic() + within
    while True:
        peer, message = await asyncio.wait_for(router.receive(), deadline - time.monotonic())
        if isinstance(message, kind):
            return peer, message


async def next_of(dealer: bus.Dealer, kind: type[M], within: float = WITHIN_S) -> M:
    deadline = time.monotonic() + within
    while True:
        message = await asyncio.wait_for(dealer.receive(), deadline - time.monotonic())
        if isinstance(message, kind):
            return message


def lease(work: int, epoch: int = 1) -> Lease:
    return Lease(epoch=epoch, work=work, step=1, phase="EVALUATE", deadline_s=60.0, task=Evaluate(refs=[]))


@asynccontextmanager
async def listening(shared: SharedDirectory) -> AsyncGenerator[bus.Router]:
    router = bus.Router(shared.endpoint)
    try:
        yield router
    finally:
        router.close()


async def join(router: bus.Router, shared: SharedDirectory, config: Config = PATIENT) -> tuple[bytes, Hello]:
    """Welcomes one replica and waits until it is ready."""
    peer, hello = await next_from(router, Hello)
    router.send(peer, welcome(shared, config))
    await next_from(router, Ready)
    return peer, hello


async def heard_for(router: bus.Router, seconds: float) -> list[object]:
    """Everything that arrives in a span of time."""
    found: list[object] = []
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            found.append((await asyncio.wait_for(router.receive(), left))[1])
        except TimeoutError:
            break
    return found
