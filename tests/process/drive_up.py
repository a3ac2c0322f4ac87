"""``quartet up`` with fake services: ``drive_up.py BEHAVIOURS_JSON [--resume] OVERRIDE...``; see fake_service.py.

Here ``missing`` is a service whose program does not exist, and the behaviour of ``guardian`` is the number of seconds
after which it is given up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common.config import Config
from common.run_files import RunDirectory
from tools.launch import CommandFactory, ServiceSpec
from tools.starter import ANSWER_S
from tools.up import CannotStart, up

FAKE = Path(__file__).with_name("fake_service.py")
BEHAVIOURS: dict[str, str] = json.loads(sys.argv[1])


def command_of(config: Config, files: RunDirectory) -> CommandFactory:
    def command(spec: ServiceSpec, parent: int) -> list[str]:
        place = [spec.service, str(spec.replica), config.run.name, str(files.path), str(parent)]
        behaviour = BEHAVIOURS.get(spec.name, "")
        program = sys.executable if behaviour != "missing" else "no-such-program"
        return [program, str(FAKE), *place, behaviour]

    return command


if __name__ == "__main__":
    resume = sys.argv[2] == "--resume"
    try:
        answer_s = float(BEHAVIOURS.get("guardian", ANSWER_S))
        sys.exit(up(None if resume else "tiny", sys.argv[2 + resume :], command_of, resume, answer_s))
    except CannotStart as error:
        print(error, file=sys.stderr)
        sys.exit(2)
