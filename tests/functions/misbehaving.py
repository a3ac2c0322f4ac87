"""User functions that do to the scorer what a response asks for."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn


def hang() -> NoReturn:
    while True:
        pass


def announce() -> NoReturn:
    """Says in the service's log who hangs."""
    os.write(2, f"hanging {os.getpid()}\n".encode())
    hang()


def fail() -> NoReturn:
    raise KeyError("no such unit")


def orphan() -> NoReturn:
    """Dies, and leaves a process behind that holds the scorer's connection open."""
    if os.fork() == 0:
        signal.pause()
    os._exit(4)


def adopt() -> float:
    """Returns the pid of a process that it starts."""
    return float(subprocess.Popen(["sleep", "600"]).pid)


DEEDS: dict[str, Callable[[], Any]] = {
    "hang": hang,
    "announce": announce,
    "raise": fail,
    "nan": lambda: float("nan"),
    "inf": lambda: -float("inf"),
    "huge": lambda: 10**400,
    "text": lambda: "1.0",
    "none": lambda: None,
    "exit": lambda: sys.exit(7),
    "os_exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "orphan": orphan,
    "adopt": adopt,
    "close": lambda: os.closerange(3, 256),
}


def score(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> list[Any]:
    """A response that names no deed scores 1."""
    return [DEEDS[response]() if response in DEEDS else 1 for response in responses]


def too_few(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> list[float]:
    """One value less than samples for whole batches, right for single samples."""
    return [1.0] * max(len(responses) - 1, 1)


def none_at_all(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> Any:
    """Forgets to return."""


def one_number(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> Any:
    """A number for the batch."""
    return 0.5


NOT_A_FUNCTION = 3


async def asynchronous(prompts: list[str], responses: list[str], truths: list[Any], metadata: list[Any]) -> list[float]:
    """Returns a coroutine."""
    return [1.0]


def wants_less(prompts: list[str], responses: list[str]) -> list[float]:
    """Takes two of the four lists."""
    return [1.0]
