"""The command line that all services share: ``python -m services.<name> --run NAME``."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

import uvloop

from common import processes
from common.curve import ClientKeys, CurveError
from common.log_lines import set_up_logging
from common.messages import ANY_REPLICA, Role
from common.replica import Replica
from common.run_files import SharedDirectory
from common.service import ServiceFactory

STACKS = signal.SIGUSR1
"""Has a service write the stacks of all its threads to its log and go on, whatever it is in the middle of."""


def answer_for_stacks() -> None:
    """Has this process act on ``STACKS`` from now on."""
    faulthandler.register(STACKS, file=sys.stderr, all_threads=True)


def begin_log(parser: argparse.ArgumentParser, service: str, replica: int | None, level: str) -> None:
    """Log lines go to standard error, where the supervisor or docker collects them; there too, ``STACKS``."""
    answer_for_stacks()
    try:
        set_up_logging(service, replica, level)
    except ValueError as error:
        parser.error(str(error))


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parent", type=int, default=0, help="end when this parent process dies (set by `quartet up`)")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def adopt_parent(parent: int) -> None:
    if parent:
        processes.die_with_parent(parent)


def replica_parser(role: Role, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", description=about)
    parser.add_argument("--run", required=True, help="name of the run whose coordinator this replica joins")
    parser.add_argument(
        "--replica", type=replica_number, default=0, help="number of this replica, from 0; auto: one that is free"
    )
    parser.add_argument(
        "--connect", default="", help="address of the coordinator; default: the run's socket in /dev/shm"
    )
    parser.add_argument("--keys", default="", help="folder of the keys with which --connect tcp://… is encrypted")
    add_common_arguments(parser)
    return parser


def replica_number(text: str) -> int:
    """``--replica``. Raises ValueError for a text that is neither a number nor ``auto``."""
    return ANY_REPLICA if text == "auto" else int(text)


def run_replica(role: Role, about: str, factory: ServiceFactory) -> int:
    """Parses the command line, joins the run and works until Stop. Returns the exit code."""
    parser = replica_parser(role, about)
    arguments = parser.parse_args()
    begin_log(parser, role, arguments.replica, arguments.log_level)
    adopt_parent(arguments.parent)
    try:
        endpoint = arguments.connect or SharedDirectory.of_run(arguments.run).endpoint
        keys = ClientKeys.load(Path(arguments.keys)) if arguments.keys else None
    except (ValueError, CurveError) as error:
        parser.error(str(error))
    code = uvloop.run(Replica(role, arguments.replica, endpoint, factory, keys).run())
    logging.shutdown()
    os._exit(code)  # the worker thread may be in the middle of a computation that nobody waits for
