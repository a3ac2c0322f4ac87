"""The thread in which vLLM's asyncio client lives, and the log of the engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
Task = asyncio.Task[None]

START_LIMIT_S = 30.0
"""Longest wait for the loop to take a job on."""
LAST_BYTES = 65_536
LAST_LINES = 8
LAST_ERRORS = 4
ERROR = re.compile(r"\b\w*(Error|Exception|Signal)\b: ")


class Overdue(Exception):
    """A job has not ended by its deadline. No TimeoutError, which the job itself may raise."""


class LoopThread:
    """An event loop in a thread of its own. The thread lives as long as this process, as the engine's parent must."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, job: Coroutine[Any, Any, None]) -> Task:
        """Lets a job run beside others until it has ended or is cancelled by ``cancelled``."""
        return self.run(_as_task(job), START_LIMIT_S)

    def run(self, job: Coroutine[Any, Any, Result], within: float) -> Result:
        """Runs a job to its end. Raises Overdue at the deadline, the job then being cancelled."""
        future = asyncio.run_coroutine_threadsafe(job, self.loop)
        if wait([future], within).not_done:
            future.cancel()
            raise Overdue(f"not within {within:.0f} s")
        return future.result()

    def when_ended(self, pid: int, then: Callable[[], None]) -> None:
        """Has the loop call ``then`` once, when a process ends. Raises ProcessLookupError if it has ended."""
        descriptor = os.pidfd_open(pid)

        def ended() -> None:
            self.loop.remove_reader(descriptor)
            os.close(descriptor)
            then()

        self.loop.call_soon_threadsafe(self.loop.add_reader, descriptor, ended)


async def _as_task(job: Coroutine[Any, Any, None]) -> Task:
    return asyncio.create_task(job)


async def cancelled(task: Task) -> None:
    """Cancels what ``LoopThread.start`` started and waits until it has ended."""
    task.cancel()
    await asyncio.wait([task])


@contextlib.contextmanager
def output_into(path: Path) -> Generator[None]:
    """Has processes that are started meanwhile write their output into a file, crashes of native code included.

    This process's own logging goes on where it went before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
    streams = [handler.setStream(os.fdopen(os.dup(2), "w", buffering=1)) for handler in handlers]
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
        yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for handler, stream in zip(handlers, streams, strict=True):
            if (own := handler.setStream(stream)) is not None:
                own.close()
        for descriptor in (file, *saved):
            os.close(descriptor)


def log_size(path: Path) -> int:
    """Bytes that a log has by now; 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def last_lines(path: Path, after: int = 0) -> str:
    """The end of a log for an error message, after the last errors before it: vLLM's end seldom names the cause.

    What was written before byte ``after``, in the life of another engine, is left out.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(min(size, max(after, size - LAST_BYTES)))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    before, tail = lines[:-LAST_LINES], lines[-LAST_LINES:]
    causes = list(dict.fromkeys(line for line in before if ERROR.search(line)))
    return "\n".join([*causes[-LAST_ERRORS:], *tail])
