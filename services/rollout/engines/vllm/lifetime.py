"""The engine's process ends with the service's, however that ends, and leaves no names in shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
from pathlib import Path

watched: set[int] = set()
"""Services that this process ends with: one."""


def end_with(service: int) -> None:
    """Ends the engine when the service's process ends: this one, and the one between them where vLLM has put one.

    Called anew it does nothing. A service that has ended already ends the engine at once.
    """
    if service in watched:
        return
    watched.add(service)
    try:
        descriptor = os.pidfd_open(service)
    except ProcessLookupError:
        _end(service)
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        _end(service)

    threading.Thread(target=watch, name="end-with-service", daemon=True).start()


def _end(service: int) -> None:
    parent = multiprocessing.parent_process()
    # By what it was started by: who adopts this process when that has ended is none of the engine's.
    if parent is not None and parent.pid is not None and parent.pid != service and os.getppid() == parent.pid:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
            os.kill(parent.pid, signal.SIGKILL)
    os._exit(0)


def unname_shared_memory() -> None:
    """vLLM's queue between its processes is mapped by now; without a name it goes with them, however they end."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.parent == Path("/dev/shm") and path.name.startswith("psm_"):
            path.unlink(missing_ok=True)
