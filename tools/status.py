"""``quartet status``: which runs there are, what the live ones do, how the finished ones ended."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from common.records import Status, Summary
from common.run_files import RunDirectory, SharedDirectory
from common.run_lock import holder, run_name, supervisor
from tools.clean import shared_directories
from tools.display import duration, read_status
from tools.up import read_summary, summary_lines

RUNS = Path("runs")
"""Where ``run.directory`` has runs by default."""


class RunState(Struct, frozen=True):
    """What is known of a run. ``state``: live, restarting (its coordinator died, its supervisor starts another), dead
    (leftovers in /dev/shm), finished, unfinished, or unknown. ``pid`` is the coordinator's, else the supervisor's."""

    run: str
    state: str
    pid: int | None = None
    status: Status | None = None
    summary: Summary | None = None


def states(run: str | None = None, directory: Path = RUNS) -> list[RunState]:
    """The live and dead runs of this user; with a name that run alone, also if only its files are left."""
    if run is not None:
        return [state_of(run, directory)]
    return [state_of(run_name(shared), directory) for shared in shared_directories()]


def state_of(run: str, directory: Path) -> RunState:
    shared = SharedDirectory.of_run(run)
    files = RunDirectory(directory / run)
    pid = holder(shared)
    status = read_status(shared)
    if pid is not None:
        return RunState(run, "live", pid, status)
    if (pid := supervisor(shared)) is not None:
        return RunState(run, "restarting", pid, status)
    if shared.path.is_dir():
        return RunState(run, "dead", None, status)
    summary = read_summary(files)
    if summary is not None:
        return RunState(run, "finished" if summary.finished else "unfinished", summary=summary)
    return RunState(run, "unfinished" if files.config.exists() else "unknown")


def lines(state: RunState, directory: Path = RUNS) -> list[str]:
    """A run for a person to read."""
    if state.state == "live":
        return live_lines(state)
    if state.state == "restarting":
        return [f"{state.run}: its coordinator was killed; `quartet up` (process {state.pid}) starts another"]
    if state.state == "dead":
        return [f"{state.run}: dead; `quartet clean {state.run}` removes what it left"]
    if state.summary is not None and state.state == "finished":
        return summary_lines(state.summary, RunDirectory(directory / state.run))
    if state.state == "unfinished":
        place = "" if directory == RUNS else f" --set run.directory={directory}"
        how = f"`quartet up --resume --name {state.run}{place}` goes on with it"
        return [f"{state.run}: not running and not finished; its files are in {directory / state.run}; {how}"]
    return [f"{state.run}: no such run, neither live nor in {directory}/"]


def live_lines(state: RunState) -> list[str]:
    status = state.status
    if status is None:
        return [f"{state.run}: live, starting (coordinator is process {state.pid})"]
    shown = [
        f"{name} {value:.3f}"
        for name, value in (("reward", status.reward), ("accuracy", status.accuracy), ("kl", status.kl))
        if value is not None
    ]
    if status.samples_per_s is not None:
        shown.append(f"{status.samples_per_s:.1f} samples/s")
    if status.left_s is not None:
        shown.append(f"left {duration(status.left_s)}")
    head = f"{state.run}: live, step {status.step}/{status.steps}, {status.phase}"
    services = [
        f"  {service.role}-{service.replica}  {service.state}  process {service.pid}  heard {service.heard_s:.1f} s ago"
        for service in status.services
    ]
    return ["  ".join([head, *shown]), *services]
