"""A run that is stopped, loses its coordinator, and ends; and code that is changed."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.compose.engine import Project, docker

pytestmark = pytest.mark.timeout(2400)  # the first one builds the images

SHORT = {"QUARTET_PRESET": "tiny", "QUARTET_EVAL__ROWS": "1", "QUARTET_EVAL__EVERY": "0"}
STEPS = 45
NOTICED_S = 60.0
OFTEN = """
services:
  trainer: {healthcheck: {interval: 2s}}
  coordinator: {healthcheck: {interval: 2s}}
"""
"""So that a test need not wait for three health checks that are ten seconds apart."""


def test_a_run_is_stopped_goes_on_loses_its_coordinator_and_ends(project: Project) -> None:
    project.set(**SHORT, QUARTET_RUN__STEPS=str(STEPS))
    (project.folder / "often.yaml").write_text(OFTEN)
    project.more.append("often.yaml")
    project.do("up", "--detach", "--no-build")
    project.until(lambda: project.steps() > 2, "the first steps")
    containers_share_memory(project)
    user_code_is_kept_apart(project)
    project.set(**SHORT, QUARTET_RUN__STEPS=str(STEPS), QUARTET_LOG="json")
    before = project.steps()
    project.do("up", "--detach", "--no-build")
    project.until(lambda: project.steps() > before, "a step after a setting was changed")
    project.do("stop")
    stopped = project.steps()
    assert 0 < stopped < STEPS
    project.do("up", "--detach", "--no-build")
    project.until(lambda: project.steps() > stopped, "a step after the stop")
    a_stale_socket_is_no_health(project)
    project.do("up", "--no-build", within=200)
    assert set(project.exit_codes().values()) == {0}
    assert project.ledger("SELECT step FROM steps WHERE step > 0 ORDER BY step") == [(n + 1,) for n in range(STEPS)]
    code, _ = project.compose("up", "--no-build", within=120)
    assert code != 0
    assert "run 'run' is finished: choose another" in project.logs("coordinator")


def containers_share_memory(project: Project) -> None:
    """Doctors in two containers write into each other's memory."""
    ask = ("quartet", "doctor", "--json", "--meet", "60")
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(project.do, "exec", "-T", service, *ask) for service in ("trainer", "critic")]
        for answer in asked:
            findings = {entry["check"]: entry for entry in json.loads(answer.result().splitlines()[-1])}
            (met,) = [finding for check, finding in findings.items() if check.startswith("memory with ")]
            assert met["level"] == findings["/dev/shm"]["level"] == findings["socket"]["level"] == "ok"


TRIES = """
import json, os, pathlib, socket
run = pathlib.Path("/dev/shm/quartet-run")
tries = {
    "write tokens": lambda: open(run / "tokens", "r+b"),
    "make a file beside them": lambda: open(run / "x", "w"),
    "read weights": lambda: os.listdir(run / "weights"),
    "read the secret": lambda: open(run / "secret"),
    "see the records": lambda: os.stat("/work/runs/run"),
    "write data": lambda: open("/work/data/x", "w"),
    "write models": lambda: open("/models/x", "w"),
    "write the code": lambda: open("/app/x", "w"),
    "become root": lambda: os.setuid(0),
    "see the others": lambda: [path for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
                               if b"services.train" b"er" in path.read_bytes()][0],
    "leave the host": lambda: [name for _, name in socket.if_nameindex() if name != "lo"][0],
}
done = []
for what, attempt in tries.items():
    try:
        attempt()
        done.append(what)
    except (OSError, IndexError):
        pass
print(json.dumps({"done": done, "tokens": len(open(run / "tokens", "rb").read(8)), "user": os.getuid()}))
"""


def user_code_is_kept_apart(project: Project) -> None:
    """What a reward function may do: read the token cache."""
    answer = json.loads(project.do("exec", "-T", "reward", "python", "-c", TRIES).splitlines()[-1])
    assert answer == {"done": [], "tokens": 8, "user": 1001}


def a_stale_socket_is_no_health(project: Project) -> None:
    """`docker compose kill` switches the restart policy off: the coordinator stays away, and its socket stays."""
    project.until(lambda: project.health("trainer") == "healthy", "compose shows it healthy", NOTICED_S)
    project.do("kill", "coordinator")
    project.do("exec", "-T", "trainer", "test", "-S", "/dev/shm/quartet-run/bus.sock")
    project.until(lambda: project.health("trainer") == "unhealthy", "compose shows it unhealthy", NOTICED_S)
    assert project.health("coordinator") == "unhealthy"
    (told,) = [line for line in project.logs("trainer").splitlines() if "has been silent" in line]
    assert '"level":"WARNING"' in told
    assert "the coordinator at ipc:///dev/shm/quartet-run/" in told


def test_a_change_of_code_is_built_without_the_packages(project: Project) -> None:
    project.set(**SHORT, QUARTET_RUN__STEPS="1")
    project.environment |= {"QUARTET_IMAGE": "quartet-changed", "BUILDKIT_PROGRESS": "plain"}
    project.copy_code()
    for part in ("services/coordinator/step.py", "services/trainer/service.py"):
        with (project.folder / part).open("a") as file:
            file.write('\n__import__("logging").getLogger("new").warning("this code is new")\n')
    began = time.monotonic()
    output = project.do("up", "--detach", "--build", within=300)
    project.until(lambda: project.steps() > 0, "the first step")
    print(f"first step finished {time.monotonic() - began:.1f} s after `docker compose up --build` with changed code")
    installed = re.findall(r"^(#\d+) \[.*packages .*pip install", output, re.MULTILINE)
    assert installed, output
    assert [step for step in installed if f"{step} CACHED" not in output] == []
    for service in ("coordinator", "trainer"):
        assert "this code is new" in project.logs(service)
    project.down()
    docker("rmi", "quartet-changed-core", "quartet-changed-learner")
