"""Notices that nothing happens any more, says who waits for whom, and has the waiting processes say where they are."""

from __future__ import annotations

import asyncio
import logging
import signal
import time

from services.coordinator.dispatch import Dispatcher
from services.coordinator.failures import RunFailed
from services.coordinator.members import Members
from services.coordinator.publisher import Publisher

log = logging.getLogger("watchdog")

LOOKS = 10
"""Times that it looks in the time allowed."""
STACKS_S = 2.0
"""Time that processes get to write their stacks before the run ends."""


class Watchdog:
    """Progress is a lease that goes out or comes back, a sample that ends, a version that is applied."""

    def __init__(self, limit_s: float, members: Members, dispatcher: Dispatcher, publisher: Publisher) -> None:
        self.limit_s = limit_s
        self.members = members
        self.dispatcher = dispatcher
        self.publisher = publisher

    async def watch(self) -> None:
        """Raises RunFailed when nothing has happened for ``timeouts.progress``."""
        while True:
            await asyncio.sleep(self.limit_s / LOOKS)
            silent = time.monotonic() - max(self.dispatcher.progress, self.publisher.progress, self.members.progress)
            if silent < self.limit_s:
                continue
            waiting = self.waiting()
            for line in waiting:
                log.error("%s", line)
            self.ask_for_stacks()
            await asyncio.sleep(STACKS_S)
            raise RunFailed(
                f"nothing has happened for {silent:.0f} s (timeouts.progress = {self.limit_s:g}): "
                f"{'; '.join(waiting)}; the services' logs end with their stacks"
            )

    def waiting(self) -> list[str]:
        """Who waits for whom, and for how long by now."""
        now = time.monotonic()
        lines = [
            f"work {work.lease.work} ({work.name}) is with {work.member.name} for {now - work.given:.0f} s of "
            f"{work.lease.deadline_s:g} s"
            if work.member is not None
            else f"work {work.lease.work} ({work.name}) waits for a {work.role} that is ready and free"
            for work in self.dispatcher.outstanding()
        ]
        lines += self.publisher.waiting()
        heard = ", ".join(
            f"{member.name} heard {now - member.heard:.1f} s ago{'' if member.ready else ', not ready'}"
            for member in self.members.by_peer.values()
        )
        return [*(lines or ["no work is out"]), f"members: {heard or 'none'}"]

    def ask_for_stacks(self) -> None:
        """SIGUSR1: every service's handler writes the stacks of its threads to its log, whatever it is doing."""
        for member in self.members.by_peer.values():
            if member.pidfd < 0:
                continue
            try:
                signal.pidfd_send_signal(member.pidfd, signal.SIGUSR1)
            except (ProcessLookupError, PermissionError) as error:
                log.warning("%s (pid %d) cannot be asked for its stacks: %s", member.name, member.hello.pid, error)
