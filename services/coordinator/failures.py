"""What ends a run, and how to find it inside exception groups."""

from __future__ import annotations


class RunFailed(Exception):
    """The run cannot go on; the message says which service, phase and step, and why."""


def innermost(error: BaseException) -> BaseException:
    """The first plain exception inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
