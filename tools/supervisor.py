"""Runs the services of a run as local processes and ends them all together.

    start    one process a service, each in its own session (Ctrl-C reaches the supervisor alone), output to a log file;
             the guardian starts them (``tools/guardian.py``)
    watch    a pidfd of each; the coordinator's exit with code 0 is the end of the run
    death    what the dead left behind is killed, and the service is started again, the coordinator to take over from
             the dead one. The run fails, and names the dead with its last log lines, at the death that is one more than
             ``restart.limit`` without a finished step; at the holder's, since the shared memory on the GPU is its own;
             and at an end by decision: a coordinator's exit code 1, anybody's 2 (wrong use, or refused). Of what is not
             started again one reward or rollout replica may be missing while others of its role live
    stop     SIGTERM to the coordinator, which tells every replica to stop; SIGTERM to those that do not; SIGKILL at
             ``timeouts.stop``. The holder always comes last: the others compute on its memory. A second Ctrl-C kills
             at once

If the supervisor itself is killed, the guardian ends the services and all that they have started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field

from common import processes
from common.config import Config
from common.restarts import Deaths, wait_before
from common.run_files import RunDirectory, SharedDirectory
from common.run_lock import is_held_by, record_supervisor
from common.service import WRONG
from tools.children import Child, end_orphans, head_log, orphans, tail
from tools.display import Display, Feed, read_status
from tools.launch import CommandFactory, ServiceSpec, planned_services, service_environment
from tools.starter import ANSWER_S, GuardianGone, Starter

REFRESH_S = 0.25
REGISTER_POLL_S = 0.05
OBEY_S = 1.0
"""Time that replicas get to act on the coordinator's Stop once the coordinator is gone."""
KILLED_S = 30.0
"""Longest wait for a process that got SIGKILL; one in the middle of a GPU call takes seconds."""
COORDINATOR, HOLDER = "coordinator", "holder"
REPLACEABLE = frozenset({"reward", "rollout"})
SIGNAL_BASE = 128
"""Exit code of a command ended by signal n is 128 + n, as shells have it."""


@dataclass
class Supervisor:
    """One run. ``run`` returns the exit code: 0 done, 1 a service died, 128 + n ended by signal n. ``answer_s`` as in
    ``Starter``."""

    config: Config
    files: RunDirectory
    shared: SharedDirectory
    command: CommandFactory
    display: Display
    resume: bool = False
    answer_s: float = ANSWER_S
    children: list[Child] = field(default_factory=list[Child])
    """One for each service, the coordinator first: its latest process."""
    restarts: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])
    live: bool = False
    """Whether a coordinator of this run has had the lock: from then on there is something to take over."""
    stopping: bool = False
    hurrying: bool = False

    async def run(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self.loop.create_future()
        self.feed = Feed(self.shared, self.files)
        if self.resume:
            self.feed.skip()
        self.deaths = Deaths(self.config.restart.limit)
        self.bystanders = set(processes.descendants(os.getpid()))
        processes.adopt_orphans()  # the guardian's, should that be killed
        self.starter = Starter(self.config.run.name, self.config.timeouts.stop, self.guardian_stuck, self.answer_s)
        self.guardian_gone: asyncio.Future[None] = self.loop.create_future()
        self.loop.add_reader(self.starter.pidfd, self.guardian_ended)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.loop.add_signal_handler(sig, self.interrupted, sig)
        drawing = self.loop.create_task(self.keep_drawing(), name="the display")
        registering = self.loop.create_task(self.register_when_live(), name="the process list")
        for task in (drawing, registering):
            task.add_done_callback(self.helper_ended)
        try:
            self.start_all()
            return await self.ended
        finally:
            registering.cancel()
            await self.stop()
            self.starter.hang_up()
            await asyncio.wait([self.guardian_gone], timeout=self.answer_s)
            self.loop.remove_reader(self.starter.pidfd)
            self.starter.close()
            if drawing.cancel():
                self.draw()

    def start_all(self) -> None:
        try:
            with contextlib.suppress(GuardianGone):  # it will be told of
                for spec in planned_services(self.config):
                    self.children.append(self.start(spec))
        except OSError as error:
            self.display.note(f"error: {error}\nStopping the other services")
            self.end(1)

    def start(self, spec: ServiceSpec, after: Child | None = None) -> Child:
        log = self.files.log(spec.service, spec.replica)
        head_log(log, spec.name, after)
        pid = self.starter.start(spec.service, self.command(spec, self.starter.pid), service_environment(spec), log)
        child = Child(spec, pid, os.pidfd_open(pid), log, self.loop.create_future())
        self.loop.add_reader(child.pidfd, self.exited, child)
        if self.live:
            self.register(child)
        return child

    # ------------------------------------------------------------ watching

    def exited(self, child: Child) -> None:
        """The child is a zombie: its pid, and with it its process group, cannot be anybody else's yet."""
        self.loop.remove_reader(child.pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # what it started and left behind
        child.code = self.starter.reap(child.pid)
        os.close(child.pidfd)
        child.gone.set_result(None)
        processes.unregister(self.shared.processes, child.spec.service, child.spec.replica, child.pid)
        if not (self.stopping or self.ended.done()):
            self.judge(child)

    def judge(self, child: Child) -> None:
        coordinates = child.spec.service == COORDINATOR
        decided = child.code == WRONG or (coordinates and child.code == 1)
        if coordinates and child.code == 0:
            self.end(0)
        elif child.code == 0:
            # Told to stop by a coordinator that is about to end? Then its exit follows.
            self.loop.call_later(self.config.timeouts.stop, self.lost, child, "")
        elif decided or child.spec.service == HOLDER or not self.deaths.limit:
            self.lost(child, "")
        else:
            self.died(child)

    def died(self, child: Child) -> None:
        status = read_status(self.shared)
        number = self.deaths.count(child.spec.name, status.step if status else 0)
        if number > self.deaths.limit:
            self.lost(child, f"; death {number} without a finished step, with restart.limit = {self.deaths.limit}")
            return
        task = self.loop.create_task(self.restart(child, number), name=f"the restart of {child.spec.name}")
        self.restarts.add(task)
        task.add_done_callback(self.restarted)

    async def restart(self, child: Child, number: int) -> None:
        """Ends what the dead child left, so that its memory is free, waits, and starts its successor."""
        await self.end_orphans()
        await asyncio.sleep(wait_before(number))
        said = "".join(f": {line}" for line in tail(child.log, 1) if child.code != -signal.SIGKILL)
        successor = self.start(child.spec, child)
        self.children[self.children.index(child)] = successor
        count = f"death {number} of {self.deaths.limit} without a finished step"
        self.display.note(f"warning: {child.described}, started again as process {successor.pid} ({count}){said}")

    def restarted(self, task: asyncio.Task[None]) -> None:
        self.restarts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.ended.done():
            self.display.note(f"error: {task.get_name()} failed: {type(error).__name__}: {error}")
            self.end(1)

    def lost(self, child: Child, why: str) -> None:
        """What comes of a death after which there is no restart."""
        if self.stopping or self.ended.done():
            return
        if child.spec.service == COORDINATOR:
            self.blame_earlier_deaths()
        role = [other for other in self.children if other.spec.service == child.spec.service]
        alive = ", ".join(other.spec.name for other in role if other.code is None)
        if child.spec.service in REPLACEABLE and alive:
            self.display.note(f"warning: {child.obituary(why)}\nThe run goes on with {alive}")
        else:
            self.fail(child, why)

    def blame_earlier_deaths(self) -> None:
        """Those that ended with code 0 were told to by a coordinator that gave up: its log says why. But no replica is
        killed within a moment of its coordinator: those that are dead as well died before it."""
        for child in self.children:
            if child.code is None and child.dying():
                self.exited(child)

    def fail(self, child: Child, why: str) -> None:
        if not self.ended.done():
            dead = "".join(
                f"\nDead as well: {other.described}" for other in self.children if other.code and other != child
            )
            self.display.note(f"error: {child.obituary(why)}{dead}\nStopping the other services")
        self.end(1)

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

    def guardian_ended(self) -> None:
        self.loop.remove_reader(self.starter.pidfd)
        self.guardian_gone.set_result(None)
        if not (self.stopping or self.ended.done()):
            self.display.note(f"error: the services' guardian (process {self.starter.pid}) was killed: stopping them")
            self.end(1)

    def guardian_stuck(self, why: str) -> None:
        self.display.note(f"error: {why}")
        self.end(1)

    # ------------------------------------------------------------ stopping

    def interrupted(self, sig: signal.Signals) -> None:
        if self.stopping or self.ended.done():
            self.display.note(f"{sig.name}: killing what is left")
            self.hurrying = True
            for child in [child for child in self.users() if child.code is None] or self.children:
                child.send(signal.SIGKILL)
            return
        self.display.note(f"{sig.name}: stopping, at most {self.config.timeouts.stop:g} s (once more kills at once)")
        self.end(SIGNAL_BASE + sig)

    def users(self) -> list[Child]:
        """All but the holder."""
        return [child for child in self.children if child.spec.service != HOLDER]

    async def end_in_order(self, sig: signal.Signals, deadline: float) -> None:
        """The signal to all, to the holder once the others are gone; returns when all are, or at the deadline."""
        users, holders = self.users(), [child for child in self.children if child.spec.service == HOLDER]
        for group in (users, holders):
            for child in group:
                child.send(signal.SIGKILL if self.hurrying else sig)
            await self.wait_gone(group, deadline - time.monotonic())

    async def stop(self) -> None:
        """Returns when every child is gone: cleanly where they obey, by SIGKILL at ``timeouts.stop``."""
        self.stopping = True
        for task in self.restarts:
            task.cancel()
        limit, coordinator = self.config.timeouts.stop, self.children[:1]
        deadline = time.monotonic() + limit
        for child in coordinator:
            child.send(signal.SIGTERM)
        await self.wait_gone(coordinator, limit / 2)
        if coordinator and coordinator[0].code == 0:  # else it has told nobody
            await self.wait_gone(self.children, min(OBEY_S, limit / 4))
        await self.end_in_order(signal.SIGTERM, deadline)
        left = [child.spec.name for child in self.children if child.code is None]
        if left:
            self.display.note(f"warning: still running after timeouts.stop = {limit:g} s, killed: {', '.join(left)}")
            await self.end_in_order(signal.SIGKILL, time.monotonic() + KILLED_S)
        await self.end_orphans()

    async def end_orphans(self) -> None:
        """Kills what dead services left behind, and waits until it is gone: its memory is needed."""
        if left := await end_orphans(self.orphans):
            self.display.note(f"warning: not ended by SIGKILL: processes {left}, which services started")

    def orphans(self) -> list[int]:
        running = [child for child in self.children if child.code is None]
        known = self.bystanders | {child.pid for child in running} | {self.starter.pid}
        return orphans((self.starter.pid, os.getpid()), known, [child.spec.name for child in running])

    async def wait_gone(self, children: list[Child], timeout: float) -> None:
        if children:
            await asyncio.wait([child.gone for child in children], timeout=max(0.0, timeout))

    # ------------------------------------------------------------ showing and registering

    async def register_when_live(self) -> None:
        """Puts every process on the run's list as soon as the coordinator holds the lock that guards the list."""
        while not (self.children and is_held_by(self.shared, self.children[0].pid)):
            await asyncio.sleep(REGISTER_POLL_S)
        record_supervisor(self.shared)
        self.live = True
        for child in self.children:
            if child.code is None:
                self.register(child)

    def register(self, child: Child) -> None:
        processes.register(self.shared.processes, child.spec.service, child.spec.replica, child.pid)

    def helper_ended(self, task: asyncio.Task[None]) -> None:
        """A run is worth more than its picture: a failure here is told, and the run goes on."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.display.note(f"warning: {task.get_name()} failed, the run goes on: {type(error).__name__}: {error}")

    async def keep_drawing(self) -> None:
        while True:
            self.draw()
            await asyncio.sleep(REFRESH_S)

    def draw(self) -> None:
        self.display.show(self.feed.poll([child.line for child in self.children]))
