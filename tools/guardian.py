"""Starts the services of a run for its supervisor, and ends all of them when the supervisor is gone.

    quartet up (supervisor)  --start, reap-->  guardian  --fork-->  coordinator, rollout, reward, critic, trainer
                                                  ^------ whatever any of them leaves behind becomes its child

``python -m tools.guardian --run NAME --stop SECONDS --socket FD``. Why a process of its own: SIGKILL of ``quartet up``
cannot be caught, and what reward functions and engines start in sessions and with environments of their own is then
found by nobody but a living ancestor that adopts it (a subreaper, prctl(2)). So the services are children of a process
that does nothing else, is in no terminal's process group and bears another command line than the supervisor, so that
one `pkill -9` does not take both. If the guardian is the one that is killed, the kernel sends the services SIGTERM, and
what they leave becomes the supervisor's, which ends the run.

The conversation is a line of JSON there and a line back, over a socket that nobody else has: its end is the
supervisor's end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from common import processes
from tools.clean import clean
from tools.streams import say

REAP_S = 0.25
"""Interval at which the exit status of dead orphans is taken."""
REAPED_S = 10.0
"""Longest wait for the exit status of a service that has ended, which is there unless a debugger holds it back."""
KILLED_S = 30.0
"""Longest wait for what got SIGKILL; a process in the middle of a GPU call takes seconds."""
POLL_S = 0.02


@dataclass
class Guardian:
    """Serves until the socket ends."""

    run: str
    stop_s: float
    sock: socket.socket
    reaped_s: float = REAPED_S
    services: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict[int, "subprocess.Popen[bytes]"])
    """By process id, until the supervisor has asked for their exit code."""
    names: dict[int, str] = field(default_factory=dict[int, str])

    def serve(self) -> None:
        with self.sock.makefile("rb") as requests:
            while True:
                if select.select([self.sock], [], [], REAP_S)[0]:
                    try:
                        line = requests.readline()
                    except ConnectionError:
                        return
                    if not line:
                        return
                    with contextlib.suppress(ConnectionError):  # then the next line is the end
                        self.sock.sendall(json.dumps(self.answer(json.loads(line))).encode() + b"\n")
                self.reap_orphans()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "reap" in request:
            return self.reap(int(request["reap"]))
        try:
            with Path(request["log"]).open("ab") as output:
                process = subprocess.Popen(
                    request["start"], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=request["environment"], start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            return {"error": str(error)}
        self.services[process.pid] = process
        self.names[process.pid] = request["service"]
        return {"pid": process.pid}

    def reap(self, pid: int) -> dict[str, Any]:
        try:
            code = self.services[pid].wait(self.reaped_s)
        except subprocess.TimeoutExpired:
            return {"error": f"{self.names[pid]} (process {pid}) has no exit code after {self.reaped_s:g} s"}
        del self.services[pid], self.names[pid]
        return {"code": code}

    def reap_orphans(self) -> None:
        """So that they do not fill the process table. A dead service is left as it is, its pid its own, until asked."""
        with contextlib.suppress(ChildProcessError):  # there are no children at all
            while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if dead.si_pid in self.services:
                    return
                os.waitpid(dead.si_pid, 0)

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        """After the supervisor: ends what is left in the supervisor's order, and removes what lies in memory."""
        living = [pid for pid, process in self.services.items() if process.poll() is None]
        if living:
            say(f"warning: `quartet up` is gone: stopping run '{self.run}', at most {self.stop_s:g} s", sys.stderr)
            deadline = time.monotonic() + self.stop_s
            coordinator = [pid for pid in living if self.names[pid] == "coordinator"]
            users = [pid for pid in living if self.names[pid] != "holder"]
            self.end(coordinator, time.monotonic() + self.stop_s / 2)
            self.end(users, deadline)
            self.end(living, deadline)
        self.kill_left()
        clean(self.run)

    def end(self, pids: list[int], deadline: float) -> None:
        """SIGTERM to those that still run; returns when they are gone, or at the deadline."""
        for pid in pids:
            self.services[pid].terminate()
        for pid in pids:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.services[pid].wait(max(0.0, deadline - time.monotonic()))

    def kill_left(self) -> None:
        deadline = time.monotonic() + KILLED_S
        while left := processes.descendants(os.getpid()):
            if time.monotonic() > deadline:
                say(f"warning: not ended by SIGKILL: processes {left} of run '{self.run}'", sys.stderr)
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(POLL_S)  # the interval of a poll with a deadline


def unmoved(signum: int, frame: FrameType | None) -> None:
    """Handles a signal by nothing."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.guardian", description="Part of `quartet up`.")
    parser.add_argument("--run", required=True)
    parser.add_argument("--stop", required=True, type=float, help="seconds for services to stop by themselves")
    parser.add_argument("--socket", required=True, type=int, help="descriptor of the socket to the supervisor")
    arguments = parser.parse_args()
    os.set_inheritable(arguments.socket, False)
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends with the supervisor, which they are meant for
        signal.signal(sig, unmoved)  # not ignored: that would be inherited by the services
    processes.adopt_orphans()
    guardian = Guardian(arguments.run, arguments.stop, socket.socket(fileno=arguments.socket))
    guardian.serve()
    guardian.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
