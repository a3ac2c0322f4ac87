"""The processes of members, as far as the coordinator can see them: a pidfd that fires is death.

Members on other hosts, and in containers that have their pids to themselves, are known dead by their connection alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

from common import processes
from services.coordinator.member import Member

log = logging.getLogger("members")

GONE_GRACE_S = 1.0
"""Time for a process whose connection is gone to end by itself, before it is killed."""
LAST_WORDS_S = 0.05
"""From a process's end until it is buried."""


class Watch:
    """``bury`` is told of a death, and why it is known."""

    def __init__(self, process_list: Path, bury: Callable[[Member, str], None]) -> None:
        self.process_list = process_list
        self.bury = bury
        self.pid_space = processes.pid_space()

    def begin(self, member: Member) -> None:
        """Has the loop tell when the process ends, where its pid means anything here."""
        hello = member.hello
        if hello.pid_space != self.pid_space:
            return
        try:
            pidfd = os.pidfd_open(hello.pid)
        except ProcessLookupError:
            return  # it is dead: then its connection is gone
        if processes.process_start(hello.pid) != hello.pid_start:
            os.close(pidfd)
            return
        member.pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, member)
        processes.register(self.process_list, hello.role, hello.replica, hello.pid)

    def _ended(self, member: Member) -> None:
        """What it said before is read first: its last answer counts, and its last words name the cause."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(member.pidfd)
        member.ended = True
        loop.call_later(LAST_WORDS_S, self.bury, member, "its process ended")

    def end(self, member: Member) -> None:
        if member.gone is not None:
            member.gone.cancel()
        if member.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(member.pidfd)
            os.close(member.pidfd)
            member.pidfd = -1

    def disconnected(self, member: Member) -> None:
        """Without a process to watch, a lost connection is death. With one, the process must end first: what it still
        writes could not be told from what the next holder of its slots writes."""
        if member.pidfd < 0:
            self.bury(member, "its connection is gone")
        elif member.gone is None:
            member.gone = asyncio.get_running_loop().call_later(GONE_GRACE_S, self._end_disconnected, member)

    def _end_disconnected(self, member: Member) -> None:
        log.warning("%s (pid %d) lost its connection and did not end: it is killed", member.name, member.hello.pid)
        self.kill(member)

    def kill(self, member: Member) -> None:
        """SIGKILL; its pidfd then tells of its death. Whoever cannot be killed from here is taken off the list."""
        try:
            if member.pidfd >= 0:
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
                return
        except ProcessLookupError:
            return  # it ended in this moment
        except PermissionError:
            log.warning("%s (pid %d) belongs to another user and cannot be killed", member.name, member.hello.pid)
        self.bury(member, "it cannot be killed from here and is given up")
