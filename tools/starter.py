"""The supervisor's side of the guardian: start a service, take its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.launch import package_environment

ANSWER_S = 30.0
"""Longest wait for the guardian, which answers as soon as a process is started."""


class GuardianGone(Exception):
    """The process that starts the services has ended."""


class Starter:
    """Starts the guardian at once. What is started dies with it, and it with this process."""

    def __init__(self, run: str, stop_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            place = ["--run", run, "--stop", str(stop_s), "--socket", str(theirs.fileno())]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tools.guardian", *place],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=package_environment(),
                start_new_session=True,
            )
        self.sock = ours
        self.sock.settimeout(ANSWER_S)
        self.answers = ours.makefile("rb")
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, service: str, command: Sequence[str], environment: dict[str, str], log: Path) -> int:
        """Returns the process id, which stays that process's until ``reap``. Output is added to the log.

        Raises OSError where there is no such program, or no process to be had, and GuardianGone.
        """
        request = {"start": list(command), "service": service, "environment": environment, "log": os.fspath(log)}
        answer = self._ask(request)
        if "error" in answer:
            raise OSError(f"{service} cannot be started: {answer['error']}")
        return int(answer["pid"])

    def reap(self, pid: int) -> int:
        """The exit code of a started process that has ended, negative for a signal."""
        try:
            return int(self._ask({"reap": pid})["code"])
        except GuardianGone:  # its children are this process's by now
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self.sock.sendall(json.dumps(request).encode() + b"\n")
            line = self.answers.readline()
        except ConnectionError as error:
            raise GuardianGone(f"process {self.pid}, which starts the services, has ended") from error
        if not line:
            raise GuardianGone(f"process {self.pid}, which starts the services, has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def hang_up(self) -> None:
        """Lets the guardian end; ``pidfd`` tells when it has."""
        with contextlib.suppress(OSError):  # it has ended before
            self.sock.shutdown(socket.SHUT_RDWR)
        self.answers.close()
        self.sock.close()

    def close(self) -> None:
        """Takes the exit status of the guardian, which has ended."""
        self.process.wait(ANSWER_S)
        os.close(self.pidfd)
