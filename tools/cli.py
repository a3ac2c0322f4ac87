"""The command ``quartet``. Exit codes: 0 done, 1 failed, 2 wrong usage or config.

What a verb needs is imported when it runs: ``quartet --help`` loads neither torch nor rich.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, get_args

from common.config_loading import ConfigError, preset_names
from common.messages import Role
from common.service import WRONG
from tools.commands import (
    UsageError,
    bench_command,
    check_math_command,
    clean_command,
    config_command,
    coordinate_command,
    doctor_command,
    export_command,
    get_model_command,
    health_command,
    keys_command,
    status_command,
    up_command,
)
from tools.resume import DEFAULT
from tools.streams import open_missing, silence

LEVELS = ("debug", "info", "warning", "error")


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

    doctor = verb(verbs, "doctor", doctor_command, "what of this host would break a run, and what to change")
    config_arguments(doctor)
    doctor.add_argument(
        "--meet", type=float, default=0.0, metavar="SECONDS",
        help="wait so long for doctors in other containers, and write into each other's memory",
    )  # fmt: skip
    doctor.add_argument("--json", action="store_true", help="print one JSON list")

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
