"""The trainer's saved state: a trainer that takes it goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.checkpoints.reader import StateReader
from common.config import Config
from common.messages import (
    NO_STATE,
    Logprobs,
    RestoreState,
    SavePolicy,
    SaveState,
    StateRestored,
    StateStaged,
    Updated,
    UpdatePolicy,
)
from common.weights.header import SetState, WeightState, read_state
from services.trainer.service import TrainerService
from tests.unit.state_support import Run, bits, config, run_of, same_bits, small_files

VARIANTS = [config(), config("bfloat16"), config(rank=8), config("bfloat16", rank=8)]
NAMES = ["float32", "bfloat16", "lora-float32", "lora-bfloat16"]


@pytest.fixture(params=VARIANTS, ids=NAMES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    with run_of(tmp_path, request.param) as run:
        yield run


@pytest.fixture
def plain_run(tmp_path: Path) -> Iterator[Run]:
    with run_of(tmp_path, config()) as run:
        yield run


def update(run: Run, trainer: TrainerService, step: int, skip: bool = False) -> Updated:
    refs = run.fill(step)
    result = run.give(trainer, step, UpdatePolicy(refs=refs, version=step, kl_coefficient=0.1, skip=skip))
    assert isinstance(result, Updated)
    return result


def everything(trainer: TrainerService) -> dict[str, bytes]:
    """All that a trainer is: shared weights, masters, moments."""
    return bits(dict(trainer.weights.views) | trainer.learner.state())


# ---------------------------------------------------------------- going on


def test_a_trainer_that_takes_a_state_goes_on_with_the_same_bits(run: Run) -> None:
    first = run.trainer()
    beginning = everything(first)
    assert first.state() == 0
    for step in (1, 2):
        update(run, first, step)
    saved = everything(first)
    run.save(first, 2)
    assert first.state() == 2
    manifest = run.reports.committed[-1]
    results = [update(run, first, step) for step in (3, 4)]
    end, proof = everything(first), run.reports.proofs[-1]
    assert end != saved != beginning, "nothing is learnt: nothing is tested"
    first.close()

    second = run.trainer()
    assert (second.state(), second.ready()) == (NO_STATE, None), "it holds an earlier trainer's weights, and no moments"
    restored = run.restore(second, 2)
    assert isinstance(restored, StateRestored)
    assert not restored.kept, "the weights of step 4 lay there"
    assert second.state() == 2
    assert run.reports.committed[-1] == manifest, "the same memory, so that engines keep their mapping"
    same_bits(everything(second), saved)
    assert [update(run, second, step) for step in (3, 4)] == results
    same_bits(everything(second), end)
    assert run.reports.proofs[-1] == proof


def test_step_zero_is_the_beginning_again(run: Run) -> None:
    first = run.trainer()
    ready = first.ready()
    beginning, random = everything(first), torch.get_rng_state()
    result = update(run, first, 1)
    after = everything(first)
    update(run, first, 2)
    torch.rand(3)
    run.restore(first, 0)
    assert first.state() == 0
    assert (run.reports.committed[-1], run.reports.proofs[-1]) == ready
    assert torch.equal(torch.get_rng_state(), random)
    same_bits(everything(first), beginning)
    assert update(run, first, 1) == result
    same_bits(everything(first), after)


@pytest.mark.parametrize("restored", [0, 1])
def test_a_trainer_that_died_in_mid_update_is_made_whole(run: Run, restored: int) -> None:
    first = run.trainer()
    states = [everything(first)]
    update(run, first, 1)
    states.append(everything(first))
    run.save(first, 1)
    first.weights.begin(2)
    with torch.no_grad():
        for view in first.weights.views.values():
            view.add_(1)  # whatever lies there: a base that is torn is put right too
    second = run.trainer()
    assert read_state(second.weights.path) == SetState(WeightState.WRITING, 2)
    assert (second.state(), second.ready()) == (NO_STATE, None)
    refs = run.fill(2)
    for task in (
        UpdatePolicy(refs=refs, version=2, kl_coefficient=0.1),
        Logprobs(refs=refs, reference=False),
        SaveState(step=1, path=run.path(9)),
        SavePolicy(name="final", version=1),
    ):
        run.refused(second, 2, task, "trainer", "stale")
    assert run.restore(second, restored).kept is False
    assert read_state(second.weights.path) == SetState(WeightState.CLEAN, restored)
    same_bits(everything(second), states[restored])
    if restored == 0:
        update(run, second, 1)
        same_bits(everything(second), states[1])


def test_weights_that_are_right_already_are_not_touched(run: Run) -> None:
    """A trainer that died between updates: the engines that run on its weights notice nothing."""
    first = run.trainer()
    update(run, first, 1)
    run.save(first, 1)
    expected = everything(first)
    update_two = update(run, first, 2)
    end = everything(first)
    run.restore(first, 1)
    second = run.trainer()
    before = second.weights.path.read_bytes()
    assert run.restore(second, 1).kept is True
    assert second.weights.path.read_bytes() == before
    same_bits(everything(second), expected)
    assert update(run, second, 2) == update_two
    same_bits(everything(second), end)


def test_without_an_update_there_are_no_moments(plain_run: Run) -> None:
    """Steps of a critic's warm-up."""
    first = plain_run.trainer()
    update(plain_run, first, 1, skip=True)
    plain_run.save(first, 1)
    saved = everything(first)
    update(plain_run, first, 2)
    end = everything(first)
    assert first.learner.optimizer.state
    plain_run.restore(first, 1)
    assert not first.learner.optimizer.state, "what was learnt since is forgotten"
    same_bits(everything(first), saved)
    update(plain_run, first, 2)
    same_bits(everything(first), end)


def test_counters_and_random_numbers_come_back(plain_run: Run) -> None:
    trainer = plain_run.trainer()
    update(plain_run, trainer, 1)
    trainer.learner.skipped_in_row = 2
    plain_run.save(trainer, 1)
    expected = torch.rand(4)
    trainer.learner.skipped_in_row = 0
    plain_run.restore(trainer, 1)
    assert trainer.learner.skipped_in_row == 2
    assert torch.equal(torch.rand(4), expected)


def test_gradients_of_what_failed_are_dropped(plain_run: Run) -> None:
    trainer = plain_run.trainer()
    update(plain_run, trainer, 1)
    plain_run.save(trainer, 1)
    update(plain_run, trainer, 2)
    end = everything(trainer)
    trainer.learner.accumulate(torch.stack([each.square().sum() for each in trainer.learner.parameters]).sum())
    plain_run.restore(trainer, 1)
    update(plain_run, trainer, 2)
    same_bits(everything(trainer), end)


# ---------------------------------------------------------------- saving


def test_what_is_saved_is_the_moment_of_the_copy(plain_run: Run) -> None:
    """The next update writes the very tensors whose copy is being written."""
    trainer = plain_run.trainer()
    update(plain_run, trainer, 1)
    saved = everything(trainer)
    staged = plain_run.give(trainer, 1, SaveState(step=1, path=plain_run.path(1)))
    update(plain_run, trainer, 2)
    assert isinstance(staged, StateStaged)
    assert 0 < staged.stall_s < 30
    step, nbytes, seconds, error = plain_run.reports.wait_saved()
    assert (step, error) == (1, "")
    assert 0 < seconds < 30
    files = list(Path(plain_run.path(1), "trainer").iterdir())
    assert nbytes == sum(file.stat().st_size for file in files)
    plain_run.restore(trainer, 1)
    same_bits(everything(trainer), saved)


@pytest.mark.parametrize("settings", VARIANTS, ids=NAMES)
def test_a_state_holds_what_it_must_and_nothing_else(tmp_path: Path, settings: Config) -> None:
    with run_of(tmp_path, settings) as run:
        trainer = run.trainer()
        update(run, trainer, 1)
        run.save(trainer, 1)
        saved = StateReader(Path(run.path(1), "trainer"))
        trained = set(trainer.learner.names)
        assert len(trained) == len(trainer.learner.parameters)
        kinds = ["parameter", "exp_avg", "exp_avg_sq", "step"] + ["master"] * (settings.model.dtype == "bfloat16")
        assert saved.tensors.keys() == {f"{kind}.{name}" for kind in kinds for name in trained} | {"rng.cpu"}
        assert saved.counters == {"step": 1, "skipped_in_row": 0}
        content = sum(t.nbytes for t in trainer.learner.state().values())
        content += sum(parameter.nbytes for parameter in trainer.learner.parameters)
        if not settings.model.lora.rank:
            assert run.reports.saved[-1][1] <= 1.02 * content, "size on disk"


def test_a_full_disk_is_reported_and_leaves_nothing(plain_run: Run) -> None:
    trainer = plain_run.trainer()
    update(plain_run, trainer, 1)
    with small_files():
        plain_run.give(trainer, 1, SaveState(step=1, path=plain_run.path(1)))
        _, nbytes, _, error = plain_run.reports.wait_saved()
    assert nbytes == 0
    assert f"{plain_run.path(1)}/trainer: the state cannot be saved: " in error
    assert list(Path(plain_run.path(1)).iterdir()) == []
    plain_run.save(trainer, 1)


def test_another_steps_state_is_not_saved(plain_run: Run) -> None:
    trainer = plain_run.trainer()
    update(plain_run, trainer, 1)
    task = SaveState(step=2, path=plain_run.path(2))
    plain_run.refused(trainer, 2, task, "trainer: the state of step 2 asked for, 1 is held", "stale")
    assert not plain_run.checkpoints.exists()


def test_close_waits_for_what_is_being_written(plain_run: Run) -> None:
    trainer = plain_run.trainer()
    update(plain_run, trainer, 1)
    plain_run.give(trainer, 1, SaveState(step=1, path=plain_run.path(1)))
    trainer.close()
    assert [saved[0] for saved in plain_run.reports.saved] == [1]
    assert StateReader(Path(plain_run.path(1), "trainer")).counters["step"] == 1


# ---------------------------------------------------------------- refusals


def test_states_that_are_not_the_one_asked_for_are_refused_and_change_nothing(plain_run: Run) -> None:
    trainer = plain_run.trainer()
    update(plain_run, trainer, 1)
    plain_run.save(trainer, 1)
    update(plain_run, trainer, 2)
    before, reported = everything(trainer), len(plain_run.reports.committed)
    here = plain_run.path(1)

    def refused(step: int, path: str, match: str) -> None:
        plain_run.refused(trainer, step, RestoreState(step=step, path=path), match)

    refused(5, plain_run.path(5), "step-5/trainer: there is no whole saved state here: checksums.json is missing")
    refused(2, here, "step-1/trainer: holds the state of step 1, not 2")
    shard = Path(here, "trainer", "__0_0.distcp")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    refused(1, here, rf"__0_0.distcp: {len(content) - 1} bytes, expected {len(content)}")
    assert (trainer.state(), len(plain_run.reports.committed)) == (2, reported)
    same_bits(everything(trainer), before)
    update(plain_run, trainer, 3)


@pytest.mark.parametrize(("other", "key"), [(1, r"'master\."), (2, "'exp_avg.*lora_A"), (3, "'exp_avg.*lora_A")])
def test_the_state_of_another_model_is_refused(tmp_path: Path, other: int, key: str) -> None:
    with run_of(tmp_path, VARIANTS[other]) as run:
        trainer = run.trainer()
        update(run, trainer, 1)
        run.save(trainer, 1)
        trainer.close()
        run.cache.path.parent.joinpath("weights", "policy").unlink()
        plain = run.trainer(config())
        before = everything(plain)
        run.refused(
            plain, 1, RestoreState(step=1, path=run.path(1)), rf"tensors \[{key}.*another model.path, model.dtype or"
        )
        same_bits(everything(plain), before)
        assert plain.state() == 0
