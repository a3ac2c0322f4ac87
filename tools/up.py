"""``quartet up``: checks that the run can start, starts it under the supervisor, and sums it up."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import msgspec
import uvloop

from common.config import Config
from common.config_checks import check_config
from common.config_loading import load_config, to_toml
from common.records import Summary, write_whole
from common.run_files import RunDirectory, SharedDirectory
from common.run_lock import holder, supervisor
from tools.clean import clean
from tools.display import duration, make_display
from tools.doctor.report import require_health
from tools.folder_lock import lock_folder
from tools.launch import CommandFactory, service_command
from tools.resume import DEFAULT, CannotStart, earlier, keep_earlier_config, next_number, require_fit, resumed_config
from tools.starter import ANSWER_S
from tools.streams import say
from tools.supervisor import Supervisor

ATTEMPT = "attempt-"


def up(
    source: str | None,
    overrides: Sequence[str] = (),
    command_of: Callable[[Config, RunDirectory], CommandFactory] = service_command,
    resume: bool = False,
    answer_s: float = ANSWER_S,
) -> int:
    """Runs ``source`` (a preset or a TOML file) to its end and returns the exit code.

    With ``resume`` it goes on with the unfinished run of that name; ``source`` None is then the run's own config.
    ``command_of`` says how a service is started, ``answer_s`` after how many seconds without an answer the guardian is
    given up. Raises ConfigError, or CannotStart where the run is live or finished,
    or is not the one to resume.
    """
    config = resumed_config(source, overrides) if resume else load_config(source or DEFAULT, overrides)
    check_config(config)
    files = RunDirectory(Path(config.run.directory) / config.run.name)
    shared = SharedDirectory.of_run(config.run.name)
    say_cleaned()
    refuse_live(config, shared)
    require_health(config)
    if resume:
        earlier(files, config.run.name)  # else its directory would be made
    with sole_user(config, files):
        refuse_finished(config, files, resume)
        if resume:
            go_on(config, files)
        else:
            set_earlier_attempt_aside(config, files)
            write_whole(files.config, to_toml(config).encode())
        files.logs.mkdir(parents=True, exist_ok=True)
        try:
            with make_display(config.run.name) as display:
                command = command_of(config, files)
                code = uvloop.run(Supervisor(config, files, shared, command, display, resume, answer_s).run())
        finally:
            clean(config.run.name)
    if code == 0:
        print_summary(files)
    return code


def go_on(config: Config, files: RunDirectory) -> None:
    require_fit(config, files)
    kept = keep_earlier_config(config, files)
    changed = f"; its config has changed, the one before is {kept}" if kept else ""
    say(f"run '{config.run.name}' goes on in {files.path}{changed}", sys.stderr)


def say_cleaned() -> None:
    for removed in clean():
        killed = f", killed {len(removed.killed)} processes" if removed.killed else ""
        say(f"removed what the dead run '{removed.run}' left in {removed.path}{killed}", sys.stderr)


def refuse_live(config: Config, shared: SharedDirectory) -> None:
    pid = holder(shared)
    if pid is not None:
        raise CannotStart(
            f"run '{config.run.name}' is live: its coordinator is process {pid}. "
            "Choose another --name, or stop that run first"
        )
    pid = supervisor(shared)
    if pid is not None:
        raise CannotStart(
            f"run '{config.run.name}' is live: process {pid} is about to start its coordinator again. "
            "Choose another --name, or stop that run first"
        )


def read_summary(files: RunDirectory) -> Summary | None:
    """The summary of a run; None if there is none, or one that was cut off."""
    try:
        return msgspec.json.decode(files.summary.read_bytes(), type=Summary)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def refuse_finished(config: Config, files: RunDirectory, resume: bool) -> None:
    summary = read_summary(files)
    if summary is not None and summary.finished:
        nothing = f"there is nothing to resume after its {summary.steps} steps; " if resume else ""
        raise CannotStart(
            f"run '{config.run.name}' is finished: {nothing}choose another --name, or delete {files.path}"
        )


@contextlib.contextmanager
def sole_user(config: Config, files: RunDirectory) -> Generator[None]:
    """Keeps a second ``quartet up`` off the run's directory from before the coordinator has its own lock."""
    try:
        files.path.mkdir(parents=True, exist_ok=True)
        descriptor = lock_folder(files.path)
    except OSError as error:
        raise CannotStart(
            f"run.directory: cannot use {files.path}: {error.strerror}. Choose another directory"
        ) from error
    if descriptor is None:
        raise CannotStart(
            f"run '{config.run.name}' is being started or stopped by another `quartet up` in {files.path}. "
            "Choose another --name, or wait for it to end"
        )
    try:
        yield
    finally:
        os.close(descriptor)


def set_earlier_attempt_aside(config: Config, files: RunDirectory) -> None:
    """Moves the files of an unfinished earlier run into ``attempt-<k>/``; nothing is deleted."""
    entries = [path for path in files.path.iterdir() if not path.name.startswith(ATTEMPT)]
    if not entries:
        return
    aside = files.path / f"{ATTEMPT}{next_number((path.name for path in files.path.iterdir()), ATTEMPT)}"
    aside.mkdir()
    for path in entries:
        path.rename(aside / path.name)
    say(f"run '{config.run.name}' did not finish before: starting over, its earlier files are in {aside}", sys.stderr)


def print_summary(files: RunDirectory) -> None:
    summary = read_summary(files)
    if summary is None:
        say(f"the run ended without {files.summary}", sys.stderr)
        return
    say("\n".join(summary_lines(summary, files)), sys.stdout)


def summary_lines(summary: Summary, files: RunDirectory) -> list[str]:
    phases = "  ".join(f"{phase} {seconds:.1f} s" for phase, seconds in summary.phase_s.items())
    masked = f" ({summary.masked_samples} masked, see {files.log('coordinator', 0)})" if summary.masked_samples else ""
    skipped = f"{summary.rows_without_ground_truth} without ground truth, {summary.rows_too_long} too long"
    any_skipped = summary.rows_without_ground_truth + summary.rows_too_long
    overhead = f"coordinator overhead {summary.coordinator_overhead_ratio:.1%}"
    return [
        f"run {summary.run}: {summary.steps} steps, {summary.samples} samples{masked} in {duration(summary.wall_s)}",
        f"  accuracy  {change(summary.accuracy_first, summary.accuracy_last)}  on held-out problems",
        f"  reward    {change(summary.reward_first, summary.reward_last)}  of a step's samples",
        f"  phases    {phases}",
        f"  cache     {summary.cache_hit_ratio:.1%} hits;  {overhead}",
        *([f"  skipped   rows: {skipped}"] if any_skipped else []),
        f"  model     {summary.trained_model or 'not saved'}",
        f"  files     {files.path}",
    ]


def change(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return "not measured"
    return f"{first:.3f} -> {last:.3f}"
