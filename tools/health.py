"""``quartet health ROLE``: asks the coordinator how this container's replica does; for health checks."""

from __future__ import annotations

import asyncio
import socket
import uuid
from typing import Literal

from common import bus
from common.messages import Health, Probe, Role
from common.run_files import SharedDirectory

WAIT_S = 3.0
SILENT_S = 30.0
"""A replica says something each second, unless a computation keeps its interpreter lock."""


async def ask(run: str, role: Role | Literal["coordinator"], wait_s: float = WAIT_S) -> str:
    """What is wrong, or nothing. A message is exchanged: a socket's file outlives the process that listened there."""
    try:
        endpoint = SharedDirectory.of_run(run).endpoint
    except ValueError as error:
        return str(error)
    dealer = bus.Dealer(endpoint, f"health-{uuid.uuid4()}")
    try:
        async with asyncio.timeout(wait_s):
            dealer.send(Probe(epoch=0, role=role, host=socket.gethostname()))
            answer = await dealer.receive()
            while not isinstance(answer, Health):
                answer = await dealer.receive()
    except TimeoutError:
        return f"the coordinator of run '{run}' does not answer at {endpoint} within {wait_s:g} s"
    finally:
        dealer.close(0)
    match answer.state:
        case "absent":
            return f"the coordinator of run '{run}' knows no {role} in this container"
        case "starting":
            return f"this {role} is still starting"
        case "waiting" | "working" if answer.heard_s > SILENT_S:
            return f"the coordinator has not heard this {role} for {answer.heard_s:.0f} s"
        case "waiting" | "working":
            return ""
