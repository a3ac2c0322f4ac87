"""What a replica says of its work, and says again to a coordinator that has not heard it, or has just taken over."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from common import bus
from common.messages import (
    FinishedSample,
    Manifest,
    Message,
    Proof,
    Ready,
    SamplesFinished,
    StateSaved,
    UpdateBegun,
    UpdateCommitted,
    WeightsProved,
)
from common.repetition import Unacknowledged, stamped

REPEAT_INTERVAL_S = 1.0


class ReplicaOutbox:
    """Implements ``common.service.Outbox``, for the worker thread. All else belongs to the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dealer: bus.Dealer) -> None:
        self.epoch = 0
        """Of the coordinator that is spoken to; 0 before the first has welcomed this replica."""
        self.ready: Ready | None = None
        """What a coordinator that does not know this replica is told; None until the service is loaded."""
        self.closed = False
        self._loop = loop
        self._dealer = dealer
        self._unacknowledged = Unacknowledged(REPEAT_INTERVAL_S)
        self._reported: dict[int, list[FinishedSample]] = {}
        """Samples that were reported of work that is not acknowledged: a coordinator that takes over is told again."""

    def send(self, message: Message) -> None:
        """Sends under the epoch of now, whatever the message says."""
        if not self.closed:  # a computation that nobody waits for may report until the process has ended
            self._dealer.send(stamped(message, self.epoch))

    def send_until_acknowledged(self, work: int, message: Message) -> None:
        self._unacknowledged.add(work, message)
        self.send(message)

    def say_ready(self, ready: Ready) -> None:
        self.ready = ready
        self.send(ready)

    def renew(self, **changed: Any) -> None:
        """Fields of ``ready`` that are otherwise by now."""
        if self.ready is not None:
            self.ready = msgspec.structs.replace(self.ready, **changed)

    # ------------------------------------------------------------ again

    def unacknowledged(self) -> list[int]:
        """Work that is finished and not acknowledged."""
        return self._unacknowledged.works()

    def acknowledge(self, work: int) -> None:
        self._unacknowledged.acknowledge(work)
        self._reported.pop(work, None)

    def repeat_due(self) -> None:
        for answer in self._unacknowledged.due():
            self.send(answer)

    def repeat_all(self) -> None:
        """For a coordinator that has not heard any of it."""
        if self.ready is not None:
            self.send(self.ready)
        for work, samples in self._reported.items():
            self.send(SamplesFinished(epoch=self.epoch, work=work, samples=samples))
        for answer in self._unacknowledged.due(0):
            self.send(answer)

    # ------------------------------------------------------------ Outbox, for the worker thread

    def samples_finished(self, work: int, samples: list[FinishedSample]) -> None:
        self._loop.call_soon_threadsafe(self._samples_finished, work, samples)

    def _samples_finished(self, work: int, samples: list[FinishedSample]) -> None:
        self._reported.setdefault(work, []).extend(samples)
        self.send(SamplesFinished(epoch=self.epoch, work=work, samples=samples))

    def update_begun(self, version: int) -> None:
        self._loop.call_soon_threadsafe(self.send, UpdateBegun(epoch=0, version=version))

    def update_committed(self, work: int, manifest: Manifest) -> None:
        self._loop.call_soon_threadsafe(self._committed, work, manifest)

    def _committed(self, work: int, manifest: Manifest) -> None:
        self.renew(manifest=manifest)
        self.send_until_acknowledged(work, UpdateCommitted(epoch=self.epoch, work=work, manifest=manifest))

    def weights_proved(self, proof: Proof) -> None:
        self._loop.call_soon_threadsafe(self._proved, proof)

    def _proved(self, proof: Proof) -> None:
        self.renew(proof=proof)
        self.send(WeightsProved(epoch=self.epoch, proof=proof))

    def state_saved(self, step: int, nbytes: int, seconds: float, error: str = "", digest: str = "") -> None:
        message = StateSaved(epoch=0, step=step, nbytes=nbytes, seconds=seconds, error=error, digest=digest)
        self._loop.call_soon_threadsafe(self.send, message)
