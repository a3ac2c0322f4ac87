"""The service's side of the child process: start it, ask it with a time limit, kill it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.processes import descendants
from services.reward.scorers.interface import Batch, SampleScores, ScorerError
from services.reward.wire import (
    Began,
    FrameReader,
    FromChild,
    FunctionSpec,
    Loaded,
    NotLoaded,
    Score,
    Scored,
    Setup,
    frame,
    from_child,
)

log = logging.getLogger("reward")

STDERR = 2
SPAWN_LIMIT_S = 30.0
REAP_LIMIT_S = 5.0
EXIT_GRACE_S = 1.0
"""Time for a child that closed its socket to be gone, so that its exit status can be told."""
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class ChildError(Exception):
    """The child hung or died and is gone; the message names the function and how it ended."""

    def while_loading(self) -> ScorerError:
        return ScorerError(f"{self} while the reward functions were loaded")


class ChildProcess:
    """One child at a time; after it failed, ``load`` starts the next one. Used by one thread at a time."""

    def __init__(self, functions: Sequence[FunctionSpec]) -> None:
        self.setup = Setup(list(functions))
        # The kernel signals a child when the thread that created it ends, so one thread creates them all.
        self.spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")
        self.process: subprocess.Popen[bytes] | None = None
        self.selector = selectors.DefaultSelector()
        self.running = ""

    def load(self, deadline: float) -> None:
        """Starts the child unless it runs, and waits until it has loaded every function.

        Raises ScorerError where a function cannot be loaded, ChildError where the child hangs or dies.
        """
        if self.process is not None:
            return
        self.running = ", ".join(spec.name for spec in self.setup.functions)
        self._spawn()
        match self._ask(frame(self.setup), deadline, deadline - time.monotonic()):
            case Loaded():
                return
            case NotLoaded(reason=reason):
                self.kill()
                raise ScorerError(reason)
            case answer:
                raise self._fail(f"answered {type(answer).__name__} instead of Loaded")

    def score(self, batch: Batch, limit_s: float) -> list[SampleScores]:
        """Has a loaded child score a batch; raises ChildError where it does not answer within ``limit_s`` seconds."""
        answer = self._ask(frame(Score(batch, limit_s)), time.monotonic() + limit_s, limit_s)
        if not isinstance(answer, Scored) or len(answer.samples) != len(batch):
            raise self._fail(f"answered {type(answer).__name__} that does not fit a batch of {len(batch)}")
        return answer.samples

    def kill(self) -> None:
        """Kills the child and the processes it started; does nothing if there is none."""
        process = self.process
        if process is None:
            return
        self.process = None
        self.selector.close()
        self.sock.close()
        os.close(self.pidfd)
        started = descendants(process.pid)  # in sessions of their own, as sandboxes are; a dead child has none left
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            process.wait(REAP_LIMIT_S)
        except subprocess.TimeoutExpired:
            log.error("process %d of %s does not end after SIGKILL", process.pid, self.running)

    def close(self) -> None:
        self.kill()
        self.spawner.shutdown()

    # ------------------------------------------------------------ the conversation

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-P",
                "-u",
                "-m",
                "services.reward.child",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            path = os.pathsep.join(filter(None, (PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
            started = self.spawner.submit(
                subprocess.Popen[bytes], command, stdin=subprocess.DEVNULL, stdout=STDERR, stderr=STDERR,
                pass_fds=[theirs.fileno()], start_new_session=True, env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip
            process = started.result(SPAWN_LIMIT_S)
        self.sock, self.pidfd = ours, os.pidfd_open(process.pid)
        self.reader = FrameReader(ours)
        self.selector = selectors.DefaultSelector()
        self.selector.register(ours, selectors.EVENT_READ)
        # A process that a function forked may hold the child's socket open; the pidfd tells of the death all the same.
        self.selector.register(self.pidfd, selectors.EVENT_READ)
        self.process = process

    def _ask(self, request: bytes, deadline: float, limit_s: float) -> FromChild:
        try:
            self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            self.sock.sendall(request)
            while isinstance(answer := self._receive(deadline), Began):
                self.running = answer.function
        except TimeoutError:
            raise self._fail(f"ran longer than {limit_s:.3g} s and was killed") from None
        except ConnectionError:
            raise self._fail_dead() from None
        return answer

    def _receive(self, deadline: float) -> FromChild:
        while (data := self.reader.take()) is None:
            ready = {key.fileobj for key, _ in self.selector.select(max(deadline - time.monotonic(), 0.0))}
            if not ready:
                raise TimeoutError
            if self.sock not in ready or not self.reader.fill():
                raise ConnectionError
        return from_child.decode(data)

    def _fail_dead(self) -> ChildError:
        """Kills what is left of a child that died or closed its socket, and says how it ended."""
        process = self.process
        assert process is not None, "only a child that was started can end"
        by_itself = bool(select.select([self.pidfd], [], [], EXIT_GRACE_S)[0])
        self.kill()
        if not by_itself or process.returncode is None:
            return ChildError(f"{self.running} closed its connection to the service and was killed")
        return ChildError(f"{self.running} ended its process {describe_exit(process.returncode)}")

    def _fail(self, how: str) -> ChildError:
        self.kill()
        return ChildError(f"{self.running} {how}")


def describe_exit(status: int) -> str:
    """A ``subprocess`` return code in words."""
    if status >= 0:
        return f"with exit status {status}"
    name = signal.Signals(-status).name
    return f"by {name} (out of memory?)" if name == "SIGKILL" else f"by {name}"
