"""Orders to apply a version of the weights: whose receipt is waited for, and who still owes an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.messages import ApplyWeights, Failed, Manifest, Receipt, WeightsApplied
from services.coordinator.failures import NotProved
from services.coordinator.member import Member
from services.coordinator.members import Members


@dataclass
class _Application:
    """A version that a replica was told to apply; ``receipt`` is None where the replica died."""

    member: Member
    manifest: Manifest
    receipt: asyncio.Future[Receipt | None]

    def fail(self, why: str) -> None:
        if not self.receipt.done():
            self.receipt.set_exception(NotProved(why))


class Applications:
    """Each is one order, numbered as work is; ``timeout`` is the longest wait for its receipt, in seconds."""

    def __init__(self, members: Members, next_work: Callable[[], int], timeout: float) -> None:
        self.members = members
        self.next_work = next_work
        self.timeout = timeout
        self.owed: dict[int, Member] = {}
        """Who has not answered in time, by work: nothing more is asked of them, and waited for, until they have."""
        self._pending: dict[int, _Application] = {}

    async def receipt_of(self, member: Member, manifest: Manifest) -> Receipt | None:
        """Has a member apply this version; None where it died. Raises NotProved where it cannot, or is late."""
        if any(late is member for late in self.owed.values()):
            raise NotProved(
                f"{member.name} is not asked for {manifest.label}: it still owes its answer for a version before"
            )
        work = self.next_work()
        application = _Application(member, manifest, asyncio.get_running_loop().create_future())
        self._pending[work] = application
        try:
            if not self.members.send(member, ApplyWeights(epoch=self.members.epoch, work=work, manifest=manifest)):
                return None
            async with asyncio.timeout(self.timeout):
                return await application.receipt
        except TimeoutError:
            self.owed[work] = member
            raise NotProved(
                f"{member.name} has not applied {manifest.label} within {self.timeout:.0f} s (timeouts.update)"
            ) from None
        finally:
            del self._pending[work]

    def waiting(self) -> list[str]:
        """Whose receipts are waited for."""
        return [f"{wanted.member.name} is to apply {wanted.manifest.label}" for wanted in self._pending.values()]

    def applied(self, message: WeightsApplied) -> None:
        self.owed.pop(message.work, None)
        application = self._pending.get(message.work)
        if application is None or application.receipt.done():
            return
        manifest = application.manifest
        if message.version == manifest.version:
            application.receipt.set_result(message.receipt)
        else:
            application.fail(f"{application.member.name}, {manifest.label}: it applied version {message.version}")

    def failed(self, message: Failed) -> bool:
        """Whether this failure was one of an application."""
        if self.owed.pop(message.work, None) is not None:
            return True
        application = self._pending.get(message.work)
        if application is None:
            return False
        application.fail(f"{application.member.name} cannot apply {application.manifest.label}: {message.message}")
        return True

    def member_died(self, member: Member) -> None:
        """Nobody waits for the receipt of the dead; the dispatcher deals with the loss of the replica."""
        self.owed = {work: late for work, late in self.owed.items() if late is not member}
        for application in self._pending.values():
            if application.member is member and not application.receipt.done():
                application.receipt.set_result(None)
