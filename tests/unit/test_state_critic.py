"""The critic's saved state: a critic that takes it goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.checkpoints.reader import StateReader
from common.messages import NO_STATE, Evaluate, RestoreState, SaveState, UpdateCritic, Updated, UpdatePolicy
from common.weights.layout import model_tensors
from services.critic.service import CriticService
from tests.unit.state_support import Run, bits, config, run_of, same_bits


@pytest.fixture(params=["float32", "bfloat16"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    with run_of(tmp_path, config(request.param)) as run:
        yield run


def update(run: Run, critic: CriticService, step: int) -> Updated:
    result = run.give(critic, step, UpdateCritic(refs=run.fill(step)))
    assert isinstance(result, Updated)
    return result


def everything(critic: CriticService) -> dict[str, bytes]:
    return bits(model_tensors(critic.model) | critic.update.learner.state())


def test_a_critic_that_takes_a_state_goes_on_with_the_same_bits(run: Run) -> None:
    first = run.critic()
    assert first.state() == 0
    for step in (1, 2):
        update(run, first, step)
    saved = everything(first)
    run.save(first, 2)
    results = [update(run, first, step) for step in (3, 4)]
    end = everything(first)
    assert end != saved, "nothing is learnt: nothing is tested"
    first.close()

    second = run.critic()
    assert second.state() == 0, "a new critic is one at the beginning: nothing of it is shared"
    run.restore(second, 2)
    assert second.state() == 2
    same_bits(everything(second), saved)
    assert [update(run, second, step) for step in (3, 4)] == results
    same_bits(everything(second), end)


def test_step_zero_is_the_beginning_again(run: Run) -> None:
    critic = run.critic()
    beginning, random = everything(critic), torch.get_rng_state()
    result = update(run, critic, 1)
    after = everything(critic)
    update(run, critic, 2)
    torch.rand(3)
    assert critic.model.head.weight.any()
    run.restore(critic, 0)
    assert critic.state() == 0
    assert not critic.model.head.weight.any()
    assert torch.equal(torch.get_rng_state(), random)
    same_bits(everything(critic), beginning)
    assert update(run, critic, 1) == result
    same_bits(everything(critic), after)


def test_a_state_holds_backbone_head_and_moments(run: Run) -> None:
    critic = run.critic()
    update(run, critic, 1)
    run.save(critic, 1)
    saved = StateReader(Path(run.path(1), "critic"))
    names = {name for name, _ in critic.model.named_parameters()}
    assert {"head.weight", "head.bias"} < names
    parts = {"head.weight", "head.bias"} if run.config.model.dtype == "bfloat16" else names
    masters = {f"master.{name}" for name in names - parts}
    kinds = ("parameter", "exp_avg", "exp_avg_sq", "step")
    assert saved.tensors.keys() == {f"{kind}.{name}" for kind in kinds for name in names} | masters | {"rng.cpu"}


def test_without_samples_the_state_moves_on_and_nothing_is_learnt(run: Run) -> None:
    critic = run.critic()
    update(run, critic, 1)
    before = everything(critic)
    assert run.give(critic, 2, UpdateCritic(refs=[])) == Updated(metrics={}, tokens=0)
    assert critic.state() == 2
    same_bits(everything(critic), before)
    run.save(critic, 2)
    update(run, critic, 3)
    run.restore(critic, 2)
    same_bits(everything(critic), before)


def test_a_missing_state_is_refused_and_changes_nothing(run: Run) -> None:
    critic = run.critic()
    update(run, critic, 1)
    before = everything(critic)
    task = RestoreState(step=3, path=run.path(3))
    run.refused(critic, 3, task, rf"{run.path(3)}/critic: there is no whole saved state here")
    same_bits(everything(critic), before)
    assert critic.state() == 1
    task = SaveState(step=3, path=run.path(3))
    run.refused(critic, 3, task, "critic: the state of step 3 asked for, 1 is held", "stale")


def test_the_trainers_state_is_not_the_critics(run: Run) -> None:
    trainer = run.trainer()
    refs = run.fill(1)
    run.give(trainer, 1, UpdatePolicy(refs=refs, version=1, kl_coefficient=0.1))
    run.save(trainer, 1)
    Path(run.path(1), "trainer").rename(Path(run.path(1), "critic"))
    critic = run.critic()
    before = everything(critic)
    task = RestoreState(step=1, path=run.path(1))
    run.refused(critic, 1, task, r"step-1/critic: tensors \['exp_avg\.\S+', .* are none of this model")
    same_bits(everything(critic), before)


def test_a_critic_whose_update_failed_computes_nothing_until_it_is_restored(run: Run) -> None:
    """An update that ends in the middle leaves what no step has ever been."""
    critic = run.critic()
    update(run, critic, 1)
    run.save(critic, 1)
    expected = everything(critic)
    refs = run.fill(2)
    gone = refs[-1]
    run.cache.free(gone)
    with pytest.raises(Exception, match="slot"):
        run.give(critic, 2, UpdateCritic(refs=refs))
    assert everything(critic) != expected, "its first mini-batch was applied: nothing is tested otherwise"
    assert critic.state() == NO_STATE
    for task in (Evaluate(refs=refs[:1]), UpdateCritic(refs=refs[:1])):
        run.refused(critic, 2, task, "critic: .* asked for, but no state is held: RestoreState first", "stale")
    run.restore(critic, 1)
    same_bits(everything(critic), expected)
