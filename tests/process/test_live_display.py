"""What ``quartet up`` shows on a terminal, seen through a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from supervised import DRIVE, ENDS_WITHIN, SHORT

from common.run_files import SharedDirectory


def test_the_live_display_on_a_terminal(run_name: str, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [
        sys.executable,
        str(DRIVE),
        json.dumps({"coordinator-0": "steps 4"}),
        f"run.name={run_name}",
        "run.steps=4",
        *SHORT,
    ]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(command, cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    try:
        shown = read_terminal(master)
        code = process.wait(ENDS_WITHIN)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert code == 0, shown
    assert "\x1b[?25l" in shown, "the cursor is hidden while the display lives"
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "and shown again after it"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"run \S+ .*step 2/4 +GENERATE +left 1m15s", plain)
    assert "step 4/4" in plain
    assert re.search(r"reward 0\.400\s+accuracy 0\.200\s+kl 0\.040\s+12\.5 samples/s", plain)
    assert "held-out accuracy 0.500  on 40 rows" in plain
    assert re.search(r"trainer-0\s+idle\s+process \d+", plain)
    assert f"run {run_name}: 4 steps, 512 samples" in plain


def test_a_terminal_that_is_closed_ends_the_run(run_name: str, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, str(DRIVE), json.dumps({"coordinator-0": "wait"}), f"run.name={run_name}", *SHORT]
    # A session of its own, in which the terminal that it opens first is the controlling one.
    opens = 'exec <>"$0" >&0 2>&0; exec "$@"'
    process = subprocess.Popen(
        ["sh", "-c", opens, os.ttyname(slave), *command], cwd=tmp_path, stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm-256color"}, start_new_session=True,
    )  # fmt: skip
    try:
        shown = b""
        while b"trainer-0" not in shown:
            assert select.select([master], [], [], ENDS_WITHIN)[0], shown
            shown += os.read(master, 65536)
        os.close(slave)
        os.close(master)
        assert process.wait(ENDS_WITHIN) == 129
    finally:
        process.kill()
        process.wait()
    assert not SharedDirectory.of_run(run_name).path.exists()


def read_terminal(master: int) -> str:
    """Everything a program writes until it closes the terminal (EIO on Linux)."""
    parts: list[bytes] = []
    deadline = time.monotonic() + ENDS_WITHIN
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 0.5)[0]:
            continue
        try:
            data = os.read(master, 65536)
        except OSError:
            break
        parts.append(data)
    return b"".join(parts).decode(errors="replace")
