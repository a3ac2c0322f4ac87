"""Cases that may kill or hang the process that tries them, SIGBUS above all: they are tried in a forked child."""

from __future__ import annotations

import logging
import mmap
import os
import signal
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from tools.fuzz.report import Failure, Tally

log = logging.getLogger("fuzz")

HANGS_AFTER_S = 20.0
POLL_S = 0.02
DEATHS = 20
"""Children that may die before the rest is left untried, which is a failure itself."""


class Trial(Protocol):
    """Cases by number. Made anew in each child, so that it owns what it opens."""

    def __len__(self) -> int: ...
    def name(self, number: int) -> str: ...
    def attempt(self, number: int, tally: Tally) -> None: ...
    def close(self) -> None: ...


class _Found(msgspec.Struct):
    cases: int
    slowest_s: float
    failed: int
    outcomes: dict[str, int]
    failures: list[Failure]


def try_all(make: Callable[[], Trial], tally: Tally) -> None:
    """Tries every case, and counts it in ``tally``; one that kills or hangs its child has failed."""
    progress = mmap.mmap(-1, mmap.PAGESIZE)
    numbers = memoryview(progress).cast("q")  # [0] the case at work, [1] how many there are
    first = 0
    for _ in range(DEATHS):
        numbers[0], numbers[1] = first, -1
        ended = _child(make, tally, first, numbers)
        if not ended:
            break
        at = numbers[0]
        tally.fail(f"case {at}", ended)
        first = at + 1
        if first >= numbers[1]:
            break
    else:
        tally.fail(f"case {first}", f"{DEATHS} children died: the cases from here on were not tried")
    numbers.release()
    progress.close()


def _child(make: Callable[[], Trial], tally: Tally, first: int, numbers: memoryview[int]) -> str:
    """How a child ended that tried the cases from ``first`` on; empty where it tried all."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            _try(make, Tally(tally.target, tally.seed, tally.slow_s), first, numbers, writer)
            code = 0
        except Exception:
            log.exception("the child of %s cannot go on", tally.target)
        finally:
            os._exit(code)  # whatever happened, no child goes on as a second parent
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        ended = _wait(pid, numbers)
        data = b"" if ended else pipe.read()
    if ended:
        return ended
    found = msgspec.json.decode(data, type=_Found)
    tally.cases += found.cases
    tally.failed += found.failed
    tally.failures += found.failures
    tally.outcomes.update(found.outcomes)
    tally.slowest_s = max(tally.slowest_s, found.slowest_s)
    return ""


def _try(make: Callable[[], Trial], tally: Tally, first: int, numbers: memoryview[int], writer: int) -> None:
    trial = make()
    numbers[1] = len(trial)
    for number in range(first, len(trial)):
        numbers[0] = number
        with tally.case(trial.name(number)):
            trial.attempt(number, tally)
    trial.close()
    found = _Found(tally.cases, tally.slowest_s, tally.failed, dict(tally.outcomes), tally.failures)
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(msgspec.json.encode(found))


def _wait(pid: int, numbers: memoryview[int]) -> str:
    """Waits for a child, or kills it when it is at one case for too long."""
    at, since = -1, time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                return f"kills its process by {signal.Signals(-code).name}"
            return f"ends its process with exit code {code}" if code else ""
        if numbers[0] != at:
            at, since = numbers[0], time.monotonic()
        elif time.monotonic() - since > HANGS_AFTER_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"hangs for {HANGS_AFTER_S:g} s"
        time.sleep(POLL_S)  # the interval of a poll that has a deadline
