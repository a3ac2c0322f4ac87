"""What is wrong is one clear line in the log of the service concerned, and nothing else starts."""

from __future__ import annotations

import pytest

from tests.compose.engine import Project

pytestmark = pytest.mark.timeout(2400)  # the first one builds the images

SHORT = {"QUARTET_PRESET": "tiny", "QUARTET_RUN__STEPS": "1", "QUARTET_EVAL__ROWS": "1"}


@pytest.mark.parametrize(
    ("settings", "shm", "line"),
    [
        (
            {"QUARTET_ROLLOUT__TEMPRATURE": "1"},
            "1gb",
            "rollout.temprature: no such key. Did you mean rollout.temperature?",
        ),
        ({"QUARTET_MODEL__PATH": "/models/none"}, "1gb", "model.path: '/models/none' is no embedded model"),
        ({}, "1mb", "change: QUARTET_SHM in .env"),
    ],
    ids=["wrong setting", "missing model", "small shm"],
)
def test_what_is_wrong_is_told_by_the_coordinator(
    project: Project, settings: dict[str, str], shm: str, line: str
) -> None:
    project.set(**SHORT, **settings)
    project.environment["QUARTET_SHM"] = shm
    code, output = project.compose("up", "--detach", "--no-build", within=120)
    log = project.logs("coordinator")
    assert code != 0, f"compose took it for started: {output[-1000:]}"
    assert line in log, f"the coordinator's log:\n{log[-2000:]}"
    assert "Traceback" not in log
    project.until(lambda: project.health("coordinator") == "unhealthy", "compose shows it unhealthy", 30)
    assert not project.containers("trainer") or project.containers("trainer")[0]["State"]["Status"] == "created"


def test_compose_up_returns_when_a_run_fails(project: Project) -> None:
    (project.folder / "data" / "bad.py").write_text("def score(:\n")
    project.set(**SHORT, QUARTET_REWARD__FUNCTION="data/bad.py:score")
    project.compose("up", "--no-build", within=120)
    codes = project.exit_codes()
    assert None not in codes.values(), codes
    log = project.logs("coordinator")
    assert "the run has ended: the run failed: reward 0" in log
    assert log.count("the run has ended") == 1
    assert "data/bad.py" in log
