"""Who says Hello and cannot be who it says; and what is told, and answered, of peers that do wrong."""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

import pytest
from msgspec.structs import replace

from common import processes
from common.messages import Role
from services.coordinator import complaints
from services.coordinator.complaints import (
    ANSWERS_AT_ONCE,
    MOST_ANSWERED,
    MOST_PEERS,
    SHOWN_CHARACTERS,
    Complaints,
    printable,
    stranger_name,
)
from services.coordinator.gate import MOST_OF_ROLE, Gate
from tests.wire.test_gate import WELCOME, member


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"epoch": 3}, "it comes from epoch 3, this coordinator is the run's number 2"),
        ({"pid_space": processes.pid_space(), "pid": os.getpid()}, "which is the coordinator"),
        ({"pid": 17}, "which is another replica"),
        ({}, ""),
        ({"epoch": 1}, ""),
    ],
)
def test_who_cannot_be_who_it_says(changed: dict[str, Any], why: str) -> None:
    living = member("rollout")
    living.hello = replace(living.hello, pid_space=processes.pid_space())
    said = replace(living.hello, identity="new", pid=18)
    found = Gate(WELCOME).hello_problem(b"new", replace(said, **changed), [living])
    assert why in found if why else found == ""


@pytest.mark.parametrize(
    ("role", "secret", "space", "welcome"),
    [
        ("critic", "s3cret", "here", True),
        ("critic", "", "elsewhere", False),
        ("critic", "guessed", "elsewhere", False),
        ("reward", "", "elsewhere", True),
        ("reward", "", "here", False),
    ],
)
def test_user_code_may_be_a_reward_replica_and_nothing_else(role: Role, secret: str, space: str, welcome: bool) -> None:
    """It reaches the socket, and can say what it likes: also that its process is one that the coordinator may kill."""
    gate = Gate(WELCOME)
    gate.secret = "s3cret"
    said = replace(
        member(role).hello, identity="new", secret=secret, pid=18,
        pid_space=processes.pid_space() if space == "here" else space,
    )  # fmt: skip
    found = gate.hello_problem(b"new", said, [])
    assert ("has not the run's secret" in found) is not welcome


@pytest.mark.parametrize(("role", "refused"), [("trainer", True), ("rollout", True), ("reward", False)])
def test_who_writes_must_be_seen_to_die(role: Role, refused: bool) -> None:
    boot = processes.pid_space().split()[0]
    said = replace(member(role).hello, identity="new", pid=18, pid_space=f"{boot} pid:[1]")
    assert ("service:pause" in Gate(WELCOME).hello_problem(b"new", said, [])) is refused
    assert Gate(WELCOME).hello_problem(b"new", replace(said, pid_space="otherboot pid:[1]"), []) == ""


def test_replicas_of_a_role_are_bounded() -> None:
    living = [member("rollout") for _ in range(MOST_OF_ROLE)]
    said = replace(living[0].hello, identity="new", pid_space="elsewhere")
    assert f"there are {MOST_OF_ROLE} rollout replicas" in Gate(WELCOME).hello_problem(b"new", said, living)
    assert Gate(WELCOME).hello_problem(b"new", said, living[1:]) == ""


def test_the_first_is_told_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    noted = Complaints()
    for number in range(50):
        noted.note(b"a", "reward 3 (pid 7)", f"bad thing {number}")
    noted.note(b"b", "rollout 0 (pid 8)", "another")
    assert caplog.text.count("reward 3 (pid 7)") == 1
    assert "bad thing 0" in caplog.text
    assert noted.count(b"a") == 50
    noted.left(b"a")
    noted.left(b"b")
    assert "refused 50 messages of reward 3 (pid 7) in all" in caplog.text
    assert caplog.text.count("rollout 0") == 1, "one message is told already"
    assert noted.count(b"a") == 0


def test_peers_without_number_cost_bounded_memory_and_lines(caplog: pytest.LogCaptureFixture) -> None:
    noted = Complaints()
    for number in range(20 * MOST_PEERS):
        noted.note(b"%d" % number, stranger_name(b"%d" % number), "garbage")
        noted.may_answer(b"%d" % number)
    assert len(caplog.records) == MOST_PEERS + 1
    for number in range(MOST_ANSWERED + 100):
        noted.may_answer(b"%d" % number)
    assert sum(noted.count(b"%d" % number) for number in range(20 * MOST_PEERS)) == MOST_PEERS
    noted.close()
    assert f"refused {19 * MOST_PEERS} messages of other peers in all" in caplog.text


def test_who_is_quiet_for_long_is_forgotten(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Complaints()
    noted.note(b"a", "a stranger", "garbage")
    noted.note(b"a", "a stranger", "garbage")
    noted.sweep()
    assert noted.count(b"a") == 2
    monkeypatch.setattr(complaints, "QUIET_S", -1.0)
    noted.sweep()
    assert noted.count(b"a") == 0
    assert "refused 2 messages of a stranger in all" in caplog.text


def test_a_flood_is_not_answered_and_others_are() -> None:
    noted = Complaints()
    answered = sum(noted.may_answer(b"flood") for _ in range(10_000))
    assert ANSWERS_AT_ONCE <= answered < 10 * ANSWERS_AT_ONCE
    assert noted.may_answer(b"other")


def test_a_line_of_the_log_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    identity = str(uuid.uuid4()).encode()
    Complaints().note(b"x", stranger_name(identity), "first\nERROR second\x1b[2J" + "x" * 10_000)
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert "\x1b" not in record.getMessage()
    assert len(record.getMessage()) < SHOWN_CHARACTERS + 200
    assert identity.decode() not in record.getMessage(), "an identity is its owner's alone to know"
    assert printable("1 + 1 = 2 ü") == "1 + 1 = 2 ü"
    assert stranger_name(b"\x00\xff\n").isprintable()


@pytest.mark.parametrize(
    ("role", "versions", "on_gpu", "fits"),
    [
        ("rollout", {"torch": "2.13.0"}, True, False),
        ("rollout", {"torch": "2.11.1+cu130"}, True, True),
        ("rollout", {"torch": "2.13.0"}, False, True),
        ("reward", {"torch": "2.13.0"}, True, True),
        ("rollout", {}, True, True),
    ],
)
def test_torch_must_fit_where_memory_on_a_gpu_is_shared(
    role: Any, versions: dict[str, str], on_gpu: bool, fits: bool
) -> None:
    living = member("trainer", versions={"torch": "2.11.0+cu130"})
    said = replace(member(role, versions=versions).hello, identity="new", pid=18)
    found = Gate(WELCOME, on_gpu).hello_problem(b"new", said, [living])
    assert (found == "") is fits, found
    assert fits or "it has torch 2.13.0, trainer 0 has 2.11.0+cu130" in found
