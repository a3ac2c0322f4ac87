"""Publishing weights: every rollout replica applies a version and proves it before it gets a lease.

    trainer   UpdateCommitted(manifest) ............ WeightsProved(proof)
    rollout      ApplyWeights ...... WeightsApplied(receipt)

Proof and receipt are computed beside each other and come in any order; a version is published when both are there and
fit. A replica that does not prove it is named, and gets no leases before it has; the run goes on with the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.messages import (
    ApplyWeights,
    Failed,
    Manifest,
    Proof,
    Ready,
    Receipt,
    UpdateCommitted,
    WeightsApplied,
)
from common.weights.receipts import problem
from services.coordinator.failures import innermost
from services.coordinator.members import Member, Members

log = logging.getLogger("publisher")


class PublishError(Exception):
    """No engine runs on the weights that were committed; generating would be wrong."""


class SteppedBack(PublishError):
    """The version died with its trainer before it was published: it is made again."""


class NotProved(PublishError):
    """One replica does not run on the weights that were committed; generating with it would be wrong."""


@dataclass(frozen=True)
class PublishFacts:
    """What one publish took. Seconds count from the arrival of the commit."""

    held_s: float
    """Until the slowest engine held the version, by its own receipt."""
    proved_s: float
    """Until the last receipt was found right."""
    copied_bytes: int
    """Summed over the engines."""
    aliased: int
    copied: int
    """Engines by the transport that brought them the weights."""
    device_used_bytes: int
    """Largest memory in use on an engine's GPU, by all processes; 0 on CPU."""


@dataclass
class _Application:
    """A version that a replica was told to apply; ``receipt`` is None where the replica died."""

    member: Member
    manifest: Manifest
    receipt: asyncio.Future[Receipt | None]

    def fail(self, why: str) -> None:
        if not self.receipt.done():
            self.receipt.set_exception(NotProved(why))


class Publisher:
    """Holds the last committed manifest, the trainer's proof of it, and the replicas' receipts."""

    def __init__(self, members: Members, next_work: Callable[[], int], timeout: float) -> None:
        self.members = members
        self.next_work = next_work
        self.timeout = timeout
        self.manifest: Manifest | None = None
        self.proof: Proof | None = None
        self.writing: int | None = None
        self.last: PublishFacts | None = None
        """Of the last publish that succeeded."""
        self.published = -1
        """The version that was published last."""
        self.progress = time.monotonic()
        """When the trainer last began, committed or proved, or a replica applied."""
        self._committed_at = 0.0
        self._pending: dict[int, _Application] = {}
        self._owed: dict[int, Member] = {}
        """Who has not answered in time, by work: nothing more is asked of them, and waited for, until they have."""
        self._changed = asyncio.Event()
        self._ensuring = asyncio.Lock()

    @property
    def version(self) -> int:
        return -1 if self.manifest is None else self.manifest.version

    # ------------------------------------------------------------ what the trainer says

    def begun(self, version: int) -> None:
        if version != self.version:  # else it is written: an earlier coordinator had begun it
            self.writing = version
        self.progress = time.monotonic()

    def committed(self, message: UpdateCommitted) -> None:
        if message.manifest.version < self.version:
            log.info("ignored a repeated commit of %s@%d", message.manifest.name, message.manifest.version)
            return
        self.writing = None
        self._take(message.manifest)

    def step_back(self, version: int) -> None:
        """A trainer is told to make ``version`` what is committed, instead of a later one or of what is half written.

        Until it has, nobody is told to apply weights, and a publish of a later version ends with SteppedBack.
        """
        self.writing = version
        if self.version != version:
            self.manifest = self.proof = None
        self._notify()

    def learn(self, ready: Ready) -> None:
        """The first weights of a trainer that has got ready, or that a new coordinator meets."""
        if ready.manifest is not None and self.manifest is None:
            self._take(ready.manifest)
        if ready.proof is not None:
            self.proved(ready.proof)

    def _take(self, manifest: Manifest) -> None:
        if manifest.version != self.version:
            self._committed_at = time.monotonic()
            self.published = -1
        self.manifest = manifest
        self._notify()

    def proved(self, proof: Proof) -> None:
        if self.proof is not None and proof.version < self.proof.version:
            log.info("ignored a repeated proof of version %d", proof.version)
            return
        self.proof = proof
        self._notify()

    def _notify(self) -> None:
        self.progress = time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ publishing

    async def publish(self) -> None:
        """Has every rollout replica prove the last committed version.

        Those that do not get no leases. Raises PublishError where there are replicas and none proved it, or where the
        trainer did not.
        """
        manifest = self.manifest
        if manifest is None:
            raise PublishError("the trainer has committed no weights yet")
        try:
            async with asyncio.TaskGroup() as group:
                rollouts = self.members.of_role("rollout")
                applying = [group.create_task(self._outcome_of(member, manifest)) for member in rollouts]
                group.create_task(self._proof_of(manifest))  # wanted also where there is no engine now, for a later one
        except ExceptionGroup as errors:
            raise innermost(errors) from errors
        outcomes = [task.result() for task in applying]
        receipts = [outcome for outcome in outcomes if isinstance(outcome, Receipt)]
        wrong = [outcome for outcome in outcomes if isinstance(outcome, NotProved)]
        if wrong and not receipts:
            raise wrong[0]
        self.last = self._facts(receipts)
        self.published = manifest.version

    async def ensure(self) -> int:
        """Publishes what is committed unless that is done; waits for a trainer that is being restored.

        Returns the version. Raises PublishError.
        """
        try:
            async with asyncio.timeout(self.timeout):
                while self.manifest is None or self.writing is not None:
                    await self._changed.wait()
        except TimeoutError:
            raise PublishError(
                f"the trainer has committed no weights within {self.timeout:.0f} s (timeouts.update)"
            ) from None
        async with self._ensuring:  # several shares of a step may ask at a time
            if self.published != self.version:
                await self.publish()
        return self.version

    async def _outcome_of(self, member: Member, manifest: Manifest) -> Receipt | NotProved | None:
        """What concerns this member alone is an outcome among others; None where it died."""
        try:
            return await self.apply(member, manifest)
        except NotProved as error:
            log.error("%s; it gets no leases before it has proved a version", error)
            return error

    def _facts(self, receipts: Sequence[Receipt]) -> PublishFacts:
        held = max((receipt.held for receipt in receipts), default=0.0)
        return PublishFacts(
            held_s=max(0.0, held - self._committed_at),
            proved_s=time.monotonic() - self._committed_at,
            copied_bytes=sum(receipt.copied_bytes for receipt in receipts),
            aliased=sum(receipt.transport == "alias" for receipt in receipts),
            copied=sum(receipt.transport == "copy" for receipt in receipts),
            device_used_bytes=max((receipt.device_used_bytes for receipt in receipts), default=0),
        )

    async def apply(self, member: Member, manifest: Manifest) -> Receipt | None:
        """Returns the right receipt of a member for this version, or None where it died.

        Until then the member has version -1. Raises NotProved, or PublishError where the trainer has not proved it.
        """
        member.version = -1
        asking = asyncio.create_task(self._receipt_of(member, manifest))
        proving = asyncio.create_task(self._proof_of(manifest))
        try:
            receipt = await asking
            if receipt is None:
                return None
            wrong = problem(manifest, await proving, receipt)
        finally:
            asking.cancel()
            proving.cancel()
            await asyncio.gather(asking, proving, return_exceptions=True)
        if wrong:
            raise NotProved(f"{member.name}, {manifest.name}@{manifest.version}: {wrong}")
        member.version = manifest.version
        return receipt

    async def _receipt_of(self, member: Member, manifest: Manifest) -> Receipt | None:
        wanted = f"{manifest.name}@{manifest.version}"
        if any(late is member for late in self._owed.values()):
            raise NotProved(f"{member.name} is not asked for {wanted}: it still owes its answer for a version before")
        work = self.next_work()
        application = _Application(member, manifest, asyncio.get_running_loop().create_future())
        self._pending[work] = application
        try:
            if not self.members.send(member, ApplyWeights(epoch=self.members.epoch, work=work, manifest=manifest)):
                return None
            async with asyncio.timeout(self.timeout):
                return await application.receipt
        except TimeoutError:
            self._owed[work] = member
            raise NotProved(
                f"{member.name} has not applied {wanted} within {self.timeout:.0f} s (timeouts.update)"
            ) from None
        finally:
            del self._pending[work]

    async def _proof_of(self, manifest: Manifest) -> Proof:
        wanted = f"{manifest.name}@{manifest.version}"
        try:
            async with asyncio.timeout(self.timeout):
                while self.proof is None or self.proof.version < manifest.version:
                    if self.version < manifest.version:
                        raise SteppedBack(f"{wanted} is gone: its trainer died, and another one makes it again")
                    await self._changed.wait()
        except TimeoutError:
            text = f"the trainer has not proved {wanted} within {self.timeout:.0f} s (timeouts.update)"
            raise PublishError(text) from None
        if self.proof.version > manifest.version:
            raise PublishError(f"{wanted} is no longer the trainer's version: it has proved {self.proof.version}")
        return self.proof

    # ------------------------------------------------------------ what the replicas say

    def waiting(self) -> list[str]:
        """Whose receipts and which proof are waited for."""
        lines = [
            f"{wanted.member.name} is to apply {wanted.manifest.name}@{wanted.manifest.version}"
            for wanted in self._pending.values()
        ]
        if self._pending and (self.proof is None or self.proof.version < self.version):
            lines.append(f"the trainer is to prove version {self.version}")
        return lines

    def applied(self, message: WeightsApplied) -> None:
        self.progress = time.monotonic()
        self._owed.pop(message.work, None)
        application = self._pending.get(message.work)
        if application is None or application.receipt.done():
            return
        manifest = application.manifest
        if message.version == manifest.version:
            application.receipt.set_result(message.receipt)
        else:
            wanted = f"{manifest.name}@{manifest.version}"
            application.fail(f"{application.member.name}, {wanted}: it applied version {message.version}")

    def failed(self, message: Failed) -> bool:
        """Whether this failure was one of a publish."""
        if self._owed.pop(message.work, None) is not None:
            return True
        application = self._pending.get(message.work)
        if application is None:
            return False
        wanted = f"{application.manifest.name}@{application.manifest.version}"
        application.fail(f"{application.member.name} cannot apply {wanted}: {message.message}")
        return True

    def member_died(self, member: Member) -> None:
        """Nobody waits for the receipt of the dead; the dispatcher deals with the loss of the replica."""
        self._owed = {work: late for work, late in self._owed.items() if late is not member}
        for application in self._pending.values():
            if application.member is member and not application.receipt.done():
                application.receipt.set_result(None)
