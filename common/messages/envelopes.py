"""The messages themselves, and one union of them for each direction."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from common.messages.base import (
    Count,
    FailureKind,
    Index,
    Message,
    Name,
    PathName,
    Phase,
    Role,
    Seconds,
    Text,
    Version,
    Whole,
)
from common.messages.results import Result
from common.messages.samples import FinishedSample
from common.messages.tasks import Task
from common.messages.weights import CudaHandle, Manifest, Proof, Receipt

Works = Annotated[list[Count], Meta(max_length=2**16)]

# ---------------------------------------------------------------- both directions


class Heartbeat(Message):
    sent: Seconds
    """``time.monotonic()`` of the sender; the same clock in all processes of a host."""


# ---------------------------------------------------------------- replica -> coordinator


class Hello(Message):
    role: Role
    replica: Version
    """Its number, or ``ANY_REPLICA``."""
    identity: Annotated[str, Meta(max_length=255)]
    protocol: Whole
    host: Name
    pid_space: Name
    """In which ``pid`` counts (``common.processes.pid_space``): only in its own can the coordinator watch a process."""
    pid: Index
    pid_start: Count
    """Start time of the process in clock ticks since boot, so that a reused pid is not taken for it."""
    versions: Annotated[dict[Name, Name], Meta(max_length=256)] = field(default_factory=dict[str, str])
    leases_held: Works = field(default_factory=list[int])
    leases_finished: Works = field(default_factory=list[int])
    secret: Annotated[str, Meta(max_length=255)] = ""
    """The run's, which its own user alone can read; empty where there is none."""


class Probe(Message):
    """From anybody: is there a replica of this role on this host, and how does it do? A health check asks."""

    role: Role | Literal["coordinator"]
    host: Name


class Ready(Message):
    """The model is loaded, the cache is mapped: leases may come. The trainer names the weights that it has committed.

    ``state`` is the step after which weights and optimizer state of a trainer or critic are as they are: 0 for those
    that a run begins with, ``NO_STATE`` where it found the weights of an earlier trainer and must restore some state.
    """

    manifest: Manifest | None = None
    proof: Proof | None = None
    state: Version = 0


class WeightsWanted(Message):
    """Asks for the memory of a weight set. The writer gives its size, a consumer 0; ``gpu`` is the asker's, or empty.

    A consumer is answered as soon as the set has been committed, and on a GPU when trainer and critic are ready, so
    that engines take what is left.
    """

    request: Count
    name: Name
    gpu: Name
    nbytes: Whole = 0


class SamplesFinished(Message):
    work: Count
    samples: Annotated[list[FinishedSample], Meta(max_length=2**20)]


class Done(Message):
    work: Count
    result: Result
    started: Seconds
    ended: Seconds
    """``time.monotonic()`` at the start and the end of the computation."""
    cache_hits: Count = 0
    cache_misses: Count = 0
    memory_bytes: Count = 0


class Failed(Message):
    """Work came to nothing. With work 0: the replica itself gives up, and these are its last words."""

    work: Count
    kind: FailureKind
    message: Text


class Leaving(Message):
    """Was told to end, and wants to be let go by ``Stop``: when it has answered what it holds, or, where the run cannot
    go on without it, with the run."""


class UpdateBegun(Message):
    version: Version


class UpdateCommitted(Message):
    work: Count
    manifest: Manifest


class WeightsProved(Message):
    """The trainer's proof of the version that it committed before."""

    proof: Proof


class StateSaved(Message):
    """What ``SaveState`` asked for is on disk, whole; or, with ``error``, is not and never will be."""

    step: Index
    nbytes: Count
    seconds: Seconds
    error: Text = ""
    digest: Text = ""
    """Of all that was written, for ``RestoreState``."""


class WeightsApplied(Message):
    work: Count
    version: Version
    receipt: Receipt


ToCoordinator = (
    Hello | Ready | WeightsWanted | Heartbeat | SamplesFinished | Done | Failed
    | UpdateBegun | UpdateCommitted | WeightsProved | StateSaved | WeightsApplied | Probe
    | Leaving
)  # fmt: skip


# ---------------------------------------------------------------- coordinator -> replica


class Welcome(Message):
    run: Name
    cache_path: PathName
    run_directory: PathName
    shm_directory: PathName
    config: Annotated[bytes, Meta(max_length=2**24)]
    """The whole resolved config as JSON."""
    replica: Index = 0
    """The number that it goes by from now on: the one it said, or one that was free."""


class Refused(Message):
    reason: Text


class Rehello(Message):
    """To a sender that this coordinator does not know: say Hello again, with what you hold and have finished."""


class Ack(Message):
    """Stops the repetition of ``Done``, ``Failed`` or ``WeightsApplied``, and of what else was said about this work."""

    work: Count


class Lease(Message):
    work: Count
    step: Index
    phase: Phase
    deadline_s: Seconds
    """Seconds from receipt after which the coordinator hands the work to another replica."""
    task: Task


class ApplyWeights(Message):
    work: Count
    manifest: Manifest


class WeightsGranted(Message):
    """Answer to WeightsWanted: a handle of its own for memory on a GPU, the manifest for a consumer.

    ``created`` tells a writer that the memory is new; otherwise it holds what the last writer left.
    """

    request: Count
    handle: CudaHandle | None = None
    manifest: Manifest | None = None
    created: bool = True


class WeightsDenied(Message):
    request: Count
    reason: Text


class Stop(Message):
    reason: Text


class Health(Message):
    """Answer to ``Probe``. A coordinator that answers is well."""

    state: Literal["absent", "starting", "waiting", "working"]
    heard_s: Seconds = 0.0
    """Since its last sign of life."""


ToReplica = (
    Welcome | Refused | Rehello | Heartbeat | Ack | Lease | ApplyWeights | WeightsGranted | WeightsDenied | Stop
    | Health
)  # fmt: skip
