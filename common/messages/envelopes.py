"""The messages themselves, and one union of them for each direction."""

from __future__ import annotations

from msgspec import field

from common.messages.base import FailureKind, Message, Phase, Role
from common.messages.results import Result
from common.messages.samples import FinishedSample
from common.messages.tasks import Task
from common.messages.weights import CudaHandle, Manifest, Proof, Receipt

# ---------------------------------------------------------------- both directions


class Heartbeat(Message):
    sent: float
    """``time.monotonic()`` of the sender; the same clock in all processes of a host."""


class Ack(Message):
    """Stops the repetition of ``Done``, ``Failed`` or ``WeightsApplied``, and of what else was said about this work."""

    work: int


# ---------------------------------------------------------------- replica -> coordinator


class Hello(Message):
    role: Role
    replica: int
    identity: str
    protocol: int
    host: str
    pid: int
    pid_start: int
    """Start time of the process in clock ticks since boot, so that a reused pid is not taken for it."""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    leases_held: list[int] = field(default_factory=list[int])
    leases_finished: list[int] = field(default_factory=list[int])


class Ready(Message):
    """The model is loaded, the cache is mapped: leases may come. The trainer names the weights that it has committed.

    ``state`` is the step after which weights and optimizer state of a trainer or critic are as they are: 0 for those
    that a run begins with, ``NO_STATE`` where it found the weights of an earlier trainer and must restore some state.
    """

    manifest: Manifest | None = None
    proof: Proof | None = None
    state: int = 0


class WeightsWanted(Message):
    """Asks for the memory of a weight set. The writer gives its size, a consumer 0; ``gpu`` is the asker's, or empty.

    A consumer is answered as soon as the set has been committed, and on a GPU when trainer and critic are ready, so
    that engines take what is left.
    """

    request: int
    name: str
    gpu: str
    nbytes: int = 0


class SamplesFinished(Message):
    work: int
    samples: list[FinishedSample]


class Done(Message):
    work: int
    result: Result
    started: float
    ended: float
    """``time.monotonic()`` at the start and the end of the computation."""
    cache_hits: int = 0
    cache_misses: int = 0
    memory_bytes: int = 0


class Failed(Message):
    """Work came to nothing. With work 0: the replica itself gives up, and these are its last words."""

    work: int
    kind: FailureKind
    message: str


class UpdateBegun(Message):
    version: int


class UpdateCommitted(Message):
    work: int
    manifest: Manifest


class WeightsProved(Message):
    """The trainer's proof of the version that it committed before."""

    proof: Proof


class StateSaved(Message):
    """What ``SaveState`` asked for is on disk, whole; or, with ``error``, is not and never will be."""

    step: int
    nbytes: int
    seconds: float
    error: str = ""


class WeightsApplied(Message):
    work: int
    version: int
    receipt: Receipt


ToCoordinator = (
    Hello | Ready | WeightsWanted | Heartbeat | Ack | SamplesFinished | Done | Failed
    | UpdateBegun | UpdateCommitted | WeightsProved | StateSaved | WeightsApplied
)  # fmt: skip


# ---------------------------------------------------------------- coordinator -> replica


class Welcome(Message):
    run: str
    cache_path: str
    run_directory: str
    shm_directory: str
    config: bytes
    """The whole resolved config as JSON."""


class Refused(Message):
    reason: str


class Rehello(Message):
    """To a sender that this coordinator does not know: say Hello again, with what you hold and have finished."""


class Lease(Message):
    work: int
    step: int
    phase: Phase
    deadline_s: float
    """Seconds from receipt after which the coordinator hands the work to another replica."""
    task: Task


class ApplyWeights(Message):
    work: int
    manifest: Manifest


class WeightsGranted(Message):
    """Answer to WeightsWanted: a handle of its own for memory on a GPU, the manifest for a consumer.

    ``created`` tells a writer that the memory is new; otherwise it holds what the last writer left.
    """

    request: int
    handle: CudaHandle | None = None
    manifest: Manifest | None = None
    created: bool = True


class WeightsDenied(Message):
    request: int
    reason: str


class Stop(Message):
    reason: str


ToReplica = (
    Welcome | Refused | Rehello | Heartbeat | Ack | Lease | ApplyWeights | WeightsGranted | WeightsDenied | Stop
)  # fmt: skip
