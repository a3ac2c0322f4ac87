"""Work that an earlier coordinator gave out, and that its holder has not answered, or not to anybody who lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.messages import SlotRef
from services.coordinator.journal import Journal, LeaseEntry
from services.coordinator.member import Member


@dataclass
class Inherited:
    """One piece of it."""

    entry: LeaseEntry
    member: Member
    when_over: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


class Inheritance:
    """By number, as replicas tell in their Hello. Nobody waits for it until it is taken."""

    def __init__(self, journal: Journal | None) -> None:
        self.journal = journal
        self.works: dict[int, Inherited] = {}

    def claim(self, member: Member) -> None:
        """Takes note of what a replica holds or has finished. It is busy with that, as with work of this epoch."""
        if self.journal is None:
            return
        for number in (*member.hello.leases_held, *member.hello.leases_finished):
            entry = self.journal.unanswered(number)
            if entry is not None and entry.holder == (member.role, member.hello.replica, member.hello.pid):
                self.works[number] = Inherited(entry, member)
                member.leases.add(number)

    def number_of(self, digest: bytes) -> int | None:
        """The number of the work with this digest (``journal.task_digest``)."""
        found = (number for number, work in self.works.items() if work.entry.digest == digest and not work.entry.late)
        return next(found, None)

    def generating(self) -> dict[int, list[SlotRef]]:
        """Slots of samples that are being generated, by work."""
        wanted = {number: work.entry for number, work in self.works.items() if not work.entry.late}
        return {number: entry.refs for number, entry in wanted.items() if entry.refs}

    def of(self, member: Member) -> list[int]:
        return [number for number, work in self.works.items() if work.member is member]

    def take(self, number: int) -> Inherited | None:
        """Somebody waits for it from now on, or it is over."""
        return self.works.pop(number, None)
