"""Who takes part in the run: Hello, Welcome, heartbeats, and death (EHOSTUNREACH or a pidfd that fires).

Silence is not death: code that keeps the interpreter lock stops heartbeats for seconds. It only lets leases run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec

from common import bus
from common.messages import (
    ANY_REPLICA,
    PROTOCOL,
    Health,
    Heartbeat,
    Hello,
    Message,
    Probe,
    Ready,
    Refused,
    Role,
    Stop,
    Welcome,
    number_text,
)
from common.records import ServiceStatus
from services.coordinator.complaints import printable
from services.coordinator.member import Member
from services.coordinator.watch import Watch

log = logging.getLogger("members")

SINGLE_ROLES = ("critic", "trainer", "holder")
"""Roles that a run has once, the critic and the trainer as groups of ranks of which rank 0 speaks: a second one is
refused while the first one lives."""
COMES_AND_GOES: frozenset[Role] = frozenset({"reward", "rollout"})
"""Roles of which a replica may leave a run that goes on."""
HOLDER: Role = "holder"
POLL_S = 0.02
MOST_RIVALS, MOST_SHOWN = 64, 8
CONNECTION_PROBE_S = 0.2


def shown(works: list[int]) -> str:
    """A list that a peer has sent, as a log line takes it."""
    more = len(works) - MOST_SHOWN
    return f"{works[:MOST_SHOWN]} and {more} more" if more > 0 else str(works)


class Members:
    """The coordinator's list of replicas. Callbacks tell who became ready and who died."""

    def __init__(self, router: bus.Router, welcome: Welcome, process_list: Path) -> None:
        self.router = router
        self.welcome = welcome
        self.watch = Watch(process_list, self.bury)
        self.by_peer: dict[bytes, Member] = {}
        self.stopping = ""
        """Why everybody is told to stop; empty while the run goes on."""
        self.progress = time.monotonic()
        """When somebody last joined or got ready."""
        self.rivals: dict[bytes, float] = {}
        """Who came second in a role that a run has once, and when."""
        self.hello_problem: Callable[[bytes, Hello], str] = lambda peer, hello: ""
        self.on_refused: Callable[[bytes, str], None] = lambda peer, reason: log.warning("refused %s", reason)
        self.on_sent: Callable[[Member, Message], None] = lambda member, message: None
        self.on_join: Callable[[Member], None] = lambda member: None
        self.on_ready: Callable[[Member, Ready], None] = lambda member, ready: None
        self.on_death: Callable[[Member, str], None] = lambda member, reason: None

    @property
    def epoch(self) -> int:
        return self.welcome.epoch

    def of_role(self, role: Role) -> list[Member]:
        """Ready and connected members of a role, lowest replica number first."""
        found = [member for member in self.by_peer.values() if member.role == role and member.there]
        return sorted(found, key=lambda member: (member.hello.replica, member.peer))

    def starting_on(self, gpu: str) -> list[Member]:
        """Those that take memory of this GPU (UUID) at present, each as much as it finds free."""
        return [member for member in self.by_peer.values() if gpu and member.granted_gpu == gpu and not member.ready]

    async def until_started_on(self, gpu: str, timeout: float) -> list[Member]:
        """Waits until nobody starts on this GPU any more; returns those that still do then."""
        deadline = time.monotonic() + timeout
        while (starting := self.starting_on(gpu)) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return starting

    def send(self, member: Member, message: Message) -> bool:
        """False where the message cannot be delivered: the member's connection is gone."""
        try:
            self.router.send(member.peer, message)
        except bus.PeerGone:
            self.watch.disconnected(member)
            return False
        self.on_sent(member, message)
        return True

    def answer(self, peer: bytes, message: Message) -> None:
        """Sends to whoever wrote, member or not; one who is gone by now needs no answer."""
        member = self.by_peer.get(peer)
        if member is not None:
            self.send(member, message)
            return
        with contextlib.suppress(bus.PeerGone):
            self.router.send(peer, message)

    # ------------------------------------------------------------ conversation

    def hello(self, peer: bytes, hello: Hello) -> None:
        reason = self._reason_to_refuse(peer, hello) or self.hello_problem(peer, hello)
        rival = self._rival(peer, hello)
        if rival is not None and not reason:
            reason = self._reason_against(rival, peer, hello)
            if not reason:
                return  # it says Hello again, and is welcome once the other is known to be dead
        if reason:
            self.on_refused(peer, f"Hello of {hello.role} {number_text(hello.replica)} (pid {hello.pid}): {reason}")
            self.answer(peer, Refused(epoch=self.epoch, reason=reason))
        elif self.stopping:
            self.answer(peer, Stop(epoch=self.epoch, reason=f"the run is ending: {self.stopping}"))
        else:
            if peer not in self.by_peer:
                self._admit(Member(peer, self._numbered(hello), time.monotonic()))
            member = self.by_peer[peer]
            if not member.ready:  # else several Hellos crossed the Welcome
                self.send(member, msgspec.structs.replace(self.welcome, replica=member.hello.replica))

    def _numbered(self, hello: Hello) -> Hello:
        if hello.replica != ANY_REPLICA:
            return hello
        taken = {member.hello.replica for member in self.by_peer.values() if member.role == hello.role}
        return msgspec.structs.replace(hello, replica=next(number for number in count() if number not in taken))

    def health(self, peer: bytes, probe: Probe) -> None:
        """Answers a health check: the worst of the replicas of that role on that host."""
        now = time.monotonic()
        if probe.role == "coordinator":
            self.answer(peer, Health(epoch=self.epoch, state="working"))
            return
        found = [
            member for member in self.by_peer.values() if member.role == probe.role and member.hello.host == probe.host
        ]
        worst = min(found, key=lambda member: (member.ready, member.heard), default=None)
        if worst is None or worst.gone is not None or worst.ended:
            self.answer(peer, Health(epoch=self.epoch, state="absent"))
        else:
            self.answer(peer, Health(epoch=self.epoch, state=worst.state_word, heard_s=max(0.0, now - worst.heard)))

    def _reason_to_refuse(self, peer: bytes, hello: Hello) -> str:
        if hello.protocol != PROTOCOL:
            return (
                f"it speaks protocol {hello.protocol}, this coordinator {PROTOCOL}: "
                "install the same version of quartet everywhere"
            )
        if hello.identity.encode() != peer:
            return f"it says that it is {hello.identity[:8]!r}…, but its connection has another identity"
        return ""

    def _rival(self, peer: bytes, hello: Hello) -> Member | None:
        if hello.role not in SINGLE_ROLES:
            return None
        same = (other for other in self.by_peer.values() if other.role == hello.role and other.peer != peer)
        return next(same, None)

    def _reason_against(self, rival: Member, peer: bytes, hello: Hello) -> str:
        """A successor may come before its predecessor's death is known: only one that is heard of is in its way."""
        first = self.rivals.setdefault(peer, time.monotonic())
        if len(self.rivals) > MOST_RIVALS:
            del self.rivals[next(iter(self.rivals))]
        if rival.heard <= first:
            self.beat(rival)
            return ""
        return f"there is a {hello.role} already (pid {rival.hello.pid}): a run has one"

    def ready(self, peer: bytes, message: Ready) -> None:
        member = self.by_peer[peer]
        if not member.ready:
            member.ready, member.state = True, message.state
            self.progress = time.monotonic()
            log.info("%s is ready", member.name)
            self.on_ready(member, message)

    def heard(self, member: Member) -> bool:
        """Notes a sign of life. True where the member had been taken for gone and is back."""
        member.heard = time.monotonic()
        if member.gone is None:
            return False
        member.gone.cancel()
        member.gone = None
        log.warning("%s (pid %d) is connected again", member.name, member.hello.pid)
        return True

    def beat(self, member: Member) -> None:
        self.send(member, Heartbeat(epoch=self.epoch, sent=time.monotonic()))

    def probe(self, silent_s: float) -> None:
        """Writes to members that have been silent for so long: where the connection is gone, that shows it."""
        now = time.monotonic()
        for member in list(self.by_peer.values()):
            if now - member.heard >= silent_s:
                self.beat(member)

    def status(self) -> list[ServiceStatus]:
        now = time.monotonic()
        return [
            ServiceStatus(
                role=member.role,
                replica=member.hello.replica,
                pid=member.hello.pid,
                heard_s=round(now - member.heard, 2),
                state=member.state_word,
            )
            for member in sorted(self.by_peer.values(), key=lambda member: (member.role, member.hello.replica))
        ]

    # ------------------------------------------------------------ the end of the run

    def stop_all(self, reason: str) -> None:
        """Tells everybody to stop but the holder, on whose memory they compute; ``until_all_gone`` tells that one."""
        self.stopping = reason
        for member in list(self.by_peer.values()):
            if member.role != HOLDER:
                self.send(member, Stop(epoch=self.epoch, reason=reason))

    async def until_all_gone(self, timeout: float) -> list[Member]:
        """Waits until everybody is gone, and returns those that are not in time.

        Tells the holder to stop once it is alone, and probes silent connections.
        """
        deadline = time.monotonic() + timeout
        probed = time.monotonic()
        holder_told = False
        while self.by_peer and time.monotonic() < deadline:
            left = list(self.by_peer.values())
            if not holder_told and all(member.role == HOLDER for member in left):
                holder_told = True
                for member in left:
                    self.send(member, Stop(epoch=self.epoch, reason=self.stopping))
            if time.monotonic() - probed > CONNECTION_PROBE_S:
                self.probe(CONNECTION_PROBE_S)
                probed = time.monotonic()
            await asyncio.sleep(POLL_S)
        return list(self.by_peer.values())

    def close(self) -> None:
        """Watches nobody any more."""
        for member in self.by_peer.values():
            self.watch.end(member)
        self.by_peer.clear()

    # ------------------------------------------------------------ death

    def _admit(self, member: Member) -> None:
        self.by_peer[member.peer] = member
        self.progress = time.monotonic()
        self.on_join(member)
        hello = member.hello
        about = ", ".join([hello.host, *(f"{library} {version}" for library, version in hello.versions.items())])
        log.info("%s joined (pid %d on %s)", member.name, hello.pid, printable(about))
        if hello.leases_held or hello.leases_finished:
            held, finished = shown(hello.leases_held), shown(hello.leases_finished)
            log.info("%s still holds work %s and has finished %s", member.name, held, finished)
        self.watch.begin(member)

    def bury(self, member: Member, reason: str) -> None:
        """Takes a dead member off the list; its leases are lost."""
        if self.by_peer.get(member.peer) is not member:
            return
        del self.by_peer[member.peer]
        self.watch.end(member)
        self.on_death(member, f"{reason}: {member.last_words}" if member.last_words else reason)
