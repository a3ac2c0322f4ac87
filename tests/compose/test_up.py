"""``docker compose up`` from beginning to end: preset tiny, in half its steps, scaled while it runs, with each service
killed once."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from typing import Any

import pytest

from tests.compose.engine import Project

pytestmark = pytest.mark.timeout(2400)  # the first one builds the images

KILLED = ("reward", "rollout", "critic", "trainer", "coordinator")
STEPS = 100
GOOD = 0.85
FINISH_S = 900.0


def test_tiny_reaches_its_target_whoever_is_killed(project: Project) -> None:
    project.set(QUARTET_PRESET="tiny", QUARTET_RUN__STEPS=str(STEPS))
    began = time.monotonic()
    project.do("up", "--detach", "--no-build")
    project.until(lambda: project.steps() > 0, "the first step", 180)
    print(f"first step finished {time.monotonic() - began:.1f} s after `docker compose up`")
    scaled_up(project)
    for service in KILLED:
        killed(project, service)
    scaled_down(project)
    project.until(lambda: set(project.exit_codes().values()) == {0}, "the end of every service", FINISH_S)
    summary = json.loads((project.run / "summary.json").read_text())
    assert (summary["finished"], summary["steps"], summary["masked_samples"]) == (True, STEPS, 0)
    assert summary["accuracy_last"] > GOOD > summary["accuracy_first"]
    assert project.ledger("SELECT count(*), count(DISTINCT step) FROM samples WHERE step > 0") != [(0, 0)]
    print(f"the run took {summary['wall_s']:.0f} s")
    require_logs(project)
    project.down()
    assert project.left() == []


def scaled_up(project: Project) -> None:
    """Two more reward replicas take part."""
    project.do("up", "--detach", "--no-build", "--no-recreate", "--scale", "reward=3")
    query = "SELECT min(given) FROM leases WHERE role = 'reward' AND replica = ?"
    for replica in (1, 2):
        project.until(lambda number=replica: project.ledger(query, number) != [(None,)], f"a lease of reward {replica}")
    began = sorted(moment(container) for container in project.containers("reward"))[1:]
    leased = sorted(float(project.ledger(query, replica)[0][0]) for replica in (1, 2))
    waited = [f"{lease - start:.1f}" for lease, start in zip(leased, began, strict=True)]
    print(f"first leases {' and '.join(waited)} s after the start of the added containers")


def scaled_down(project: Project) -> None:
    """Replicas that go finish what they hold: nothing is handed out again."""
    at = time.time()
    project.do("up", "--detach", "--no-build", "--no-recreate", "--scale", "reward=1")
    gone = "SELECT count(*) FROM events WHERE kind = 'death' AND time > ? AND text LIKE 'reward%'"
    project.until(lambda: project.ledger(gone, at) == [(2,)], "the leave of two", 60)
    lost = "SELECT replica, task, state FROM leases WHERE role = 'reward' AND ended > ? AND state != 'done'"
    assert project.ledger(lost, at) == []


def moment(container: dict[str, Any]) -> float:
    """When a container was started, seconds since the epoch."""
    return datetime.fromisoformat(container["State"]["StartedAt"][:26].rstrip("Z") + "+00:00").timestamp()


def killed(project: Project, service: str) -> None:
    """Its death is noticed, it comes back by its restart policy, and the run goes on."""
    before, done, at = project.containers(service)[0]["RestartCount"], project.steps(), time.time()
    project.kill(service)
    back = project.until(lambda: project.containers(service)[0]["RestartCount"] > before, f"{service}'s restart", 60)
    on = project.until(lambda: project.steps() >= done + 2, f"a step after the death of {service}", 120)
    noticed = project.ledger(
        "SELECT min(time) FROM events WHERE kind = 'death' AND time > ? AND text LIKE ?", at, f"{service}%"
    )
    told = f"noticed after {noticed[0][0] - at:.2f} s, " if noticed[0][0] else ""
    assert told or service == "coordinator", f"nobody noticed the death of {service}"
    print(f"{service}: {told}back after {back:.1f} s, two steps on after {back + on:.1f} s")


def require_logs(project: Project) -> None:
    """Each service's own, one line an event: time, who, level."""
    shape = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ (\w+)(-\d|-\?)? (INFO|WARNING|ERROR) \S")
    for service in (*KILLED,):
        lines = [line.removeprefix("\x1b[2K") for line in project.logs(service).splitlines() if line.strip()]
        odd = [line for line in lines if shape.match(line) is None]
        assert lines, f"{service} has written nothing"
        assert not odd, f"{service}: {odd[:5]}"
