"""The life of a replica: Hello, Welcome, load, leases one after the other, Stop.

    main thread:    uvloop; answers the coordinator, sends heartbeats, repeats results until they are acknowledged
    worker thread:  builds the service (imports torch, loads the model) and computes, one order at a time

A service knows nothing of sockets: it gets a lease and returns a result, and reports what happens in between through
its ``Outbox``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol

from common import bus, config_loading
from common.config import Config
from common.messages import (
    PROTOCOL, Ack, ApplyWeights, Done, Failed, FailureKind, FinishedSample, Heartbeat, Hello, Lease, Manifest, Message, Ready,
    Receipt, Refused, Rehello, ReleaseWeights, Result, Role, SamplesFinished, Stop, UpdateBegun, UpdateCommitted,
    WeightsApplied, Welcome,
)  # fmt: skip
from common.processes import process_start
from common.run_files import SharedDirectory

log = logging.getLogger("replica")

HELLO_INTERVAL_S = 0.5
REPEAT_INTERVAL_S = 2.0
REPORTED_PACKAGES = ("torch", "vllm", "transformers", "pyzmq", "msgspec", "numpy")


class ReplicaError(Exception):
    """Ends the replica with exit code 1; the message says what to do."""


class LeaseFailed(Exception):
    """Raised by a service where a lease failed in a way that the coordinator should know by kind."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


@dataclass(frozen=True)
class Assignment:
    """What the coordinator's Welcome gives to a service."""

    run: str
    role: Role
    replica: int
    config: Config
    shared: SharedDirectory
    cache_path: str
    run_directory: str


class Outbox(Protocol):
    """What a service may report while it works on a lease. Callable from the worker thread."""

    def samples_finished(self, work: int, samples: list[FinishedSample]) -> None: ...
    def update_begun(self, version: int) -> None: ...
    def update_committed(self, work: int, manifest: Manifest) -> None: ...


class Service(Protocol):
    """The computing part of a replica. Every method runs in the worker thread."""

    def ready(self) -> Manifest | None:
        """Called once when loaded; the trainer returns its first committed weights."""
        ...

    def handle(self, lease: Lease, outbox: Outbox) -> Result: ...
    def apply_weights(self, manifest: Manifest) -> Receipt: ...
    def cache_counts(self) -> tuple[int, int]:
        """Hits and misses of the token cache since the last call."""
        ...

    def close(self) -> None: ...


ServiceFactory = Callable[[Assignment], Service]


def library_versions() -> dict[str, str]:
    """Versions of the installed packages that matter on an edge, read without importing them."""
    versions: dict[str, str] = {}
    for name in REPORTED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


class Replica:
    """One process's side of the bus. ``run`` returns the exit code."""

    def __init__(self, role: Role, number: int, endpoint: str, factory: ServiceFactory) -> None:
        self.role: Role = role
        self.number = number
        self.factory = factory
        self.identity = str(uuid.uuid4())
        self.endpoint = endpoint
        self.epoch = 0
        self.service: Service | None = None
        self.config = Config()
        self.held: list[int] = []
        self.unacknowledged: dict[tuple[str, int], tuple[float, Message]] = {}
        self.last_heard = time.monotonic()
        self.stopped: asyncio.Future[int]
        self.ready_message: Ready | None = None

    async def run(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.stopped = self.loop.create_future()
        self.dealer = bus.Dealer(self.endpoint, self.identity)
        self.orders: asyncio.Queue[Lease | ApplyWeights] = asyncio.Queue()
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        for signum in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(signum, self.stop, 0, f"signal {signum.name}")
        tasks = [asyncio.create_task(job) for job in (self.listen(), self.introduce(), self.work(), self.beat())]
        for task in tasks:
            task.add_done_callback(self._end_with)
        code = await self.stopped
        for task in tasks:
            task.cancel()
        self.worker.shutdown(wait=False, cancel_futures=True)
        self.dealer.close()
        return code

    def stop(self, code: int, reason: str) -> None:
        if not self.stopped.done():
            log.info("%s %d stops: %s", self.role, self.number, reason)
            self.stopped.set_result(code)

    def _end_with(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        if not isinstance(error, ReplicaError):
            log.error("%s %d failed", self.role, self.number, exc_info=error)
        else:
            log.error("%s", error)
        self.stop(1, str(error))

    # ------------------------------------------------------------ conversation

    async def introduce(self) -> None:
        """Says Hello until the coordinator welcomes this replica."""
        deadline = time.monotonic() + self.config.timeouts.start
        while self.epoch == 0:
            if time.monotonic() > deadline:
                raise ReplicaError(f"no coordinator answered at {self.endpoint} within {self.config.timeouts.start:.0f} s: is it running?")
            self.say_hello()
            await asyncio.sleep(HELLO_INTERVAL_S)

    def say_hello(self) -> None:
        pid = os.getpid()
        self.dealer.send(
            Hello(
                epoch=self.epoch, role=self.role, replica=self.number, identity=self.identity, protocol=PROTOCOL,
                host=socket.gethostname(), pid=pid, pid_start=process_start(pid), versions=library_versions(),
                leases_held=list(self.held), leases_finished=[work for _, work in self.unacknowledged],
            )
        )  # fmt: skip

    async def listen(self) -> None:
        while True:
            message = await self.dealer.receive()
            self.last_heard = time.monotonic()
            match message:
                case Lease() | ApplyWeights():
                    if message.epoch == self.epoch:
                        self.held.append(message.work)
                        self.orders.put_nowait(message)
                case Ack(work=work):
                    for key in [key for key in self.unacknowledged if key[1] == work]:
                        del self.unacknowledged[key]
                case Heartbeat() | ReleaseWeights():
                    pass
                case Welcome():
                    await self.welcome(message)
                case Rehello():
                    self.say_hello()
                case Refused(reason=reason):
                    raise ReplicaError(f"the coordinator refused {self.role} {self.number}: {reason}")
                case Stop(reason=reason):
                    self.stop(0, reason)
                case bus.BadMessage(reason=reason):
                    raise ReplicaError(f"the coordinator sent what is no message of protocol {PROTOCOL}: {reason}")

    async def welcome(self, message: Welcome) -> None:
        first = self.epoch == 0
        self.epoch = message.epoch
        if not first:
            if self.ready_message is not None:
                self.send(self.ready_message)
            return
        self.config = config_loading.from_json(message.config)
        assignment = Assignment(
            run=message.run, role=self.role, replica=self.number, config=self.config,
            shared=SharedDirectory.of_run(message.run), cache_path=message.cache_path, run_directory=message.run_directory,
        )  # fmt: skip
        asyncio.create_task(self.load(assignment)).add_done_callback(self._end_with)

    async def load(self, assignment: Assignment) -> None:
        started = time.monotonic()
        self.service = await self.loop.run_in_executor(self.worker, self.factory, assignment)
        manifest = await self.loop.run_in_executor(self.worker, self.service.ready)
        log.info("%s %d is ready after %.1f s", self.role, self.number, time.monotonic() - started)
        self.ready_message = Ready(epoch=self.epoch, manifest=manifest)
        self.send(self.ready_message)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(self.config.timeouts.heartbeat)
            now = time.monotonic()
            if now - self.last_heard > self.config.timeouts.start:
                raise ReplicaError(f"the coordinator at {self.endpoint} has been silent for {now - self.last_heard:.0f} s")
            if self.epoch:
                self.send(Heartbeat(epoch=self.epoch, sent=now))
            for key, (since, message) in list(self.unacknowledged.items()):
                if now - since > REPEAT_INTERVAL_S:
                    self.unacknowledged[key] = (now, message)
                    self.dealer.send(message)

    # ------------------------------------------------------------ work

    async def work(self) -> None:
        """Takes orders one after the other; each ends in exactly one acknowledged answer."""
        while True:
            order = await self.orders.get()
            answer = await self.loop.run_in_executor(self.worker, self.carry_out, order)
            self.held.remove(order.work)
            self.send_until_acknowledged(order.work, answer)

    def carry_out(self, order: Lease | ApplyWeights) -> Message:
        """Worker thread: computes; every exception becomes a Failed that names it."""
        assert self.service is not None, "the coordinator leases only to replicas that are ready"
        started = time.monotonic()
        try:
            if isinstance(order, ApplyWeights):
                receipt = self.service.apply_weights(order.manifest)
                return WeightsApplied(epoch=self.epoch, work=order.work, version=order.manifest.version, receipt=receipt)
            result = self.service.handle(order, self)
            hits, misses = self.service.cache_counts()
        except LeaseFailed as error:
            log.error("work %d failed (%s): %s", order.work, error.kind, error)
            return Failed(epoch=self.epoch, work=order.work, kind=error.kind, message=str(error))
        except Exception as error:
            log.exception("work %d failed", order.work)
            return Failed(epoch=self.epoch, work=order.work, kind="error", message=f"{type(error).__name__}: {error}")
        return Done(
            epoch=self.epoch, work=order.work, result=result, started=started, ended=time.monotonic(), cache_hits=hits,
            cache_misses=misses, memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )  # fmt: skip

    def send(self, message: Message) -> None:
        self.dealer.send(message)

    def send_until_acknowledged(self, work: int, message: Message) -> None:
        self.unacknowledged[(type(message).__name__, work)] = (time.monotonic(), message)
        self.dealer.send(message)

    # ------------------------------------------------------------ Outbox, called from the worker thread

    def samples_finished(self, work: int, samples: list[FinishedSample]) -> None:
        self.loop.call_soon_threadsafe(self.send, SamplesFinished(epoch=self.epoch, work=work, samples=samples))

    def update_begun(self, version: int) -> None:
        self.loop.call_soon_threadsafe(self.send, UpdateBegun(epoch=self.epoch, version=version))

    def update_committed(self, work: int, manifest: Manifest) -> None:
        message = UpdateCommitted(epoch=self.epoch, work=work, manifest=manifest)
        self.loop.call_soon_threadsafe(self.send_until_acknowledged, work, message)
