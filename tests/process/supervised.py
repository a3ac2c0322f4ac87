"""``quartet up`` with fake services, for the tests of the supervisor and of the display."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from common.processes import ProcessEntry, children, is_alive, process_start, registered
from common.run_files import RunDirectory, SharedDirectory

DRIVE = Path(__file__).with_name("drive_up.py")
ENDS_WITHIN = 20.0
SHORT = ("trainer.optimizer.warmup_steps=0", "critic.optimizer.warmup_steps=0")
"""What the preset needs to be allowed a few steps alone."""
ON_CPU = ("rollout.device=cpu", "trainer.device=cpu", "critic.device=cpu")
"""Whatever this machine has: a run on a GPU has one service more."""
LEAVING = {"rollout-0": "leave", "reward-0": "daemon", "reward-1": "spawn"}
"""Behaviours of services that start processes of their own."""
WaitUntil = Callable[..., None]


class Up:
    """One ``quartet up`` with fake services in a folder of its own."""

    def __init__(self, run: str, folder: Path, wait_until: WaitUntil) -> None:
        self.run = run
        self.folder = folder
        self.wait_until = wait_until
        self.files = RunDirectory(folder / "runs" / run)
        self.shared = SharedDirectory.of_run(run)
        self.started: list[subprocess.Popen[str]] = []
        self.seen: dict[str, ProcessEntry] = {}

    def start(
        self, behaviours: dict[str, str], *overrides: str, stop_s: float = 4.0, restarts: int = 0, resume: bool = False
    ) -> subprocess.Popen[str]:
        """``quartet up`` of the preset; with ``resume`` from the run's own config, if there is one."""
        settings = [f"run.name={self.run}", f"timeouts.stop={stop_s}", f"restart.limit={restarts}", *overrides]
        if not resume:
            settings = ["reward.replicas=2", *ON_CPU, *SHORT, *settings]
        command = [sys.executable, str(DRIVE), json.dumps(behaviours), *(["--resume"] if resume else []), *settings]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=ENDS_WITHIN)
        return process.returncode, out, err

    def running(self, services: int) -> dict[str, ProcessEntry]:
        """Waits until the run works and all of its processes are registered."""

        def holds() -> bool:
            if not self.shared.status.exists():
                return False
            self.seen = {f"{e.service}-{e.replica}": e for e in registered(self.shared.processes)}
            return len(self.seen) == services

        self.wait_until(holds, f"{services} services registered")
        return self.seen

    def on_the_list(self) -> dict[str, ProcessEntry]:
        """The latest process of each service on the run's list."""
        entries = sorted(registered(self.shared.processes), key=lambda entry: entry.start)
        return {f"{entry.service}-{entry.replica}": entry for entry in entries}

    def latest(self, name: str) -> ProcessEntry:
        return self.on_the_list()[name]

    def quartet(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the command line to its end in the run's folder."""
        command = [sys.executable, "-m", "tools", *arguments]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=ENDS_WITHIN, check=False
        )

    def close(self) -> None:
        """Kills what a failed test has left running; its guardian ends the rest."""
        for process in self.started:
            process.kill()
            process.communicate()

    def assert_nothing_left(self) -> None:
        assert not self.shared.path.exists()
        assert [entry for entry in self.seen.values() if is_alive(entry)] == []

    def log(self, name: str) -> str:
        """What a service has written so far; nothing if it has not been started yet."""
        path = self.files.logs / f"{name}.log"
        return path.read_text() if path.exists() else ""


def guardian_of(up: Up) -> int:
    """The process that is the services' parent."""
    (found,) = [parent for parent, started in children().items() if up.latest("trainer-0").pid in started]
    return found


def left_behind(up: Up) -> list[int]:
    """Processes that services with the behaviours ``LEAVING`` have started, once all have."""
    paths = [up.files.path / f"{name}.{kind}" for name, kind in LEAVING.items()]
    up.wait_until(lambda: all(path.exists() for path in paths), "services have started what they leave behind")
    pids = [int(path.read_text()) for path in paths]
    assert all(map(process_start, pids))
    return pids
