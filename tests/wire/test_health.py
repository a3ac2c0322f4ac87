"""Health checks, numbers that are given out, and members whose process ids mean nothing here."""

from __future__ import annotations

import asyncio
import os
import socket

import msgspec
import pytest

from common import bus, processes
from common.messages import ANY_REPLICA, Ready, Welcome
from common.run_files import SharedDirectory
from services.coordinator.member import Member
from tests.wire.wire_leases import CONFIG
from tests.wire.wire_support import Star, hello, next_of, play, star, until
from tools.health import ask


class Joiners:
    """Replicas that take any number. Closed when the block is left."""

    def __init__(self, shared: SharedDirectory) -> None:
        self.shared = shared
        self.dealers: list[bus.Dealer] = []

    async def join(self, name: str, **said: object) -> tuple[bus.Dealer, int]:
        """The replica, and the number that it was given."""
        dealer = bus.Dealer(self.shared.endpoint, name)
        self.dealers.append(dealer)
        dealer.send(msgspec.structs.replace(hello("reward", name), replica=ANY_REPLICA, **said))
        return dealer, (await next_of(dealer, Welcome)).replica

    def leave(self, dealer: bus.Dealer) -> None:
        self.dealers.remove(dealer)
        dealer.close(0)

    def __enter__(self) -> Joiners:
        return self

    def __exit__(self, *about: object) -> None:
        for dealer in list(self.dealers):
            self.leave(dealer)


def only(coordinator: Star) -> Member:
    (member,) = coordinator.members.by_peer.values()
    return member


def test_who_has_no_number_gets_the_lowest_that_is_free(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            with Joiners(shared) as joiners:
                met = [await joiners.join(f"any-{index}") for index in range(3)]
                assert [number for _, number in met] == [0, 1, 2]
                joiners.leave(met[1][0])
                coordinator.members.probe(0.0)
                await until(
                    lambda: len(coordinator.members.by_peer) == 2 or bool(coordinator.members.probe(0.0)), "death"
                )
                assert (await joiners.join("late"))[1] == 1
                assert sorted(member.name for member in coordinator.members.by_peer.values()) == [
                    "reward 0",
                    "reward 1",
                    "reward 2",
                ]

    play(scenario())


def test_health_is_what_the_coordinator_knows_of_this_host(shared: SharedDirectory) -> None:
    run = shared.path.name.removeprefix("quartet-")

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            with Joiners(shared) as joiners:
                assert await ask(run, "coordinator") == ""
                assert "knows no reward in this container" in await ask(run, "reward")
                await joiners.join("elsewhere")
                assert "knows no reward" in await ask(run, "reward"), "another host's replica counts"
                dealer, _ = await joiners.join("here", host=socket.gethostname())
                assert await ask(run, "reward") == "this reward is still starting"
                dealer.send(Ready(epoch=1))
                await coordinator.ready("reward")
                assert await ask(run, "reward") == ""
                assert "knows no critic" in await ask(run, "critic")
        assert "does not answer" in await ask(run, "coordinator", wait_s=0.3), "its socket's file may still be there"

    play(scenario())


@pytest.mark.parametrize("same", [True, False])
def test_a_process_is_watched_only_where_its_pid_counts(shared: SharedDirectory, same: bool) -> None:
    """In another PID namespace the same number is another process: killing it would kill a bystander."""
    space = processes.pid_space() if same else "another"

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            with Joiners(shared) as joiners:
                sleeper = await asyncio.create_subprocess_exec("sleep", "60")
                await joiners.join(
                    "one", pid_space=space, pid=sleeper.pid, pid_start=processes.process_start(sleeper.pid)
                )
                member = only(coordinator)
                assert (member.pidfd >= 0) is same
                coordinator.members.watch.kill(member)
                if same:
                    await asyncio.wait_for(sleeper.wait(), 10)
                else:
                    assert processes.process_start(sleeper.pid) > 0
                    assert not coordinator.members.by_peer, "who cannot be killed is given up"
                    sleeper.kill()
                    await sleeper.wait()

    play(scenario())


def test_a_pid_space_is_this_boot_and_this_namespace() -> None:
    boot, namespace = processes.pid_space().split()
    assert len(boot) == 36
    assert namespace == f"pid:[{os.stat('/proc/self/ns/pid').st_ino}]"
