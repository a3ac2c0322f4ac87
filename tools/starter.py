"""The supervisor's side of the guardian: start a service, take its exit code, and end a guardian that is stuck."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.launch import package_environment

ANSWER_S = 30.0
"""Longest wait for the guardian, which answers as soon as a process is started."""
POLL_S = 0.02


UNKNOWN = 1 << 8
"""In the place of an exit code that was not to be had; no process ends with it."""


class GuardianGone(Exception):
    """The process that starts the services has ended, or was stuck and has been killed."""


class Starter:
    """Starts the guardian at once. What is started dies with it, and it with this process.

    A guardian that does not answer within ``answer_s`` seconds, because it is stopped or the host out of memory, is
    killed: the kernel then sends the services SIGTERM, and makes them children of this process, which has to end the
    run. ``tell`` is called with the reason before that.
    """

    def __init__(self, run: str, stop_s: float, tell: Callable[[str], None], answer_s: float = ANSWER_S) -> None:
        self.tell = tell
        self.answer_s = answer_s
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
        self.sock.settimeout(answer_s)
        self.answers = ours.makefile("rb")
        self.pidfd = os.pidfd_open(self.process.pid)
        self.given_up = False

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
        """The exit code of a started process that has ended, negative for a signal; ``UNKNOWN`` if it is not to be had.

        Waits at most three times ``answer_s``.
        """
        try:
            answer = self._ask({"reap": pid})
        except GuardianGone:  # its children are this process's now
            return self._inherit(pid)
        if "error" in answer:
            self._give_up(f"cannot tell how a service ended: {answer['error']}.")
            return self._inherit(pid)
        return int(answer["code"])

    def _inherit(self, pid: int) -> int:
        """The exit code of a child that this process has got, or gets in a moment, from the guardian."""
        deadline = time.monotonic() + self.answer_s
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):  # not yet: the guardian's socket is closed before that
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    return os.waitstatus_to_exitcode(status)
            time.sleep(POLL_S)  # the interval of a poll with a deadline
        return UNKNOWN

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.given_up:
            raise GuardianGone(f"process {self.pid}, which starts the services, was killed")
        try:
            self.sock.sendall(json.dumps(request).encode() + b"\n")
            line = self.answers.readline()
        except ConnectionError as error:
            raise GuardianGone(f"process {self.pid}, which starts the services, has ended") from error
        except TimeoutError as error:
            self._give_up(
                f"has not answered {next(iter(request))!r} within {self.answer_s:g} s: is it stopped (SIGSTOP), or is "
                "the host out of memory?"
            )
            raise GuardianGone(f"process {self.pid}, which starts the services, was killed") from error
        if not line:
            raise GuardianGone(f"process {self.pid}, which starts the services, has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _give_up(self, problem: str) -> None:
        """Returns when the guardian is dead, or after ``answer_s`` seconds. Nothing is asked of it any more."""
        self.given_up = True
        self.tell(f"the services' guardian (process {self.pid}) {problem} It is killed, and the services are stopped")
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        if not select.select([self.pidfd], [], [], self.answer_s)[0]:
            self.tell(f"process {self.pid} was not ended by SIGKILL")

    def hang_up(self) -> None:
        """Lets the guardian end; ``pidfd`` tells when it has."""
        with contextlib.suppress(OSError):  # it has ended before
            self.sock.shutdown(socket.SHUT_RDWR)
        self.answers.close()
        self.sock.close()

    def close(self) -> None:
        """Takes the exit status of the guardian, which has ended by now, or is killed."""
        if self.process.poll() is None and not self.given_up:
            self._give_up(f"has not ended within {self.answer_s:g} s.")
        self.process.poll()
        os.close(self.pidfd)
