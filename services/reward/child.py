"""The child process in which reward functions run: ``python -m services.reward.child FD PARENT``.

Whatever a function does, hang, crash or print, it does here. Results go over their own socket; standard output and
error belong to the functions and end in the service's log.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys

import msgspec

from common.processes import die_with_parent
from services.reward.calling import ScoreFunction
from services.reward.loading import FunctionError, load_function
from services.reward.scorers.interface import Batch, SampleScores
from services.reward.wire import Began, FrameReader, Loaded, NotLoaded, Score, Scored, Setup, ToChild, frame, to_child

STACK_SHARE = 0.9
"""Part of the time limit after which the stacks of all threads are written to the log, before the kill."""


class Child:
    """Answers the service until it closes the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FrameReader(sock)
        self.functions: list[ScoreFunction] = []
        self.pid = os.getpid()

    def run(self) -> None:
        while (message := self.receive()) is not None:
            match message:
                case Setup():
                    self.set_up(message)
                case Score(batch=batch, limit_s=limit_s):
                    faulthandler.dump_traceback_later(STACK_SHARE * limit_s)
                    samples = self.score(batch)
                    if os.getpid() != self.pid:
                        os._exit(0)  # a copy that a function forked and let return; only one of the two may answer
                    faulthandler.cancel_dump_traceback_later()
                    self.sock.sendall(frame(Scored(samples)))

    def receive(self) -> ToChild | None:
        while (data := self.reader.take()) is None:
            if not self.reader.fill():
                return None
        return to_child.decode(data)

    def set_up(self, setup: Setup) -> None:
        try:
            self.functions = [load_function(spec) for spec in setup.functions]
        except FunctionError as error:
            self.sock.sendall(frame(NotLoaded(str(error))))
        else:
            self.sock.sendall(frame(Loaded()))

    def score(self, batch: Batch) -> list[SampleScores]:
        truths: list[object] = [msgspec.json.decode(raw) for raw in batch.ground_truths]
        metadata: list[object] = [msgspec.json.decode(raw) for raw in batch.metadata]
        columns: list[list[float | str]] = []
        for function in self.functions:
            self.sock.sendall(frame(Began(function.name)))
            columns.append(function.score(batch.prompts, batch.responses, truths, metadata, batch.sources))
        return [merge([column[index] for column in columns]) for index in range(len(batch))]


def merge(values: list[float | str]) -> SampleScores:
    """One sample's scores, or the errors of all functions that have none for it."""
    errors = [value for value in values if isinstance(value, str)]
    return "; ".join(errors) if errors else [value for value in values if not isinstance(value, str)]


def main() -> None:
    number, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent, signal.SIGKILL)
    os.set_inheritable(number, False)
    # Functions see no arguments but a program's name, as in any script.
    sys.argv = sys.argv[:1]
    Child(socket.socket(fileno=number)).run()


if __name__ == "__main__":
    main()
