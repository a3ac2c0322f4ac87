"""The weights that engine ``torch`` runs on: each version that it proves, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from common.weights.header import WeightsError, manifest_digest
from common.weights.shared import WeightWriter
from tests.unit.engine_support import (
    bits,
    greedy,
    make_engine,
    request,
    run,
)
from tests.unit.model_support import (
    engine_config,
    full_logits,
    model_path,
    random_model,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def weights_path() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm", prefix="test-quartet-") as directory:
        yield Path(directory, "policy")


def test_engine_runs_on_each_version_that_it_proves(folder: Path, weights_path: Path) -> None:
    config = engine_config(model_path("qwen3", folder))
    engine = make_engine(config)
    model = random_model("qwen3")
    writer = WeightWriter(weights_path, "policy", model, version=0)
    canary = tuple(range(3, 11))
    outputs: list[list[int]] = []
    for version in (1, 2):
        writer.begin(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)))
        logprobs = torch.log_softmax(full_logits(model, canary[:1], canary[1:]), -1)[
            torch.arange(7), torch.tensor(canary[1:])
        ]
        manifest = writer.commit(version, canary, tuple(logprobs.tolist()))
        receipt = engine.load_weights(manifest)
        assert (receipt.transport, receipt.inode, receipt.digest) == (
            "alias",
            manifest.inode,
            manifest_digest(manifest),
        )
        assert receipt.canary_max_error < 1e-5
        response = run(engine, [request(2, 16)], greedy())[2]
        assert response.ids.tolist() == full_logits(model, request(2, 16).prompt_ids, response.ids).argmax(-1).tolist()
        outputs.append(response.ids.tolist())
    assert outputs[0] != outputs[1], "the update changed nothing: nothing is tested"


def test_canary_tells_other_weights(folder: Path, weights_path: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)))
    writer = WeightWriter(weights_path, "policy", random_model("llama"), version=0)
    receipt = engine.load_weights(writer.commit(0, (5, 6, 7), (-20.0, -20.0)))
    assert receipt.canary_max_error > 1


def test_engine_follows_a_trainer_that_started_again(folder: Path, weights_path: Path) -> None:
    """Its weights lie in another file of the same name; the old one stays mapped and whole until the engine lets go."""
    engine = make_engine(engine_config(model_path("llama", folder)))
    first, second = random_model("llama"), random_model("llama")
    with torch.no_grad():
        second.lm_head.weight.neg_()
    engine.load_weights(WeightWriter(weights_path, "policy", first, version=0).commit(0, (5, 6), (-4.0,)))
    before = bits(run(engine, [request(2, 16)], greedy()))
    manifest = WeightWriter(weights_path, "policy", second, version=0).commit(0, (5, 6), (-4.0,))
    assert bits(run(engine, [request(2, 16)], greedy())) == before, "the new file must not show through the old mapping"
    receipt = engine.load_weights(manifest)
    assert receipt.digest == manifest_digest(manifest)
    response = run(engine, [request(2, 16)], greedy())[2]
    assert response.ids.tolist() == full_logits(second, request(2, 16).prompt_ids, response.ids).argmax(-1).tolist()


def test_torn_weights_are_not_loaded(folder: Path, weights_path: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)))
    writer = WeightWriter(weights_path, "policy", random_model("llama"), version=0)
    manifest = writer.commit(0, (5, 6), (-4.0,))
    writer.begin(1)
    with pytest.raises(WeightsError, match=r"WRITING\(1\), expected CLEAN\(0\)"):
        engine.load_weights(manifest)
