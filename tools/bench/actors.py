"""Benchmarks whose parts are processes of their own: orders and answers as lines of JSON, every wait with a limit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from tools.bench.record import ROOT, BenchError

MARK = "@@"
"""Starts a line that is an answer; whatever else a library prints is left alone."""
LOG_TAIL = 3000
END_LIMIT_S = 10.0
Answer = TypeVar("Answer", bound=Struct)


class Order(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of what an actor can be asked for."""


class Actor:
    """A process that carries out orders. Ended when the block is left, however it is left."""

    def __init__(self, module: str, log: Path, environment: dict[str, str] | None = None) -> None:
        self.module = module
        self.log = log
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # an order to a dead actor is an error, not this process's end
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})}, start_new_session=True,
            )  # fmt: skip
        self.buffer = b""

    def __enter__(self) -> Actor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Its input ends, and with it an actor that is well; whatever is left after a while is killed."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, to what it has started as well: vLLM's engine would outlive it. Returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):  # nobody of its group is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def tell(self, order: Order) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise BenchError(self._told("died")) from error

    def hear(self, kind: type[Answer], within: float = 60.0) -> Answer:
        """The next answer. Raises BenchError with the end of the actor's log where none comes."""
        deadline = time.monotonic() + within
        while True:
            line, newline, rest = self.buffer.partition(b"\n")
            if newline:
                self.buffer = rest
                if line.startswith(MARK.encode()):
                    return msgspec.json.decode(line[len(MARK) :], type=kind)
                continue
            self.buffer += self._more(deadline)

    def _more(self, deadline: float) -> bytes:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(descriptor, 1 << 16) if ready else b""
        if not data:
            raise BenchError(self._told("died" if ready else "has not answered in time"))
        return data

    def _told(self, what: str) -> str:
        return f"{self.module} {what}: {self.log.read_text(errors='replace')[-LOG_TAIL:]}"

    def ask(self, order: Order, kind: type[Answer], within: float = 60.0) -> Answer:
        self.tell(order)
        return self.hear(kind, within)


def note(text: str) -> None:
    """Progress of a long benchmark, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def say(answer: Struct) -> None:
    print(MARK + msgspec.json.encode(answer).decode(), flush=True)


def serve(orders: Any, carry_out: Callable[[Any], None]) -> None:
    """The actor's own side: carries out orders of the union ``orders`` until its input ends."""
    for line in sys.stdin.buffer:
        carry_out(msgspec.json.decode(line, type=orders))
