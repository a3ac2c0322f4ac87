"""The command ``quartet``. Exit codes: 0 done, 1 failed, 2 wrong usage or config.

What a verb needs is imported when it runs: ``quartet --help`` loads neither torch nor rich.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import msgspec

from common.config_loading import ConfigError, load_config, preset_names, to_toml
from common.messages import Role
from common.service import WRONG
from tools.resume import DEFAULT
from tools.streams import open_missing, silence

DONE, FAILED = 0, 1
LEVELS = ("debug", "info", "warning", "error")


class UsageError(Exception):
    """The command line asks for what there is not."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    open_missing()
    parsed = parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        code = run(parsed)
        sys.stdout.flush()
        return code
    except (ConfigError, UsageError) as error:
        print(f"quartet {parsed.verb}: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        silence(sys.stdout)
        return 128 + signal.SIGPIPE


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="quartet", description="PPO post-training of language models by cooperating services."
    )
    top.add_argument("--version", action="version", version=f"quartet {version()}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    run_verbs(verbs)
    tool_verbs(verbs)
    return top


def run_verbs(verbs: Any) -> None:
    """What starts runs, shows them and cleans up after them."""
    up = verb(verbs, "up", up_command, "run a preset or a config file to its end, its services as local processes")
    config_arguments(up)
    up.add_argument("--name", help="name of the run, short for --set run.name=NAME")
    up.add_argument(
        "--resume",
        action="store_true",
        help="go on with the unfinished run of that name from its newest checkpoint; without PRESET or FILE with the "
        "run's own config",
    )
    up.add_argument("--seed", type=int, help="short for --set run.seed=SEED")
    up.add_argument("--log-level", choices=LEVELS, help="short for --set log.level=LEVEL")

    alone = verb(verbs, "coordinate", coordinate_command, "run the coordinator alone; others start the services")
    config_arguments(alone)

    health = verb(verbs, "health", health_command, "whether the coordinator, or this host's replica, does its work")
    health.add_argument("role", choices=("coordinator", *get_args(Role)))
    health.add_argument("--run", required=True, dest="name", metavar="RUN", help="name of the run")

    status = verb(verbs, "status", status_command, "what the live runs are doing, or how a named run ended")
    status.add_argument("name", nargs="?", metavar="RUN", help="this run alone; also a finished one")
    status.add_argument("--directory", default="runs", help="folder of runs; default: runs")
    status.add_argument("--json", action="store_true", help="print one JSON list")

    clean = verb(verbs, "clean", clean_command, "remove the processes and shared memory of dead runs")
    clean.add_argument("name", nargs="?", metavar="RUN", help="this run alone")
    clean.add_argument("--json", action="store_true", help="print one JSON list")

    config = verb(verbs, "config", config_command, "print the resolved config as TOML")
    config_arguments(config)
    config.add_argument(
        "--explain", metavar="KEY", help="print what a key or section means, and its default, instead; such as ppo.kl"
    )


def tool_verbs(verbs: Any) -> None:
    """What needs no live run."""
    math = verb(verbs, "check-math", check_math_command, "check PPO's functions against a file of cases")
    math.add_argument(
        "file",
        metavar="FILE",
        help="cases as JSON, such as tests/unit/cases/ppo_math.json; tools/math_cases.py has the format",
    )

    model = verb(verbs, "get-model", get_model_command, "fetch a model and convert it to a Hugging Face directory")
    model.add_argument("name", metavar="NAME", help="smollm2, or a hub id such as owner/model")

    export = verb(verbs, "export", export_command, "make a Hugging Face directory of a run's saved state")
    export.add_argument("name", metavar="RUN", help="name of the run")
    export.add_argument("--step", type=int, help="the state after this step; default: the newest")
    export.add_argument("--to", metavar="DIR", help="default: export-<step> beside the run's checkpoints")
    export.add_argument("--directory", default="runs", help="folder of runs; default: runs")

    keys = verb(verbs, "keys", keys_command, "make the key pairs with which the bus may leave its host")
    keys.add_argument("--directory", default="keys", help="folder that is made for them; default: keys")

    bench = verb(verbs, "bench", bench_command, "measure; without NAME everything")
    bench.add_argument("name", nargs="?", metavar="NAME", help="one benchmark, such as rollout or step")
    bench.add_argument("--json", action="store_true", help="print one JSON object for each benchmark")
    bench.add_argument("--save", action="store_true", help="keep the result in tools/bench/results/")


def verb(verbs: Any, name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = verbs.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    made.set_defaults(run=run)
    return made


def config_arguments(command: argparse.ArgumentParser) -> None:
    presets = ", ".join(preset_names())
    command.add_argument(
        "source", nargs="?", metavar="PRESET|FILE", help=f"{presets}, or a TOML file; default: {DEFAULT}"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="override a key; repeatable",
    )


def version() -> str:
    try:
        return metadata.version("quartet")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def up_command(parsed: argparse.Namespace) -> int:
    from tools.up import CannotStart, up

    short = {"run.name": parsed.name, "run.seed": parsed.seed, "log.level": parsed.log_level}
    overrides = [*parsed.overrides, *(f"{key}={value}" for key, value in short.items() if value is not None)]
    try:
        return up(parsed.source, overrides, resume=parsed.resume)
    except CannotStart as error:
        raise UsageError(str(error)) from error


def coordinate_command(parsed: argparse.Namespace) -> int:
    from tools.coordinate import coordinate
    from tools.resume import CannotStart

    try:
        command = coordinate(parsed.source or DEFAULT, parsed.overrides, os.environ)
    except CannotStart as error:
        raise UsageError(str(error)) from error
    os.execv(command[0], command)


def health_command(parsed: argparse.Namespace) -> int:
    import asyncio

    from tools.health import ask

    problem = asyncio.run(ask(parsed.name, parsed.role))
    print(problem or "well")
    return FAILED if problem else DONE


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
