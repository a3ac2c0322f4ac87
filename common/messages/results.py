"""What comes back from a lease (replica to coordinator)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.messages.base import Count, Name, Part, PathName, Seconds
from common.messages.samples import Score
from common.messages.weights import CudaHandle


class Generated(Part):
    samples: Count
    tokens: Count


class Scores(Part):
    scores: Annotated[list[Score], Meta(max_length=2**20)]


class Evaluated(Part):
    tokens: Count


class LogprobsDone(Part):
    tokens: Count


class Updated(Part):
    """Policy or critic updated; metrics by name, already over the global batch."""

    metrics: Annotated[dict[Name, float], Meta(max_length=4096)]
    tokens: Count


class Saved(Part):
    path: PathName
    nbytes: Count


class StateStaged(Part):
    """The state is copied, and the service goes on with its work; ``stall_s`` is how long it could not."""

    stall_s: Seconds


class StateRestored(Part):
    """``kept`` says that the weights in shared memory were right already, and nobody who runs on them was disturbed."""

    seconds: Seconds
    kept: bool = False


class Slept(Part):
    """Memory of the engine's GPU in use by all processes, before and after; 0 on CPU."""

    used_before_bytes: Count
    used_after_bytes: Count


class Hosted(Part):
    """``created`` is false where the buffer was there already: it holds what its last writer left."""

    handle: CudaHandle
    created: bool


Result = (
    Generated | Scores | Evaluated | LogprobsDone | Updated | Saved | StateStaged | StateRestored | Slept | Hosted
)  # fmt: skip
