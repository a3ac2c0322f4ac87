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

from common.messages import Manifest, Proof, Ready, Receipt, UpdateCommitted, WeightsApplied
from common.weights.receipts import problem
from services.coordinator.applications import Applications
from services.coordinator.failures import NotProved, PublishError, SteppedBack, innermost
from services.coordinator.member import Member
from services.coordinator.members import Members

log = logging.getLogger("publisher")


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


class Publisher:
    """Holds the last committed manifest and the trainer's proof of it; ``applications`` has the replicas' receipts."""

    def __init__(self, members: Members, next_work: Callable[[], int], timeout: float) -> None:
        self.members = members
        self.applications = Applications(members, next_work, timeout)
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
            log.info("ignored a repeated commit of %s", message.manifest.label)
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
        asking = asyncio.create_task(self.applications.receipt_of(member, manifest))
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
            raise NotProved(f"{member.name}, {manifest.label}: {wrong}")
        member.version = manifest.version
        return receipt

    async def _proof_of(self, manifest: Manifest) -> Proof:
        try:
            async with asyncio.timeout(self.timeout):
                while self.proof is None or self.proof.version < manifest.version:
                    if self.version < manifest.version:
                        raise SteppedBack(f"{manifest.label} is gone: its trainer died, and another one makes it again")
                    await self._changed.wait()
        except TimeoutError:
            text = f"the trainer has not proved {manifest.label} within {self.timeout:.0f} s (timeouts.update)"
            raise PublishError(text) from None
        if self.proof.version > manifest.version:
            raise PublishError(
                f"{manifest.label} is no longer the trainer's version: it has proved {self.proof.version}"
            )
        return self.proof

    # ------------------------------------------------------------ what the replicas say

    def waiting(self) -> list[str]:
        """Whose receipts and which proof are waited for."""
        lines = self.applications.waiting()
        if lines and (self.proof is None or self.proof.version < self.version):
            lines.append(f"the trainer is to prove version {self.version}")
        return lines

    def applied(self, message: WeightsApplied) -> None:
        self.progress = time.monotonic()
        self.applications.applied(message)
