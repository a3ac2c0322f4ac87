"""Publishing weights: every rollout replica applies a version and proves it before it gets a lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from common.messages import ApplyWeights, Failed, Manifest, ReleaseWeights, UpdateCommitted, WeightsApplied
from common.weights.header import manifest_digest
from services.coordinator.failures import innermost
from services.coordinator.members import Member, Members

log = logging.getLogger("publisher")

CANARY_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.15}
"""Largest difference between trainer's and engine's canary logprobs, in nats, by the dtype of the weights."""


class PublishError(Exception):
    """An engine does not run on the weights that were committed; generating with it would be wrong."""


class Publisher:
    """Holds the last committed manifest and the replicas' receipts."""

    def __init__(self, members: Members, next_work: Callable[[], int], timeout: float) -> None:
        self.members = members
        self.next_work = next_work
        self.timeout = timeout
        self.manifest: Manifest | None = None
        self.writing: int | None = None
        self._pending: dict[int, tuple[Member, Manifest, asyncio.Future[None]]] = {}
        self._committed: dict[int, asyncio.Future[Manifest]] = {}

    @property
    def version(self) -> int:
        return -1 if self.manifest is None else self.manifest.version

    def begun(self, version: int) -> None:
        self.writing = version

    def committed(self, message: UpdateCommitted) -> None:
        if message.manifest.version < self.version:
            log.info("ignored a repeated commit of %s@%d", message.manifest.name, message.manifest.version)
            return
        self.writing = None
        self.manifest = message.manifest

    async def publish(self) -> None:
        """Returns when every rollout replica has proved the last committed version. Raises PublishError."""
        manifest = self.manifest
        if manifest is None:
            raise PublishError("the trainer has committed no weights yet")
        try:
            async with asyncio.TaskGroup() as group:
                for member in self.members.of_role("rollout"):
                    group.create_task(self.apply(member, manifest))
        except ExceptionGroup as errors:
            raise innermost(errors) from errors
        for trainer in self.members.of_role("trainer"):
            self.members.send(trainer, ReleaseWeights(epoch=self.members.epoch, version=manifest.version))

    async def apply(self, member: Member, manifest: Manifest) -> None:
        """Returns when the member has proved this version, or is dead. Raises PublishError."""
        work, receipt = self.next_work(), asyncio.get_running_loop().create_future()
        self._pending[work] = (member, manifest, receipt)
        if self.members.send(member, ApplyWeights(epoch=self.members.epoch, work=work, manifest=manifest)):
            try:
                await asyncio.wait_for(receipt, self.timeout)
            except TimeoutError:
                raise PublishError(
                    f"{member.name} has not applied {manifest.name}@{manifest.version} within {self.timeout:.0f} s "
                    "(timeouts.update)"
                ) from None
            finally:
                self._pending.pop(work, None)

    def applied(self, message: WeightsApplied) -> None:
        """Compares a receipt with the manifest; a wrong one fails the publish."""
        if message.work not in self._pending:
            return
        member, manifest, receipt = self._pending[message.work]
        if receipt.done():
            return
        problem = _problem(message, manifest)
        if problem:
            receipt.set_exception(PublishError(f"{member.name}, {manifest.name}@{manifest.version}: {problem}"))
        else:
            member.version = manifest.version
            receipt.set_result(None)

    def failed(self, message: Failed) -> bool:
        """Whether this failure was one of a publish."""
        if message.work not in self._pending:
            return False
        member, manifest, receipt = self._pending[message.work]
        if not receipt.done():
            wanted = f"{manifest.name}@{manifest.version}"
            receipt.set_exception(PublishError(f"{member.name} cannot apply {wanted}: {message.message}"))
        return True

    def member_died(self, member: Member) -> None:
        """Nobody waits for the receipt of the dead; the dispatcher deals with the loss of the replica."""
        for holder, _, receipt in self._pending.values():
            if holder is member and not receipt.done():
                receipt.set_result(None)


def _problem(message: WeightsApplied, manifest: Manifest) -> str:
    receipt = message.receipt
    if message.version != manifest.version:
        return f"it applied version {message.version}"
    if receipt.inode != manifest.inode:
        return f"it maps another file (inode {receipt.inode}, expected {manifest.inode})"
    if receipt.digest != manifest_digest(manifest):
        return "its tensors differ from the trainer's in place, shape or checksum"
    dtype = manifest.tensors[0].dtype if manifest.tensors else "float32"
    tolerance = CANARY_TOLERANCE.get(dtype, CANARY_TOLERANCE["bfloat16"])
    if not receipt.canary_max_error <= tolerance:
        return (
            f"its canary logprobs differ from the trainer's by {receipt.canary_max_error:.4g} nats, allowed {tolerance}"
        )
    return ""
