"""What each verb of ``quartet`` does. What a verb needs is imported when it runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from common.config_loading import ConfigError, load_config, to_toml
from tools.resume import DEFAULT

DONE, FAILED, WRONG = 0, 1, 2


class UsageError(Exception):
    """The command line asks for what there is not."""


def up_command(parsed: argparse.Namespace) -> int:
    from tools.up import CannotStart, up

    short = {"run.name": parsed.name, "run.seed": parsed.seed, "log.level": parsed.log_level}
    overrides = [*parsed.overrides, *(f"{key}={value}" for key, value in short.items() if value is not None)]
    try:
        return up(parsed.source, overrides, resume=parsed.resume)
    except CannotStart as error:
        raise UsageError(str(error)) from error


def coordinate_command(parsed: argparse.Namespace) -> int:
    from common.log_lines import set_up_logging
    from common.run_files import FINISHED, STOPPED
    from tools.coordinate import HasEnded, coordinate, keep_to_itself
    from tools.resume import CannotStart

    set_up_logging("coordinator", None, "info")
    log = logging.getLogger("coordinate")
    try:
        prepared = coordinate(parsed.source or DEFAULT, parsed.overrides, os.environ)
        keep_to_itself(prepared.files)
        os.execv(prepared.command[0], prepared.command)
    except HasEnded as ended:
        level = logging.INFO if str(ended) in (FINISHED, STOPPED) else logging.ERROR
        more = "`docker compose up` goes on with an unfinished run, when pause has ended"
        log.log(level, "the run has ended: %s. %s", ended, more)
        return DONE
    except (ConfigError, CannotStart) as error:
        for line in str(error).splitlines():
            log.error("%s%s", line, " (under docker compose: QUARTET_RUN in .env)" if "--name" in line else "")
        return WRONG


def health_command(parsed: argparse.Namespace) -> int:
    import asyncio

    from tools.health import ask

    problem = asyncio.run(ask(parsed.name, parsed.role))
    print(problem or "well")
    return FAILED if problem else DONE


def doctor_command(parsed: argparse.Namespace) -> int:
    from tools.doctor.finding import errors
    from tools.doctor.report import examine, lines
    from tools.settings import config_of, run_config

    config = config_of(parsed.source or run_config(os.environ) or DEFAULT, parsed.overrides, os.environ)
    findings = examine(config, parsed.meet)
    if parsed.json:
        print_json(findings)
    else:
        print("\n".join(lines(findings)))
    return FAILED if errors(findings) else DONE


def status_command(parsed: argparse.Namespace) -> int:
    from tools.status import lines, states

    directory = Path(parsed.directory)
    found = states(parsed.name, directory)
    if parsed.json:
        print_json(found)
    else:
        for state in found:
            print("\n".join(lines(state, directory)))
        if not found:
            print("no run is live")
    return FAILED if any(state.state == "unknown" for state in found) else DONE


def clean_command(parsed: argparse.Namespace) -> int:
    from tools.clean import clean

    removed = clean(parsed.name)
    if parsed.json:
        print_json(removed)
        return DONE
    for entry in removed:
        killed = ", ".join(f"{process.service}-{process.replica} ({process.pid})" for process in entry.killed) or "none"
        print(f"{entry.run}: removed {entry.path} ({entry.freed_bytes / 2**20:.1f} MiB), processes killed: {killed}")
    if not removed:
        print("nothing to clean")
    return DONE


def check_math_command(parsed: argparse.Namespace) -> int:
    from tools import check_math

    if not Path(parsed.file).is_file():
        raise UsageError(f"{parsed.file}: no such file")
    return check_math.main(parsed.file, sys.stdout)


def get_model_command(parsed: argparse.Namespace) -> int:
    from tools.get_model import ModelError, get_model

    try:
        print(get_model(parsed.name))
    except ModelError as error:
        print(f"quartet {error}", file=sys.stderr)
        return FAILED
    return DONE


def export_command(parsed: argparse.Namespace) -> int:
    from common.checkpoints.files import CheckpointError
    from tools.export import export_run

    try:
        print(export_run(Path(parsed.directory) / parsed.name, parsed.step, parsed.to))
    except (CheckpointError, OSError) as error:
        print(f"quartet export: {error}", file=sys.stderr)
        return FAILED
    return DONE


def keys_command(parsed: argparse.Namespace) -> int:
    from common.curve import CurveError
    from tools.keys import keys

    try:
        print("\n".join(keys(parsed.directory)))
    except CurveError as error:
        print(f"quartet keys: {error}", file=sys.stderr)
        return FAILED
    return DONE


def bench_command(parsed: argparse.Namespace) -> int:
    from tools.bench import BENCHES
    from tools.bench.record import BenchError, lines, measure, save

    if parsed.name is not None and parsed.name not in BENCHES:
        raise UsageError(f"{parsed.name}: no such benchmark. There are: {', '.join(BENCHES)}")
    for name in [parsed.name] if parsed.name is not None else list(BENCHES):
        try:
            record = measure(name)
        except BenchError as error:
            print(f"quartet bench {name}: {error}", file=sys.stderr)
            return FAILED
        if parsed.json:
            print_json(record)
        else:
            print("\n".join(lines(record)), flush=True)
        if parsed.save:
            print(f"saved {save(record)}", file=sys.stderr)
    return DONE


def config_command(parsed: argparse.Namespace) -> int:
    if parsed.explain is not None:
        from tools.config_docs import explain

        try:
            print("\n".join(explain(parsed.explain)))
        except KeyError as error:
            raise UsageError(error.args[0]) from error
        return DONE
    print(to_toml(load_config(parsed.source or DEFAULT, parsed.overrides)), end="")
    return DONE


def print_json(value: Any) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)
