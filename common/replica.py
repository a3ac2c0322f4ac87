"""The life of a replica: Hello, Welcome, load, leases one after the other, Stop.

    main thread:    uvloop; answers the coordinator, sends heartbeats, repeats results until they are acknowledged
    worker thread:  builds the service (imports torch, loads the model) and computes, one order at a time

A service knows nothing of sockets: it gets a lease and returns a result, reports what happens in between through its
``Outbox`` (``common.outbox``), and gets at the memory of shared weights through its ``WeightExchange``: the replica.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import bus, config_loading
from common.config import Config
from common.config_values import weights_limit
from common.curve import ClientKeys
from common.last_words import exit_code, is_clear, reason_of
from common.log_lines import lines, working_on
from common.messages import (
    PROTOCOL,
    Ack,
    ApplyWeights,
    Failed,
    Health,
    Heartbeat,
    Hello,
    Lease,
    Leaving,
    Ready,
    Refused,
    Rehello,
    Role,
    Stop,
    WeightsDenied,
    WeightsGranted,
    Welcome,
    number_text,
)
from common.orders import Order, carry_out
from common.outbox import ReplicaOutbox
from common.processes import pid_space, process_start
from common.run_files import SharedDirectory, file_identity, is_open
from common.service import Assignment, ReplicaError, Service, ServiceFactory, WrongSetup
from common.versions import library_versions
from common.weight_exchange import WeightRequests

log = logging.getLogger("replica")

HELLO_INTERVAL_S, SILENT_HELLOS = 0.5, 6  # after so many a replica says what it waits for: a mistyped run name shows
SILENT_BEATS = 5
"""Heartbeats that a coordinator may miss before a replica tells of it."""
LEAVE_LIMIT_S = 50.0
"""Longest wait of a replica that was told to end until it is let go."""
CLOSE_LIMIT_S = 5.0
"""Longest wait for an idle service to clean up when the replica stops."""


class Replica:
    """One process's side of the bus. ``run`` returns the exit code."""

    def __init__(
        self, role: Role, number: int, endpoint: str, factory: ServiceFactory, keys: ClientKeys | None = None
    ) -> None:
        self.role: Role = role
        self.number = number
        self.factory = factory
        self.identity = str(uuid.uuid4())
        self.versions = library_versions()
        self.endpoint = endpoint
        self.keys = keys
        self.service: Service | None = None
        self.config = Config()
        self.cache_file: tuple[int, int] | None = None
        self.held: list[int] = []
        self.leaving = ""
        """Why it leaves; empty while it does not."""
        self.last_heard = time.monotonic()
        self.told_silent = False
        self.stopped: asyncio.Future[int]
        self.serving: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"{self.role} {number_text(self.number)}"

    async def run(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.stopped = self.loop.create_future()
        self.dealer = bus.Dealer(self.endpoint, self.identity, self.keys)
        self.orders: asyncio.Queue[Order] = asyncio.Queue()
        self.outbox = ReplicaOutbox(self.loop, self.dealer)
        self.requests = WeightRequests(self.loop, self.outbox.send)
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        for signum in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(signum, self.leave, f"signal {signum.name}")
        tasks = [asyncio.create_task(job) for job in (self.listen(), self.introduce(), self.beat())]
        for task in tasks:
            task.add_done_callback(self._end_with)
        code = await self.stopped
        for task in (*tasks, *([self.serving] if self.serving else [])):
            task.cancel()
        self.requests.close(f"{self.name} stops")
        await self.close_service()
        self.worker.shutdown(wait=False, cancel_futures=True)
        self.outbox.closed = True
        self.dealer.close(bus.LINGER_MS if self.outbox.epoch else 0)  # to whom nobody answered nobody listens
        return code

    def stop(self, code: int, reason: str) -> None:
        if not self.stopped.done():
            log.info("%s stops: %s", self.name, reason)
            self.stopped.set_result(code)

    def leave(self, reason: str) -> None:
        """Asks to be let go, which the coordinator does when nothing is owed, or when the run has ended for it.

        Stops at once where nobody listens, and when it is told a second time.
        """
        silent = time.monotonic() - self.last_heard > 2 * self.config.timeouts.heartbeat
        if self.leaving or not self.outbox.epoch or silent:
            self.stop(0, reason)
            return
        self.leaving = reason
        self.outbox.send(Leaving(epoch=self.outbox.epoch))
        self.loop.call_later(LEAVE_LIMIT_S, self.stop, 0, f"{reason}, and not let go within {LEAVE_LIMIT_S:.0f} s")

    def _end_with(self, task: asyncio.Task[None]) -> None:
        """The end of a job is the end of the replica; the coordinator is told why, so that it can name the cause."""
        error = None if task.cancelled() else task.exception()
        if error is None or self.stopped.done():
            return
        reason = reason_of(error)
        log.error("%s failed: %s", self.name, reason, exc_info=None if is_clear(error) else error)
        if self.outbox.epoch:
            self.outbox.send(Failed(epoch=self.outbox.epoch, work=0, kind="error", message=reason))
        self.stop(exit_code(error), reason)

    async def close_service(self) -> None:
        """Lets an idle service clean up. A busy one ends with the process: nobody waits for a computation."""
        if self.service is None or self.outbox.ready is None or self.held:
            return
        try:
            await asyncio.wait_for(self.loop.run_in_executor(self.worker, self.service.close), CLOSE_LIMIT_S)
        except Exception:  # whatever a service's own close raises is told, and must not keep the replica from ending
            log.exception("%s did not close cleanly", self.name)

    # ------------------------------------------------------------ conversation

    async def introduce(self) -> None:
        """Says Hello until the coordinator welcomes this replica."""
        limit, started, hellos = self.config.timeouts.start, time.monotonic(), 0
        shared = SharedDirectory.of_socket(self.endpoint)
        while self.outbox.epoch == 0:
            if shared.has_ended():
                self.stop(0, "the run has ended")
                return
            if time.monotonic() - started > limit:
                raise ReplicaError(f"no coordinator answered at {self.endpoint} within {limit:.0f} s: is it running?")
            if (hellos := hellos + 1) == SILENT_HELLOS:
                log.info("no answer at %s yet, waits %.0f s; `quartet status` lists live runs", self.endpoint, limit)
            if is_open(self.endpoint):  # ZeroMQ would keep what is said before, without the secret
                self.say_hello()
            await asyncio.sleep(HELLO_INTERVAL_S)

    def say_hello(self) -> None:
        pid = os.getpid()
        self.dealer.send(
            Hello(
                epoch=self.outbox.epoch, role=self.role, replica=self.number, identity=self.identity, protocol=PROTOCOL,
                host=socket.gethostname(), pid_space=pid_space(), pid=pid, pid_start=process_start(pid),
                versions=self.versions, leases_held=list(self.held), leases_finished=self.outbox.unacknowledged(),
                secret=SharedDirectory.of_socket(self.endpoint).secret(),
            )
        )  # fmt: skip

    async def listen(self) -> None:
        while True:
            message = await self.dealer.receive()
            self.last_heard = time.monotonic()
            match message:
                case Lease() | ApplyWeights():
                    self.take(message)
                case WeightsGranted() | WeightsDenied():
                    self.requests.answer(message)
                case Ack(work=work):
                    self.outbox.acknowledge(work)
                case Heartbeat() | Health():
                    pass
                case Welcome():
                    self.welcome(message)
                case Rehello():
                    self.say_hello()
                case Refused(reason=reason):
                    raise WrongSetup(f"the coordinator refused {self.name}: {reason}")
                case Stop(reason=reason):
                    self.stop(0, reason)
                case bus.BadMessage(reason=reason):
                    raise ReplicaError(f"the coordinator sent what is no message of protocol {PROTOCOL}: {reason}")

    def take(self, order: Order) -> None:
        """Queues an order, unless it is of another epoch or comes again."""
        if order.epoch == self.outbox.epoch and order.work not in self.held:
            self.held.append(order.work)
            self.orders.put_nowait(order)
        else:
            log.info("ignored work %d of epoch %d in epoch %d", order.work, order.epoch, self.outbox.epoch)

    def welcome(self, message: Welcome) -> None:
        """Starts to load; or, when a new coordinator welcomes what it did not know, tells it what there is."""
        first, found = self.outbox.epoch == 0, file_identity(message.cache_path)
        if not first and found != self.cache_file:
            raise ReplicaError(
                f"the coordinator (epoch {message.epoch}) has another token cache at {message.cache_path} than the one "
                f"that {self.name} maps: start this replica again"
            )
        self.outbox.epoch, self.cache_file, self.number = message.epoch, found, message.replica
        lines.replica = self.number
        if not first:
            self.outbox.repeat_all()
            self.requests.repeat()
            if self.leaving:
                self.outbox.send(Leaving(epoch=self.outbox.epoch))
            return
        self.config = config_loading.from_json(message.config)
        assignment = Assignment(
            run=message.run, role=self.role, replica=self.number, config=self.config, cache_path=message.cache_path,
            shared=SharedDirectory(Path(message.shm_directory)), run_directory=message.run_directory,
            weights=self, give_up=self.give_up,
        )  # fmt: skip
        self.serving = asyncio.create_task(self.serve(assignment))
        self.serving.add_done_callback(self._end_with)

    async def serve(self, assignment: Assignment) -> None:
        """Loads, and then takes orders one after the other; each ends in exactly one acknowledged answer."""
        service = await self.load(assignment)
        while True:
            order = await self.orders.get()
            if isinstance(order, Lease):
                working_on(order.step, order.phase)
            answer = await self.loop.run_in_executor(self.worker, carry_out, service, order, self.outbox)
            self.held.remove(order.work)
            working_on(lines.step, "")
            self.outbox.renew(state=service.state())
            self.outbox.send_until_acknowledged(order.work, answer)

    async def load(self, assignment: Assignment) -> Service:
        started = time.monotonic()
        self.service = service = await self.loop.run_in_executor(self.worker, self.factory, assignment)
        committed = await self.loop.run_in_executor(self.worker, service.ready)
        log.info("%s is ready after %.1f s", self.name, time.monotonic() - started)
        manifest, proof = committed or (None, None)
        self.outbox.say_ready(Ready(epoch=0, manifest=manifest, proof=proof, state=service.state()))
        return service

    async def beat(self) -> None:
        """Heartbeats, repeated answers, and the end if the coordinator has been silent for ``timeouts.start``."""
        while True:
            interval, before = self.config.timeouts.heartbeat, time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            # While a computation kept the interpreter lock nobody could listen: that is not the coordinator's silence.
            self.last_heard = min(now, self.last_heard + max(0.0, now - before - interval))
            if not self.outbox.epoch:
                continue
            self.judge_silence(now - self.last_heard)
            self.outbox.send(Heartbeat(epoch=self.outbox.epoch, sent=now))
            self.outbox.repeat_due()

    def judge_silence(self, seconds: float) -> None:
        """Tells of a coordinator that is silent, once; raises ReplicaError when nobody waits for it any longer."""
        if SharedDirectory.of_socket(self.endpoint).has_ended():
            self.stop(0, "the run has ended")
        # Reward may be the only one that lives on in a /dev/shm of before; it has no state, and starts in no time.
        limit = self.config.timeouts.start / (3 if self.role == "reward" else 1)
        silent = f"the coordinator at {self.endpoint} has been silent for {seconds:.0f} s"
        if seconds > limit:
            raise ReplicaError(f"{silent} (timeouts.start)")
        before, self.told_silent = self.told_silent, seconds > SILENT_BEATS * self.config.timeouts.heartbeat
        if self.told_silent and self.leaving:
            self.stop(0, f"{self.leaving}, and {silent}")
        elif self.told_silent and not before:
            log.warning("%s, its own log may say why; waits up to %.0f s for it (timeouts.start)", silent, limit)

    # ------------------------------------------------------------ work

    def give_up(self, reason: str) -> None:
        """Any thread: this replica is of no more use, and ends although it has nothing to do."""
        self.loop.call_soon_threadsafe(self._give_up, reason)

    def _give_up(self, reason: str) -> None:
        if not self.stopped.done():
            log.error("%s", reason)
            self.outbox.send(Failed(epoch=self.outbox.epoch, work=0, kind="error", message=reason))
            self.stop(1, reason)

    # ------------------------------------------------------------ WeightExchange, for the worker thread

    def want(self, name: str, gpu: str, nbytes: int = 0) -> WeightsGranted:
        return self.requests.ask(name, gpu, nbytes, weights_limit(self.config, committed=not nbytes))
