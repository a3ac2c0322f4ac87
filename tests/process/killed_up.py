"""``quartet up tiny`` with services that a plan kills: ``killed_up.py FOLDER [--resume] OVERRIDE...``; see traps.py."""

from __future__ import annotations

import sys
from pathlib import Path

from common.config import Config
from common.run_files import RunDirectory
from tools.launch import CommandFactory, ServiceSpec, service_command
from tools.up import CannotStart, up

DYING = Path(__file__).with_name("dying_service.py")
FOLDER = sys.argv[1]


def command_of(config: Config, files: RunDirectory) -> CommandFactory:
    real = service_command(config, files)

    def command(spec: ServiceSpec, parent: int) -> list[str]:
        python, safe_path, module_flag, module, *arguments = real(spec, parent)
        assert (safe_path, module_flag, module) == ("-P", "-m", f"services.{spec.service}")
        return [python, "-P", str(DYING), FOLDER, spec.service, *arguments]

    return command


if __name__ == "__main__":
    resume = "--resume" in sys.argv
    overrides = [argument for argument in sys.argv[2:] if argument != "--resume"]
    try:
        sys.exit(up("tiny", overrides, command_of, resume))
    except CannotStart as error:
        print(error, file=sys.stderr)
        sys.exit(2)
