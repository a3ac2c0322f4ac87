"""Runs the services of a run as local processes and ends them all together.

    start    one process a service, each in its own session (Ctrl-C reaches the supervisor alone), output to a log file
    watch    a pidfd of each; the coordinator's exit with code 0 is the end of the run
    death    the first service that dies unasked is named with its last log lines, and the run fails; one reward or
             rollout replica may die while others of its role live. The holder is not one of them: the shared memory on
             the GPU is its own
    stop     SIGTERM to the coordinator, which tells every replica to stop; SIGTERM to those that do not; SIGKILL at
             ``timeouts.stop``. The holder always comes last: the others compute on its memory. A second Ctrl-C kills
             at once

What services and reward functions leave behind becomes the supervisor's child (a subreaper, prctl(2)) and is killed at
the end. If the supervisor itself is killed, the services get SIGTERM from the kernel (``--parent``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import processes
from common.config import Config
from common.run_files import RunDirectory, SharedDirectory
from common.run_lock import is_held_by
from tools.display import Display, Feed, ServiceLine
from tools.launch import CommandFactory, ServiceSpec, planned_services, service_environment

TAIL_LINES = 20
TAIL_BYTES = 16384
REFRESH_S = 0.25
REGISTER_POLL_S = 0.05
OBEY_S = 1.0
"""Time that replicas get to act on the coordinator's Stop once the coordinator is gone."""
DYING_S = 1.0
ORPHANS_S = 5.0
"""Longest wait for what services left behind, after SIGKILL."""
ORPHANS_POLL_S = 0.02
KILLED_S = 30.0
"""Longest wait for a process that got SIGKILL; one in the middle of a GPU call takes seconds."""
HOLDER = "holder"
REPLACEABLE = frozenset({"reward", "rollout"})
SIGNAL_BASE = 128
"""Exit code of a command ended by signal n is 128 + n, as shells have it."""


@dataclass
class Child:
    """A started service. ``code`` is its exit code, negative for a signal, None while it runs."""

    spec: ServiceSpec
    process: subprocess.Popen[bytes]
    pidfd: int
    log: Path
    gone: asyncio.Future[None]
    code: int | None = None

    @property
    def fate(self) -> str:
        if self.code is None:
            return "running"
        return f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with code {self.code}"

    def send(self, sig: signal.Signals) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, sig)


@dataclass
class Supervisor:
    """One run. ``run`` returns the exit code: 0 done, 1 a service died, 128 + n ended by signal n."""

    config: Config
    files: RunDirectory
    shared: SharedDirectory
    command: CommandFactory
    display: Display
    children: list[Child] = field(default_factory=list[Child])
    stopping: bool = False
    hurrying: bool = False

    async def run(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self.loop.create_future()
        self.feed = Feed(self.shared, self.files)
        self.bystanders = set(processes.descendants(os.getpid()))
        processes.adopt_orphans()
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.loop.add_signal_handler(sig, self.interrupted, sig)
        drawing = self.loop.create_task(self.keep_drawing(), name="the display")
        registering = self.loop.create_task(self.register_when_live(), name="the process list")
        for task in (drawing, registering):
            task.add_done_callback(self.helper_ended)
        try:
            for spec in planned_services(self.config):
                self.start(spec)
            return await self.ended
        finally:
            registering.cancel()
            await self.stop()
            if drawing.cancel():
                self.draw()

    def start(self, spec: ServiceSpec) -> None:
        log = self.files.log(spec.service, spec.replica)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(spec),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=service_environment(spec),
                start_new_session=True,
            )
        child = Child(spec, process, os.pidfd_open(process.pid), log, self.loop.create_future())
        self.children.append(child)
        self.loop.add_reader(child.pidfd, self.exited, child)

    # ------------------------------------------------------------ watching

    def exited(self, child: Child) -> None:
        """The child is a zombie: its pid, and with it its process group, cannot be anybody else's yet."""
        self.loop.remove_reader(child.pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)  # what it started and left behind
        child.code = child.process.wait()
        os.close(child.pidfd)
        child.gone.set_result(None)
        if not self.stopping:
            self.judge(child)

    def judge(self, child: Child) -> None:
        if child.spec.service == "coordinator":
            self.coordinator_exited(child)
        elif child.code == 0:
            # Told to stop by a coordinator that is about to end too? Then its own exit follows.
            self.loop.call_later(self.config.timeouts.stop, self.lost, child)
        else:
            self.lost(child)

    def coordinator_exited(self, coordinator: Child) -> None:
        if coordinator.code == 0:
            self.end(0)
            return
        # Those that ended with code 0 were told to by a coordinator that gave up: its log says why. But no replica is
        # killed within a moment of its coordinator: those that are dead as well died before it.
        for child in self.children:
            if child.code is None and dying(child):
                self.exited(child)
        self.fail(coordinator)

    def lost(self, child: Child) -> None:
        if self.stopping or self.ended.done():
            return
        others = [other for other in self.children if other.spec.service == child.spec.service and other.code is None]
        if child.spec.service in REPLACEABLE and others:
            alive = ", ".join(other.spec.name for other in others)
            self.display.note(f"warning: {self.obituary(child)}\nThe run goes on with {alive}")
        else:
            self.fail(child)

    def fail(self, child: Child) -> None:
        if not self.ended.done():
            self.display.note(f"error: {self.obituary(child)}\nStopping the other services")
        self.end(1)

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

    def obituary(self, child: Child) -> str:
        when = " before the coordinator said stop" if child.code == 0 else ""
        lines = [f"    {line}" for line in tail(child.log)] or ["    (nothing)"]
        head = f"{child.spec.name} (process {child.process.pid}) {child.fate}{when}. Last lines of {child.log}:"
        return "\n".join([head, *lines])

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
        limit = self.config.timeouts.stop
        deadline = time.monotonic() + limit
        coordinator = self.children[:1]
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
        deadline = time.monotonic() + ORPHANS_S
        while left := self.orphans():
            if time.monotonic() > deadline:
                self.display.note(f"warning: not ended by SIGKILL: processes {left}, which services started")
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self.reap_orphans()
            await asyncio.sleep(ORPHANS_POLL_S)

    def orphans(self) -> list[int]:
        known = self.bystanders | {child.process.pid for child in self.children}
        return [pid for pid in processes.descendants(os.getpid()) if pid not in known]

    def reap_orphans(self) -> None:
        """Takes the exit status of dead orphans, so that they do not fill the process table."""
        known = self.bystanders | {child.process.pid for child in self.children}
        with contextlib.suppress(ChildProcessError):  # there are no children at all
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and dead.si_pid not in known:
                os.waitpid(dead.si_pid, 0)

    async def wait_gone(self, children: list[Child], timeout: float) -> None:
        if children:
            await asyncio.wait([child.gone for child in children], timeout=max(0.0, timeout))

    # ------------------------------------------------------------ showing and registering

    async def register_when_live(self) -> None:
        """Puts every process on the run's list as soon as the coordinator holds the lock that guards the list."""
        while not (self.children and is_held_by(self.shared, self.children[0].process.pid)):
            await asyncio.sleep(REGISTER_POLL_S)
        for child in self.children:
            if child.code is None:
                processes.register(self.shared.processes, child.spec.service, child.spec.replica, child.process.pid)

    def helper_ended(self, task: asyncio.Task[None]) -> None:
        """A run is worth more than its picture: a failure here is told, and the run goes on."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.display.note(f"warning: {task.get_name()} failed, the run goes on: {type(error).__name__}: {error}")

    async def keep_drawing(self) -> None:
        while True:
            self.reap_orphans()
            self.draw()
            await asyncio.sleep(REFRESH_S)

    def draw(self) -> None:
        lines = [
            ServiceLine(
                child.spec.service, child.spec.replica, child.process.pid, None if child.code is None else child.fate
            )
            for child in self.children
        ]
        self.display.show(self.feed.poll(lines))


def dying(child: Child) -> bool:
    """Whether its main thread is dead; waits for its other threads, with the last of which the pidfd fires."""
    started = processes.process_start(child.process.pid)
    return started == 0 and bool(select.select([child.pidfd], [], [], DYING_S)[0])


def tail(path: Path) -> list[str]:
    """The last lines of a log, without reading all of it."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
