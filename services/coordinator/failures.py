"""What ends a run or a publish, and how to find it inside exception groups."""

from __future__ import annotations


class RunFailed(Exception):
    """The run cannot go on; the message says which service, phase and step, and why."""


class PublishError(Exception):
    """No engine runs on the weights that were committed; generating would be wrong."""


class SteppedBack(PublishError):
    """The version died with its trainer before it was published: it is made again."""


class NotProved(PublishError):
    """One replica does not run on the weights that were committed; generating with it would be wrong."""


STATE_LOST = {"holder": "the GPU memory of the shared weights is lost"}
"""What dies with a service that the run cannot go on without. Trainer and critic come back (``learners.py``).

Memory exported through CUDA IPC belongs to the process that allocated it. What others have mapped by then may still
answer, but that is not guaranteed, and nobody can map it any more: no engine could be replaced, and a trainer that died
later would find nothing.
"""


def innermost(error: BaseException) -> BaseException:
    """The first plain exception inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
