"""Standard output and error of commands that go on when nobody reads them any more."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from typing import TextIO


def open_missing() -> None:
    """Puts /dev/null in the place of standard streams that this process was started without (``command >&-``)."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            found = os.open(os.devnull, os.O_RDWR)
            if found != number:
                os.dup2(found, number)
                os.close(found)
            setattr(sys, name, os.fdopen(number, mode))


def say(text: str, stream: TextIO) -> None:
    """Prints a line at once, if there is somebody to read it."""
    with may_be_unread(stream):
        print(text, file=stream, flush=True)


@contextlib.contextmanager
def may_be_unread(stream: TextIO) -> Generator[None]:
    """For printing inside: where it fails (a closed pipe or terminal, a full disk), the stream leads nowhere after it.

    A failure of standard output is told on standard error.
    """
    try:
        yield
    except OSError as error:
        silence(stream)
        if stream is not sys.stderr:
            say(f"warning: standard output: {error.strerror}: nothing more is written there", sys.stderr)


def silence(stream: TextIO) -> None:
    """Leads a stream to /dev/null, what it still holds included: else Python would fail on that at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
