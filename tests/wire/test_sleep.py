"""Engines sleep during updates: who is told to, when, and that nothing is asked of a sleeper before its weights."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from common.messages import Done, Evaluated, Generate, HostBuffer, Hosted, Lease, Ready, Sampling, Sleep, Slept, Welcome
from common.models import resolve_model
from common.records import StepMetrics
from common.run_files import RunDirectory, SharedDirectory
from common.token_cache import TokenCache
from common.tokenizer import load_tokenizer
from services.coordinator.failures import RunFailed
from services.coordinator.report import Reporter
from tests.wire.scripted_values import exported
from tests.wire.wire_leases import CONFIG, ByHand, generate, lost
from tests.wire.wire_steps import GPU, sleeping_config, steps
from tests.wire.wire_support import Star, hello, next_of, play, soon, star, until

ORDERS = ("Generate", "Sleep", "ApplyWeights")


def told_to_sleep(coordinator: Star, number: int = 0, deadline_s: float = 20.0) -> asyncio.Future[Done]:
    member = coordinator.members.of_role("rollout")[number]
    return coordinator.dispatcher.submit("rollout", "UPDATE", 1, Sleep(), deadline_s, member=member)


async def leased(replica: ByHand) -> Lease:
    return await next_of(replica.dealer, Lease)


async def join_beside(replica: ByHand, count: int) -> None:
    """Joins as one of ``count`` rollout replicas."""
    replica.dealer.send(hello("rollout", replica.name))
    await next_of(replica.dealer, Welcome)
    replica.dealer.send(Ready(epoch=1))
    await replica.coordinator.ready("rollout", count)


def answer(replica: ByHand, lease: Lease) -> None:
    result = Slept(used_before_bytes=2, used_after_bytes=1) if isinstance(lease.task, Sleep) else Evaluated(tokens=0)
    replica.dealer.send(Done(epoch=1, work=lease.work, result=result, started=0.0, ended=0.0))


# ---------------------------------------------------------------- in a step


def test_every_engine_sleeps_once_a_step_before_the_update(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with steps(shared, sleeping_config("always"), ["sleep", "sleep"]) as running:
            for number in (1, 2):
                running.told.clear()
                outcome = await running.step(number)
                for rollout in ("rollout-0", "rollout-1"):
                    assert running.told_to(rollout, *ORDERS) == ["Generate", "Sleep", "ApplyWeights"]
                update = running.told.index(("trainer", "UpdatePolicy"))
                slept = [place for place, (_, what) in enumerate(running.told) if what == "Slept"]
                scored = [place for place, (_, what) in enumerate(running.told) if what in ("LogprobsDone", "Scores")]
                assert max(scored) < min(slept) < max(slept) < update
                assert outcome.policy == {"loss": 0.5}
                assert outcome.timings["engine_used_awake_gib"] == 5.0
                assert outcome.timings["engine_used_asleep_gib"] == 2.0
                assert 0 < outcome.timings["sleep_s"] < 20
            assert running.star.publisher.version == 2

    play(scenario())


def test_falling_asleep_is_neither_idle_time_nor_part_of_the_update(shared: SharedDirectory, tmp_path: Path) -> None:
    """A service works on it, so that it is not the coordinator's overhead; and the update's time is that of updates."""

    async def scenario() -> None:
        async with steps(shared, sleeping_config("always")) as running:
            cache, ledger = running.setting.cache, running.star.ledger
            tokenizer = load_tokenizer(resolve_model("tiny"))
            files = RunDirectory(tmp_path)
            report = Reporter(running.setting.config, "digest", files, shared, cache, tokenizer, ledger)
            running.star.dispatcher.on_done = report.done
            sleeper = running.actors["rollout-0"]
            sleeper.may_sleep.clear()
            started = time.monotonic()
            step = asyncio.create_task(running.step(1))
            await until(lambda: ("rollout-0", "Sleep") in running.told, "the sleep")
            asyncio.get_running_loop().call_later(0.3, sleeper.may_sleep.set)
            outcome = await soon(step)
            report.write_step(outcome, started, time.monotonic(), (0, 0), 0.0)
            timings = msgspec.json.decode(files.metrics.read_bytes(), type=StepMetrics).timings
            assert timings["sleep_s"] >= timings["SLEEP_s"] >= 0.29
            assert timings["UPDATE_s"] < 0.29
            assert timings["idle_s"] <= timings["step_s"] - timings["SLEEP_s"] + 1e-6
            assert timings["weights_proved_s"] >= timings["weights_held_s"] >= 0
            handle = exported(HostBuffer(name="policy", nbytes=16, gpu=GPU), 1)
            export = Done(
                epoch=1, work=9, result=Hosted(handle=handle, created=False), started=started, ended=started + 9
            )
            report.done("holder", "PUBLISH", export)
            assert report.clock.busy_seconds(started, started + 9) < 8, "exporting memory is part of no step"
            assert (timings["weights_aliased"], timings["weights_copied"], timings["weights_copied_bytes"]) == (1, 0, 0)

    play(scenario())


def test_a_disagreement_of_engine_and_trainer_ends_the_run_before_anything_is_updated(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with steps(shared, sleeping_config("always")) as running:
            odd = running.setting.samples[5]
            engine = TokenCache.attach(
                shared.tokens,
                run=shared.path.name.removeprefix("quartet-"),
                fingerprint=load_tokenizer(resolve_model("tiny")).fingerprint,
                writes=frozenset({"response_mask", "behaviour_logprobs"}),
            )
            for sample in running.setting.samples:
                engine.column("response_mask", sample.ref)[0] = 1
            engine.column("behaviour_logprobs", odd.ref)[0] = -2.0  # the trainer's are all 0
            engine.close()
            expected = rf"step 1: .*differ by 0.25 nats .*Worst: sample 5 in slot {odd.ref.slot}, 2 in the mean"
            with pytest.raises(RunFailed, match=expected):
                await running.step(1)
            assert running.told_to("rollout-0", *ORDERS) == ["Generate"]
            assert running.told_to("trainer", "UpdatePolicy") == []

    play(scenario())


def test_nobody_sleeps_where_it_is_not_asked_for(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with steps(shared, sleeping_config("never")) as running:
            outcome = await running.step(1)
            assert running.told_to("rollout-0", *ORDERS) == ["Generate", "ApplyWeights"]
            assert not {"sleep_s", "engine_used_awake_gib", "engine_used_asleep_gib"} & set(outcome.timings)

    play(scenario())


def test_a_replica_that_dies_while_falling_asleep_does_not_end_the_run(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with steps(shared, sleeping_config("always"), ["die", "sleep"]) as running:
            outcome = await running.step(1)
            assert outcome.timings["engine_used_awake_gib"] == 5.0
            assert ("rollout-0", "died") in running.told
            assert running.told_to("rollout-1", *ORDERS) == ["Generate", "Sleep", "ApplyWeights"]
            running.told.clear()
            await running.step(2)
            assert running.told_to("rollout-1", *ORDERS) == ["Generate", "Sleep", "ApplyWeights"]
            assert running.told_to("rollout-0", *ORDERS) == []

    play(scenario())


def test_an_engine_that_cannot_sleep_ends_the_run_before_the_update(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with steps(shared, sleeping_config("always"), ["fail"]) as running:
            expected = "rollout 0 failed in Sleep before UPDATE of step 1: the pool cannot be freed"
            with pytest.raises(RunFailed, match=expected):
                await running.step(1)
            assert running.told_to("trainer", "UpdatePolicy") == []

    play(scenario())


# ---------------------------------------------------------------- in the dispatcher


def test_a_sleeper_gets_no_work_before_its_weights(shared: SharedDirectory) -> None:
    """Also not for the version that it held when it fell asleep."""

    async def scenario() -> None:
        async with steps(shared, sleeping_config("always")) as running:
            coordinator = running.star
            await soon(told_to_sleep(coordinator))
            (member,) = coordinator.members.of_role("rollout")
            sampling = Sampling(temperature=1.0, max_new_tokens=1)
            work = coordinator.dispatcher.submit(
                "rollout", "GENERATE", 1, Generate(items=[], sampling=sampling, version=0), 20.0
            )
            assert not member.leases
            await soon(coordinator.publisher.publish())
            coordinator.dispatcher.pump("rollout")
            await soon(work)
            assert running.told_to("rollout-0", *ORDERS) == ["Sleep", "ApplyWeights", "Generate"]

    play(scenario())


def test_work_for_one_member_goes_to_nobody_else_and_holds_nobody_up(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            busy, free = ByHand(coordinator, shared, "a"), ByHand(coordinator, shared, "b")
            await busy.join("rollout")
            await join_beside(free, 2)
            first, second = coordinator.members.of_role("rollout")
            first.version = second.version = 1
            generating = generate(coordinator, 1)
            held = await leased(busy)
            for_busy, for_free = told_to_sleep(coordinator, 0), told_to_sleep(coordinator, 1)
            order = await leased(free)
            assert isinstance(order.task, Sleep)
            assert not for_busy.done()
            answer(free, order)
            await soon(for_free)
            answer(busy, held)
            await lost(generating, "failed")
            order = await leased(busy)
            assert isinstance(order.task, Sleep)
            answer(busy, order)
            assert (await soon(for_busy)).result == Slept(used_before_bytes=2, used_after_bytes=1)
            assert (first.version, second.version) == (-1, -1)
            for replica in (busy, free):
                replica.dealer.close()

    play(scenario())


def test_work_for_a_member_that_dies_is_lost_as_dead_even_in_the_queue(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replica = ByHand(coordinator, shared, "a")
            await replica.join("rollout")
            (member,) = coordinator.members.of_role("rollout")
            member.version = 1
            generating = generate(coordinator, 1)
            await leased(replica)
            queued = told_to_sleep(coordinator)
            replica.dealer.close()
            error = await lost(queued, "dead")
            assert str(error).startswith("rollout 0 died (")
            assert str(error).endswith(") before Sleep before UPDATE of step 1")
            await lost(generating, "dead")
            too_late = coordinator.dispatcher.submit("rollout", "UPDATE", 1, Sleep(), 20.0, member=member)
            await lost(too_late, "dead")

    play(scenario())


def test_a_member_too_busy_to_sleep_is_named(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replica = ByHand(coordinator, shared, "a")
            await replica.join("rollout")
            coordinator.members.of_role("rollout")[0].version = 1
            coordinator.dispatcher.start_timeout = 0.1
            generating = generate(coordinator, 1)
            error = await lost(told_to_sleep(coordinator, deadline_s=0.1), "nobody")
            assert str(error) == "rollout 0 did not take Sleep before UPDATE of step 1 in time: it is busy"
            assert not generating.done()
            replica.dealer.close()

    play(scenario())
