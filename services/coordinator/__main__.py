"""Coordinator: sequences the PPO phases of a run. ``python -m services.coordinator --config FILE``"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from common.config_loading import ConfigError, load_config
from common.run_files import RunDirectory
from common.service_main import add_common_arguments, adopt_parent, begin_log

log = logging.getLogger("coordinator")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.coordinator", description="Sequences the PPO phases of a run."
    )
    parser.add_argument("--config", required=True, help="TOML file with the complete config; see `quartet config`")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    begin_log(parser, "coordinator", None, arguments.log_level)
    adopt_parent(arguments.parent)
    try:
        config = load_config(arguments.config)
    except ConfigError as error:
        log.error("the run cannot start: %s", error)
        return 2
    from services.coordinator.service import open_coordinator

    try:
        coordinator = open_coordinator(config, RunDirectory(Path(config.run.directory) / config.run.name))
    except Exception as error:  # whatever is wrong with data, model or memory is one clear line; nothing is left
        log.debug("details", exc_info=error)
        log.error("the run cannot start: %s", error)
        return 1
    return uvloop.run(coordinator.run())


if __name__ == "__main__":
    sys.exit(main())
