"""What a service is to the runtime that carries its messages: it gets a lease and returns a result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.config import Config
from common.messages import FailureKind, FinishedSample, Lease, Manifest, Proof, Receipt, Result, Role, WeightsGranted
from common.run_files import SharedDirectory

WRONG = 2
"""Exit code of wrong usage or config, and of a replica that is not wanted: started again it would end the same way."""


class ReplicaError(Exception):
    """Ends the replica with exit code 1; the message says what to do."""


class WrongSetup(ReplicaError):
    """Ends the replica with exit code ``WRONG``: started again it would end the same way."""


class LeaseFailed(Exception):
    """Raised by a service where a lease failed in a way that the coordinator should know by kind."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class WeightExchange(Protocol):
    """How a service gets at the memory of a weight set. Callable from the worker thread alone, which it blocks."""

    def want(self, name: str, gpu: str, nbytes: int = 0) -> WeightsGranted:
        """The writer gives the set's size, a consumer 0; ``gpu`` is the UUID of the asker's GPU, or empty.

        A consumer waits until the set has been committed once and is not being written. Raises ReplicaError when it is
        refused, or not answered in time (``common.config_values.weights_limit``).
        """
        ...


@dataclass(frozen=True)
class Assignment:
    """What the coordinator's Welcome gives to a service."""

    run: str
    role: Role
    replica: int
    config: Config
    shared: SharedDirectory
    cache_path: str
    run_directory: str
    weights: WeightExchange
    give_up: Callable[[str], None] = logging.getLogger("replica").error
    """Ends the replica, from any thread and while it has nothing to do; the reason is told to the coordinator."""


class Outbox(Protocol):
    """What a service may report while it works on a lease. Callable from the worker thread."""

    def samples_finished(self, work: int, samples: list[FinishedSample]) -> None: ...
    def update_begun(self, version: int) -> None: ...
    def update_committed(self, work: int, manifest: Manifest) -> None: ...
    def weights_proved(self, proof: Proof) -> None: ...
    def state_saved(self, step: int, nbytes: int, seconds: float, error: str = "", digest: str = "") -> None:
        """From any thread: what ``SaveState`` asked for is on disk, known by its digest, or failed."""
        ...


class Service(Protocol):
    """The computing part of a replica. Every method runs in the worker thread."""

    def ready(self) -> tuple[Manifest, Proof] | None:
        """Called once when loaded; the trainer returns its first committed weights, if there are any."""
        ...

    def state(self) -> int:
        """The step after which weights and optimizer of a trainer or critic are as they are, or ``NO_STATE``; others
        have none, and return 0."""
        ...

    def handle(self, lease: Lease, outbox: Outbox) -> Result: ...
    def apply_weights(self, manifest: Manifest) -> Receipt: ...
    def cache_counts(self) -> tuple[int, int]:
        """Hits and misses of the token cache since the last call."""
        ...

    def close(self) -> None: ...


ServiceFactory = Callable[[Assignment], Service]
