"""``docker compose up`` from beginning to end: preset tiny, scaled while it runs, with each service killed once."""

from __future__ import annotations

import json
import re

import pytest

from tests.compose.engine import Project

pytestmark = pytest.mark.timeout(2400)  # the first one builds the images

KILLED = ("reward", "rollout", "critic", "trainer", "coordinator")
STEPS = 200
GOOD = 0.85
FINISH_S = 900.0


def test_tiny_reaches_its_target_whoever_is_killed(project: Project) -> None:
    project.set(QUARTET_PRESET="tiny", QUARTET_LOG="text")
    project.do("up", "--detach", "--no-build")
    first = project.until(lambda: project.steps() > 0, "the first step", 180)
    scaled_up(project)
    for service in KILLED:
        killed(project, service)
    project.do("up", "--detach", "--no-build", "--no-recreate", "--scale", "reward=1")
    project.until(lambda: set(project.exit_codes().values()) == {0}, "the end of every service", FINISH_S)
    summary = json.loads((project.run / "summary.json").read_text())
    assert (summary["finished"], summary["steps"], summary["masked_samples"]) == (True, STEPS, 0)
    assert summary["accuracy_last"] > GOOD > summary["accuracy_first"]
    assert project.ledger("SELECT count(*), count(DISTINCT step) FROM samples WHERE step > 0") != [(0, 0)]
    print(f"first step {first:.1f} s after `up -d` returned; the run took {summary['wall_s']:.0f} s")
    require_logs(project)
    project.down()
    assert project.left() == []


def scaled_up(project: Project) -> None:
    """Two more reward replicas take part, each soon after its container has started."""
    project.do("up", "--detach", "--no-build", "--no-recreate", "--scale", "reward=3")
    query = "SELECT min(given) FROM leases WHERE role = 'reward' AND replica = ?"
    for replica in (1, 2):
        project.until(lambda number=replica: project.ledger(query, number) != [(None,)], f"a lease of reward {replica}")


def killed(project: Project, service: str) -> None:
    """It comes back by its restart policy, and the run goes on."""
    before, done = project.containers(service)[0]["RestartCount"], project.steps()
    project.kill(service)
    back = project.until(lambda: project.containers(service)[0]["RestartCount"] > before, f"{service}'s restart", 60)
    on = project.until(lambda: project.steps() >= done + 2, f"a step after the death of {service}", 120)
    print(f"{service}: back after {back:.1f} s, two steps on after {back + on:.1f} s")


def require_logs(project: Project) -> None:
    """Each service's own, one line an event: time, who, level."""
    shape = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ (\w+)(-\d|-\?)? (INFO|WARNING|ERROR) \S")
    for service in (*KILLED,):
        lines = [line.removeprefix("\x1b[2K") for line in project.logs(service).splitlines() if line.strip()]
        odd = [line for line in lines if shape.match(line) is None]
        assert lines, f"{service} has written nothing"
        assert not odd, f"{service}: {odd[:5]}"
