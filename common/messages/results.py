"""What comes back from a lease (replica to coordinator)."""

from __future__ import annotations

from common.messages.base import Part
from common.messages.samples import Score
from common.messages.weights import CudaHandle


class Generated(Part):
    samples: int
    tokens: int


class Scores(Part):
    scores: list[Score]


class Evaluated(Part):
    tokens: int


class LogprobsDone(Part):
    tokens: int


class Updated(Part):
    """Policy or critic updated; metrics by name, already over the global batch."""

    metrics: dict[str, float]
    tokens: int


class Saved(Part):
    path: str
    nbytes: int


class StateStaged(Part):
    """The state is copied, and the service goes on with its work; ``stall_s`` is how long it could not."""

    stall_s: float


class StateRestored(Part):
    """``kept`` says that the weights in shared memory were right already, and nobody who runs on them was disturbed."""

    seconds: float
    kept: bool = False


class Slept(Part):
    """Memory of the engine's GPU in use by all processes, before and after; 0 on CPU."""

    used_before_bytes: int
    used_after_bytes: int


class Hosted(Part):
    """``created`` is false where the buffer was there already: it holds what its last writer left."""

    handle: CudaHandle
    created: bool


Result = (
    Generated | Scores | Evaluated | LogprobsDone | Updated | Saved | StateStaged | StateRestored | Slept | Hosted
)  # fmt: skip
