"""Printing to whom no longer reads, and starting without standard streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SAY = """
import sys
from tools.streams import say
for number in range(3):
    say(f"line {number}", sys.stdout)
say("the end", sys.stderr)
"""
CLOSED = """
import os, sys
from tools.streams import open_missing
open_missing()
print("out"), print("err", file=sys.stderr), sys.stdout.flush()
assert sys.stdin.read() == ""
assert [os.fstat(number).st_rdev for number in range(3)] == [os.stat(os.devnull).st_rdev] * 3
os._exit(7)
"""


def said(stdout: int, stderr: int = subprocess.PIPE) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", SAY], check=False, stdout=stdout, stderr=stderr, text=True, timeout=20)
    return done.returncode, (done.stderr or "").splitlines()


def test_a_full_disk_behind_standard_output_is_told_once_on_standard_error() -> None:
    with Path("/dev/full").open("w") as full:
        code, errors = said(full.fileno())
    warning = "warning: standard output: No space left on device: nothing more is written there"
    assert (code, errors) == (0, [warning, "the end"])


def test_nobody_reads_at_all() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert said(writer, writer) == (0, [])
    os.close(writer)


def test_missing_streams_lead_to_dev_null() -> None:
    command = 'exec "$0" -c "$1" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, CLOSED], check=False, timeout=20)
    assert done.returncode == 7


def test_a_reader_that_has_seen_enough_ends_a_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tools", "config"]
    done = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=20)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
