"""Engine ``vllm`` killed in the middle of GENERATE, with its service or the EngineCore alone. Real engines, on CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.processes import process_start
from tests.process.killed_runs import KilledRun
from tests.process.traps import Trap, mark_of
from tests.process.whole_runs import WaitUntil
from tools.soak_checks import check_records

pytestmark = pytest.mark.timeout(280)

CLOSE = 1e-4
"""Nats by which engine and trainer may differ in float32."""
SAMPLES = 16
GONE_WITHIN = 15.0
SETTINGS = (
    "rollout.engine=vllm", "run.steps=3", f"prompts.per_step={SAMPLES}", f"rollout.rows={SAMPLES}", "eval.rows=0",
    "ppo.advantage=reinforce_pp", "rollout.vllm.max_num_seqs=4",
)  # fmt: skip
"""Four samples at a time: when the fifth is in its slot, most have not begun, however fast the engine is."""
SERVICE = Trap(name="service", service="rollout", place="written", step=1, nth=5)
ENGINE = Trap(name="engine core", service="rollout", place="written", step=2, nth=5, victims=("engine",))


@pytest.fixture
def run(tmp_path: Path, wait_until: WaitUntil) -> Iterator[KilledRun]:
    made = KilledRun(tmp_path, wait_until)
    yield made
    made.close()


def test_no_sample_is_lost_or_doubled_whether_the_service_or_its_engine_core_is_killed(
    run: KilledRun, wait_until: Callable[..., None]
) -> None:
    """Each with four samples reported, the fifth in its slot and the others under way."""
    ended = run.finish(run.start_killed((SERVICE, ENGINE), *SETTINGS))
    assert ended.code == 0, f"{ended.err}\n{run.log('rollout')}"
    assert run.sprung() == [SERVICE.name, ENGINE.name]
    service, core = mark_of(run.plan, SERVICE), mark_of(run.plan, ENGINE)
    assert service is not None
    assert core is not None
    victim = service.pids["rollout-0"]
    assert re.search(rf"rollout-0 \(process {victim}\) killed by SIGKILL, started again as process (\d+) ", ended.err)
    assert re.search(r"rollout-0 \(process \d+\) exited with code 1, started again as process \d+ ", ended.err)
    assert "the vLLM engine died" in run.log("rollout")

    facts, wrong = check_records(run.files, SAMPLES)
    assert wrong == []
    found = {name: facts[name] for name in ("steps", "samples", "lost_samples", "doubled_samples", "masked_samples")}
    assert found == {
        "steps": 3, "samples": 3 * SAMPLES, "lost_samples": 0, "doubled_samples": 0, "masked_samples": 0
    }  # fmt: skip
    lost = run.ledger_rows("SELECT step FROM leases WHERE state = 'lost' AND role = 'rollout' AND task = 'Generate'")
    assert lost == [(1,), (2,)], "no lease was under way at a death: nothing is tested"
    assert facts["rewinds"] == 0

    engines = [int(pid) for pid in re.findall(r"vLLM engine \(pid (\d+)\) runs on cpu", run.log("rollout"))]
    assert len(set(engines)) == 3
    proved = [int(version) for version in re.findall(r"policy@(\d+): \d+ tensors by alias", run.log("rollout"))]
    assert proved == [0, 0, 1], "by each new engine before anything else: the version of the step in which it comes"
    assert {(sample.step, sample.version_low, sample.version_high) for sample in run.samples()} == {
        (step, step - 1, step - 1) for step in (1, 2, 3)
    }
    assert [line.values["samples"] for line in run.steps()] == [SAMPLES] * 3
    assert max(line.values["engine_difference_max"] for line in run.steps()) <= CLOSE

    left = [*engines, *core.pids.values()]
    wait_until(lambda: not any(map(process_start, left)), f"the end of engines {left}", GONE_WITHIN)
    run.assert_nothing_left(GONE_WITHIN)
