"""A whole run with a hostile client on its socket, and what of a run others may read."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import load_file

from tests.process.whole_runs import ENDLESS, ENDS_WITHIN, WholeRun, finish

HOSTILE = Path(__file__).resolve().parents[1] / "wire" / "hostile_client.py"
UMASK_0 = ("sh", "-c", 'umask 0; exec "$@"', "sh")
DEEDS = {"garbage", "parts", "unknown", "huge", "hellos", "forged", "past_and_future"}


def weights(run: WholeRun) -> dict[str, bytes]:
    tensors = load_file(run.files.checkpoints / "final" / "model.safetensors")
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def test_a_run_under_a_hostile_client_ends_as_if_it_had_been_alone(
    new_run: Callable[[], WholeRun], wait_until: Callable[..., None]
) -> None:
    quiet, disturbed = new_run(), new_run()
    assert quiet.complete("run.seed=5").code == 0
    process = disturbed.start("run.seed=5")
    wait_until(disturbed.shared.socket.exists, "the run's socket", ENDS_WITHIN)
    command = [sys.executable, str(HOSTILE), disturbed.shared.endpoint, "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as client:
        try:
            ended = finish(process)
            done, failure = client.communicate("stop\n", timeout=ENDS_WITHIN)
        finally:
            client.kill()
    assert ended.code == 0, ended.err
    assert client.returncode == 0, failure
    assert set(json.loads(done)) >= DEEDS, "the client did all that it knows"
    assert disturbed.samples() == quiet.samples()
    assert weights(disturbed) == weights(quiet)
    log = disturbed.log("coordinator")
    assert "Traceback" not in log
    first = [line for line in log.splitlines() if "(told once, then counted)" in line]
    assert first
    peers = [found.group(1) for line in first if (found := re.search(r"refused what (.*) sent", line))]
    assert sum(peer.startswith("a stranger (stranger…") for peer in peers) <= 1
    assert sum(peer.startswith("reward 77") for peer in peers) == 1
    assert disturbed.summary().masked_samples == quiet.summary().masked_samples


def test_nobody_else_may_read_what_a_run_has_in_memory(run: WholeRun) -> None:
    run.start(*ENDLESS, prefix=UMASK_0)
    run.reach(1)
    open_to_others: dict[str, str] = {}
    for folder, _, files in os.walk(run.shared.path):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            try:
                mode = stat.S_IMODE(path.lstat().st_mode)
            except FileNotFoundError:  # replaced while it was looked at, as the status file is
                continue
            if mode & 0o077:
                open_to_others[path.name] = f"{mode:04o}"
    assert not open_to_others
    assert stat.S_ISSOCK(run.shared.socket.stat().st_mode)
