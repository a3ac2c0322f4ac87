"""The weights that engine ``torch`` runs on: each version that it proves, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch

from common.config import WeightsConfig
from common.messages import Manifest, Receipt
from common.model import canary_logprobs
from common.weights.header import WeightsError
from common.weights.receipts import problem
from common.weights.writer import WeightWriter
from services.rollout.engines.torch import TorchEngine
from tests.unit.engine_support import bits, greedy, make_engine, request, run
from tests.unit.model_support import engine_config, full_logits, model_path, random_model
from tests.unit.weights_support import CANARY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


class Policy:
    """A trainer's model, whose every version the engine must prove."""

    def __init__(self, path: Path, family: str) -> None:
        self.model: Any = random_model(family)
        self.writer = WeightWriter(path, "policy", self.model, version=0)

    def update(self, version: int) -> Manifest:
        """Another version, of other values."""
        self.writer.begin(version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)))
        return self.writer.commit(version, CANARY)

    def problem(self, manifest: Manifest, receipt: Receipt) -> str:
        return problem(manifest, self.writer.prove(canary_logprobs(self.model, CANARY)), receipt)

    def greedy_ids(self, engine: TorchEngine) -> list[int]:
        """What the engine answers; fails unless the policy itself would have."""
        prompt = request(2, 16).prompt_ids
        response = run(engine, [request(2, 16)], greedy())[2]
        assert response.ids.tolist() == full_logits(self.model, prompt, response.ids).argmax(-1).tolist()
        return response.ids.tolist()


@pytest.mark.parametrize("transport", ["auto", "alias", "copy"])
def test_engine_runs_on_each_version_that_it_proves(
    folder: Path, path: Path, transport: Literal["auto", "alias", "copy"]
) -> None:
    config = engine_config(model_path("qwen3", folder))
    engine = make_engine(msgspec.structs.replace(config, weights=WeightsConfig(transport=transport)))
    policy = Policy(path, "qwen3")
    outputs: list[list[int]] = []
    for version in (1, 2):
        manifest = policy.update(version)
        receipt = engine.apply_weights(manifest)
        assert policy.problem(manifest, receipt) == ""
        assert receipt.transport == ("copy" if transport == "copy" else "alias")
        assert (receipt.copied_bytes > 0) is (transport == "copy")
        expected = canary_logprobs(policy.model, CANARY)
        assert receipt.canary_logprobs == pytest.approx(expected, abs=1e-5)
        outputs.append(policy.greedy_ids(engine))
    assert outputs[0] != outputs[1], "the update changed nothing: nothing is tested"


def test_canary_tells_what_a_checksum_cannot(folder: Path, path: Path) -> None:
    """The weights are the writer's, byte for byte, and the engine computes something else with them."""
    engine = make_engine(engine_config(model_path("llama", folder)))
    policy = Policy(path, "llama")
    manifest = policy.update(1)
    assert policy.problem(manifest, engine.apply_weights(manifest)) == ""
    engine.model.model.norm.variance_epsilon = 5.0
    assert "its logprob of canary token" in policy.problem(manifest, engine.apply_weights(manifest))


def test_engine_follows_a_trainer_to_another_file(folder: Path, path: Path) -> None:
    """Of the same name, as the old one was removed: that stays mapped and whole until the engine lets go of it."""
    engine = make_engine(engine_config(model_path("llama", folder)))
    first = Policy(path, "llama")
    engine.apply_weights(first.update(1))
    before = bits(run(engine, [request(2, 16)], greedy()))
    path.unlink()
    second = Policy(path, "llama")
    with torch.no_grad():
        second.model.lm_head.weight.neg_()
    manifest = second.writer.commit(0, CANARY)
    assert bits(run(engine, [request(2, 16)], greedy())) == before, "the new file must not show through the old mapping"
    receipt = engine.apply_weights(manifest)
    assert second.problem(manifest, receipt) == ""
    assert first.problem(manifest, receipt) != ""
    second.greedy_ids(engine)


def test_torn_weights_are_not_applied(folder: Path, path: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)))
    policy = Policy(path, "llama")
    manifest = policy.update(1)
    policy.writer.begin(2)
    with pytest.raises(WeightsError, match=r"WRITING\(2\), expected CLEAN\(1\)"):
        engine.apply_weights(manifest)


def test_engine_sleeps_without_its_kv_cache_and_wakes_as_it_was(folder: Path, path: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)))
    policy = Policy(path, "llama")
    engine.apply_weights(policy.update(1))
    before = bits(run(engine, [request(2, 16)], greedy()))
    assert all(layer.keys is not None for layer in engine.cache.row_layers)
    slept = engine.sleep()
    assert (slept.used_before_bytes, slept.used_after_bytes) == (0, 0), "nobody measures memory on a CPU"
    assert all(layer.keys is None and layer.values is None for layer in engine.cache.row_layers)
    manifest = policy.writer.commit(1, CANARY)
    assert policy.problem(manifest, engine.apply_weights(manifest)) == ""
    assert bits(run(engine, [request(2, 16)], greedy())) == before


def test_a_closed_engine_lets_go_of_the_memory(folder: Path, path: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)))
    engine.apply_weights(Policy(path, "llama").update(1))
    assert engine.reader is not None
    engine.close()
    assert engine.reader is None
