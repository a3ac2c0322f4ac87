"""Who takes part in the run: Hello, Welcome, heartbeats, and death (EHOSTUNREACH or a pidfd that fires).

Silence is not death: code that keeps the interpreter lock stops heartbeats for seconds. It only lets leases run out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common import bus, processes
from common.messages import PROTOCOL, Heartbeat, Hello, Manifest, Message, Ready, Refused, Role, Stop, Welcome
from common.records import ServiceStatus

log = logging.getLogger("members")

GROUP_ROLES = ("critic", "trainer")
"""Roles that are one group of ranks, of which rank 0 speaks: a second one is refused."""


@dataclass
class Member:
    """A replica that has said Hello and lives."""

    peer: bytes
    hello: Hello
    heard: float
    ready: bool = False
    version: int = -1
    """Policy version that its receipt proved; -1: none (only rollout replicas have one)."""
    leases: set[int] = field(default_factory=set[int])
    pidfd: int = -1

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def name(self) -> str:
        return f"{self.hello.role} {self.hello.replica}"


class Members:
    """The coordinator's list of replicas. Callbacks tell who became ready and who died."""

    def __init__(self, router: bus.Router, welcome: Welcome, process_list: Path) -> None:
        self.router = router
        self.welcome = welcome
        self.process_list = process_list
        self.by_peer: dict[bytes, Member] = {}
        self.stopping = False
        self.on_ready: Callable[[Member, Manifest | None], None] = lambda member, manifest: None
        self.on_death: Callable[[Member, str], None] = lambda member, reason: None

    @property
    def epoch(self) -> int:
        return self.welcome.epoch

    def of_role(self, role: Role) -> list[Member]:
        """Ready members of a role, lowest replica number first."""
        found = [member for member in self.by_peer.values() if member.role == role and member.ready]
        return sorted(found, key=lambda member: (member.hello.replica, member.peer))

    def send(self, member: Member, message: Message) -> bool:
        """False, and the member is dead, where it is not connected any more."""
        try:
            self.router.send(member.peer, message)
        except bus.PeerGone:
            self.bury(member, "its connection is gone")
            return False
        return True

    # ------------------------------------------------------------ conversation

    def hello(self, peer: bytes, hello: Hello) -> None:
        reason = self._reason_to_refuse(peer, hello)
        if reason:
            log.warning("refused %s %d (pid %d): %s", hello.role, hello.replica, hello.pid, reason)
            self.router.send(peer, Refused(epoch=self.epoch, reason=reason))
            return
        if peer not in self.by_peer:
            member = self.by_peer[peer] = Member(peer, hello, time.monotonic())
            self._watch(member)
            log.info("%s joined (pid %d on %s)", member.name, hello.pid, hello.host)
        self.send(self.by_peer[peer], self.welcome)

    def _reason_to_refuse(self, peer: bytes, hello: Hello) -> str:
        if hello.protocol != PROTOCOL:
            return f"it speaks protocol {hello.protocol}, this coordinator {PROTOCOL}: install the same version of quartet everywhere"
        for other in self.by_peer.values():
            if other.role == hello.role and hello.role in GROUP_ROLES and other.peer != peer:
                return f"there is a {hello.role} already (pid {other.hello.pid}): a run has one"
        return ""

    def ready(self, peer: bytes, message: Ready) -> None:
        member = self.by_peer[peer]
        if not member.ready:
            member.ready = True
            log.info("%s is ready", member.name)
            self.on_ready(member, message.manifest)

    def beat(self, peer: bytes) -> None:
        self.send(self.by_peer[peer], Heartbeat(epoch=self.epoch, sent=time.monotonic()))

    def stop_all(self, reason: str) -> None:
        self.stopping = True
        for member in list(self.by_peer.values()):
            self.send(member, Stop(epoch=self.epoch, reason=reason))

    async def all_gone(self, timeout: float) -> list[Member]:
        """Waits until every member's process has ended; returns those that have not in time."""
        deadline = time.monotonic() + timeout
        while self.by_peer and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return list(self.by_peer.values())

    # ------------------------------------------------------------ death

    def _watch(self, member: Member) -> None:
        """Has the loop tell when the process ends. Members on other hosts are known dead by their connection alone."""
        hello = member.hello
        if hello.host != socket.gethostname() or processes.process_start(hello.pid) != hello.pid_start:
            return
        member.pidfd = os.pidfd_open(hello.pid)
        asyncio.get_running_loop().add_reader(member.pidfd, self.bury, member, "its process ended")
        processes.register(self.process_list, hello.role, hello.replica, hello.pid)

    def bury(self, member: Member, reason: str) -> None:
        """Takes a dead member off the list; its leases are lost."""
        if self.by_peer.pop(member.peer, None) is None:
            return
        if member.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(member.pidfd)
            os.close(member.pidfd)
        self.on_death(member, reason)

    def status(self) -> list[ServiceStatus]:
        now = time.monotonic()
        return [
            ServiceStatus(
                role=member.role, replica=member.hello.replica, pid=member.hello.pid, heard_s=round(now - member.heard, 2),
                state="starting" if not member.ready else "working" if member.leases else "waiting",
            )  # fmt: skip
            for member in sorted(self.by_peer.values(), key=lambda member: (member.role, member.hello.replica))
        ]
