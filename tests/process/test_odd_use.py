"""Whole runs that are used oddly: nobody reads what they print, their files vanish, their figures explode."""

from __future__ import annotations

import re
import shutil
import signal

from common.processes import process_start
from tests.process.whole_runs import ENDLESS, FUNCTIONS, GONE_WITHIN, WaitUntil, WholeRun, finish


def test_ctrl_c_works_when_nobody_reads_and_ends_what_a_scorer_in_mid_batch_has_started(
    run: WholeRun, wait_until: WaitUntil
) -> None:
    """As in ``quartet up 2>&1 | head``: the notes on the way to the end fail, and the end comes all the same."""
    process = run.start(
        *ENDLESS, f"reward.function={FUNCTIONS / 'leaving.py'}:sandbox", "reward.timeout_s=60", "timeouts.stop=4"
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    wait_until((run.folder / "sandbox").exists, "the start of the sandbox", 60.0)
    sandbox = int((run.folder / "sandbox").read_text())
    assert process_start(sandbox)
    process.send_signal(signal.SIGINT)
    assert process.wait(GONE_WITHIN) == 130
    assert not process_start(sandbox)
    run.assert_nothing_left(within=0.0)


def test_memory_that_is_deleted_in_mid_run_is_named(run: WholeRun) -> None:
    process = run.start(*ENDLESS)
    run.reach(2)
    coordinator = run.pid("coordinator")
    shutil.rmtree(run.shared.path)
    ended = finish(process)
    assert ended.code == 1
    assert ended.err.startswith(f"error: coordinator-0 (process {coordinator}) exited with code 1. ")
    assert re.search(rf"the run failed in step \d+, phase \w+: .*{run.shared.path}", ended.err), ended.err
    assert "Traceback" not in ended.err
    run.assert_nothing_left()


def test_figures_that_explode_are_left_out_of_the_records_and_the_run_says_what_to_lower(run: WholeRun) -> None:
    ended = run.complete("critic.optimizer.learning_rate=1e30", "run.steps=9", "eval.rows=0")
    assert ended.code == 1
    assert "critic 0 failed in UPDATE of step" in ended.err
    assert "lower learning_rate" in ended.err
    assert "the display failed" not in ended.err
    steps = run.steps()
    assert "critic/value_loss" in steps[0].values
    assert "critic/value_loss" not in steps[-1].values
    assert "left out of metrics.jsonl, since not finite: critic/value_loss is " in run.log("coordinator")
    run.assert_nothing_left()
