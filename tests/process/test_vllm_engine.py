"""Engine ``vllm`` for real, on CPU: what it computes, whose memory it runs on, and what its receipts notice.

An engine takes 15 s to start, so the tests of one transport share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest

from common.service import LeaseFailed
from common.weights.layout import model_tensors
from common.weights.reader import MIB
from common.weights.receipts import OWN_COPY, problem
from services.rollout.engines.interface import EngineDead, EngineError, Request
from tests.process.vllm_service import Served, Sink
from tests.process.vllm_support import CLOSE, EnginePair, engine_pair, greedy, prompts, sampled

NORM = "model.layers.1.input_layernorm.weight"
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def alias() -> Iterator[EnginePair]:
    with engine_pair("weights.transport=alias") as pair:
        yield pair


@pytest.fixture(scope="module")
def copy() -> Iterator[EnginePair]:
    with engine_pair("weights.transport=copy", "weights.bucket_mib=1") as pair:
        yield pair


# ---------------------------------------------------------------- alias


def test_the_engine_runs_on_the_trainers_own_memory(alias: EnginePair) -> None:
    receipt = alias.apply()
    assert (alias.engine.facts.transport, alias.engine.facts.why_copy) == ("alias", "")
    assert (receipt.transport, receipt.copied_bytes, receipt.unchecked) == ("alias", 0, ())
    assert receipt.offsets == tuple(entry.offset for entry in alias.commit().tensors)
    offsets: dict[str, int] = alias.engine.call_worker("quartet_test_offsets")
    assert set(offsets.values()) <= set(receipt.offsets), "a parameter of the model lies elsewhere"
    assert alias.engine.call_worker("quartet_test_tied")
    weights = sum(tensor.nbytes for tensor in model_tensors(alias.model).values())
    assert alias.engine.facts.own_bytes < weights / 20, "the engine has weights of its own beside the shared ones"


@pytest.mark.parametrize("how", ["alias", "copy"])
def test_the_engine_computes_what_the_trainer_does_before_and_after_updates(
    how: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(how).require_same_computing()


def test_an_update_in_place_is_seen_without_any_copy(alias: EnginePair) -> None:
    """Even before the engine is told of it: what it computes with is the trainer's memory itself."""
    alias.apply()
    before = alias.engine.canary(alias.canary)
    _, proof = alias.update()
    seen = alias.engine.canary(alias.canary)
    assert seen == pytest.approx(proof.canary_logprobs, abs=CLOSE)
    assert max(np.abs(np.subtract(before, seen))) > 0.05, "the update changed nothing: nothing is tested"
    assert alias.apply().copied_bytes == 0


def test_samples_of_one_prompt_share_its_prefix_and_none_outlives_an_update(alias: EnginePair) -> None:
    alias.update()
    alias.apply()
    prompt = np.random.default_rng(1).integers(3, 90, 70).astype(np.int32)
    same = [Request(i, i, prompt) for i in range(8)]
    for _ in range(2):  # the second time after an update: nothing of the first may be left
        alias.engine.from_cache = ()
        assert alias.worst_difference(same, sampled()) < CLOSE
        assert sorted(alias.engine.from_cache) == [0, *[64] * 7], "two whole blocks of 32, computed once"
        alias.update()
        alias.apply()


@pytest.mark.parametrize("tensor", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"])
def test_what_is_written_after_the_proof_is_told(alias: EnginePair, tensor: str) -> None:
    """With alias a corrupted tensor is the trainer's as well; but the proof was made before."""
    manifest, proof = alias.update()
    element = model_tensors(alias.model)[tensor].data.view(-1)[777:778]
    kept = element.clone()
    element += 1e-6
    found = problem(manifest, proof, alias.engine.apply_weights(manifest))
    assert found.startswith(f"its tensor {tensor} has checksum"), "one element, and by too little for the canary"
    element.copy_(kept)
    assert problem(manifest, proof, alias.engine.apply_weights(manifest)) == ""


def test_a_stale_prefix_cache_is_told(alias: EnginePair, monkeypatch: pytest.MonkeyPatch) -> None:
    alias.apply()

    async def forgotten() -> bool:
        return True

    monkeypatch.setattr(alias.engine.llm, "reset_prefix_cache", forgotten)
    manifest, proof = alias.update()
    found = problem(manifest, proof, alias.engine.apply_weights(manifest))
    assert found == (
        f"its prefix cache still answers from before version {alias.version} (32 tokens of the canary, expected 0)"
    )
    monkeypatch.undo()
    alias.apply()


def test_what_does_not_fit_is_refused(alias: EnginePair) -> None:
    alias.apply()
    room = 88  # prompts.max_tokens + rollout.max_new_tokens
    for length, max_new in ((room - 8 + 1, 8), (room, 1), (0, 1)):
        ids = np.full(length, 5, np.int32)
        with pytest.raises(
            EngineError, match=rf"sample 6: a prompt of {length} tokens and {max_new} new ones.*max_model_len = {room}"
        ):
            list(alias.engine.generate([*prompts(2), Request(6, 6, ids)], sampled(max_new), 1))
    fits = Request(0, 0, np.full(room - 8, 5, np.int32))
    assert len(alias.samples([fits], greedy())[0].ids) in range(1, 9)


def test_an_engine_of_other_memory_is_not_followed(alias: EnginePair) -> None:
    moved = msgspec.structs.replace(alias.commit(), identity="inode-1")
    with pytest.raises(EngineDead, match=r"moved from memory inode-.* to inode-1; .*start this replica again"):
        alias.engine.apply_weights(moved)
    alias.apply()


@pytest.mark.parametrize("parameter", [NORM, f"{ATTENTION}.qkv_proj.weight"])
def test_a_model_that_no_longer_runs_on_the_shared_memory_is_told(alias: EnginePair, parameter: str) -> None:
    """As after a reload by vLLM: the values are right, and every later update would be missed."""
    manifest, proof = alias.update()
    alias.engine.apply_weights(manifest)
    alias.engine.call_worker("quartet_test_detach", parameter)
    found = problem(manifest, proof, alias.engine.apply_weights(manifest))
    alias.engine.call_worker("quartet_test_attach")
    assert "is a copy of its own (transport alias)" in found
    assert problem(manifest, proof, alias.engine.apply_weights(manifest)) == ""


# ---------------------------------------------------------------- the service on it


@pytest.fixture
def served(alias: EnginePair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with TemporaryDirectory(dir="/dev/shm", prefix="test-quartet-") as directory:
        served = Served(alias, Path(directory), 96, monkeypatch)
        yield served
        served.close()


def test_nothing_is_generated_while_the_trainer_writes(alias: EnginePair, served: Served) -> None:
    manifest, proof = alias.committed()
    sink = Sink(lambda: None)
    with pytest.raises(LeaseFailed, match=f"asks for policy version {alias.version}, this replica has none"):
        served.service.handle(served.lease(alias.version), sink)
    assert problem(manifest, proof, served.service.apply_weights(manifest)) == ""
    alias.begin()
    for version, why in (
        (manifest.version, rf"WRITING\({alias.version}\), expected CLEAN\({manifest.version}\)"),
        (alias.version, f"asks for policy version {alias.version}, this replica has {manifest.version}"),
    ):
        with pytest.raises(LeaseFailed, match=why) as failed:
            served.service.handle(served.lease(version), sink)
        assert failed.value.kind == "stale"
    assert sink.finished == []
    alias.write()
    manifest, proof = alias.committed()
    assert problem(manifest, proof, served.service.apply_weights(manifest)) == ""
    served.service.handle(served.lease(alias.version), sink)
    assert len(sink.finished) == 96
    assert {(sample.version_low, sample.version_high) for sample in sink.finished} == {(alias.version, alias.version)}


def test_samples_that_an_update_overtakes_are_not_handed_on(alias: EnginePair, served: Served) -> None:
    """Six times as many samples as the engine takes at once; the trainer begins when the first have ended."""
    manifest, _ = alias.committed()
    served.service.apply_weights(manifest)
    sink = Sink(lambda: None if alias.version > manifest.version else alias.begin())
    with pytest.raises(LeaseFailed, match=rf"WRITING\({alias.version + 1}\), expected CLEAN") as failed:
        served.service.handle(served.lease(manifest.version), sink)
    assert failed.value.kind == "stale"
    assert 0 < len(sink.finished) < 96
    with pytest.raises(LeaseFailed, match=r"WRITING\(") as failed:
        served.service.apply_weights(manifest)
    assert failed.value.kind == "stale"
    alias.write()
    manifest, proof = alias.committed()
    assert problem(manifest, proof, served.service.apply_weights(manifest)) == "", "requests were left in the engine"


def test_a_version_that_was_overtaken_leaves_none_to_generate_with(alias: EnginePair, served: Served) -> None:
    """A replica that joined late: what it was to take over is torn by then. It lives, and follows the next one."""
    manifest, _ = alias.committed()
    served.service.apply_weights(manifest)
    pid = alias.engine.facts.pid
    alias.begin()
    with pytest.raises(LeaseFailed, match=r"WRITING\(") as failed:
        served.service.apply_weights(manifest)
    assert failed.value.kind == "stale"
    with pytest.raises(LeaseFailed, match=f"asks for policy version {manifest.version}, this replica has none"):
        served.service.handle(served.lease(manifest.version), Sink(lambda: None))
    alias.write()
    manifest, proof = alias.committed()
    assert problem(manifest, proof, served.service.apply_weights(manifest)) == ""
    assert alias.engine.call_worker("quartet_test_pid") == pid


def test_a_failing_sample_takes_none_with_it_that_has_ended(alias: EnginePair) -> None:
    alias.apply()
    engine, found = alias.engine, list[int]()
    engine.ended, engine.fail_after = 0, 30

    def take() -> None:
        for responses in engine.generate(prompts(60), sampled(), alias.version):
            found.append(len(responses))
            assert engine.failed.wait(10.0)

    with pytest.raises(EngineError, match="request 30 fails as the test asks"):
        take()
    assert sum(found) >= 29, "samples that ended before the failure were thrown away with it"
    engine.fail_after = 0
    alias.apply()  # which refuses to empty a prefix cache under requests that still run


# ---------------------------------------------------------------- copy


def test_copied_weights_are_the_engines_own(copy: EnginePair) -> None:
    receipt = copy.apply()
    assert (copy.engine.facts.transport, copy.engine.facts.why_copy) == ("copy", "weights.transport = 'copy'")
    weights = sum(tensor.nbytes for tensor in model_tensors(copy.model).values())
    assert (receipt.transport, receipt.copied_bytes) == ("copy", weights)
    assert weights > 2 * MIB, "one bucket holds all: nothing is tested"
    assert set(receipt.offsets) == {OWN_COPY}
    assert receipt.unchecked == ()
    assert set(copy.engine.call_worker("quartet_test_offsets").values()) == {-1}
    assert copy.engine.call_worker("quartet_test_tied")


def test_a_copy_stays_as_it_is_until_the_next_version_is_applied(copy: EnginePair) -> None:
    copy.apply()
    before = copy.engine.canary(copy.canary)
    copy.begin()
    copy.write()
    assert copy.engine.canary(copy.canary) == pytest.approx(before, abs=1e-6)
    _, proof = copy.committed()
    assert copy.apply().canary_logprobs == pytest.approx(proof.canary_logprobs, abs=CLOSE)
    assert max(np.abs(np.subtract(before, proof.canary_logprobs))) > 0.05


@pytest.mark.parametrize(
    ("parameter", "index", "tensor"),
    [
        ("model.layers.1.self_attn.qkv_proj.weight", 256 * 256 + 5, "model.layers.1.self_attn.k_proj.weight"),
        ("model.layers.0.mlp.gate_up_proj.weight", 384 * 256 + 3, "model.layers.0.mlp.up_proj.weight"),
        ("model.embed_tokens.weight", 99 * 256, "model.embed_tokens.weight"),
        ("model.norm.weight", 255, "model.norm.weight"),
    ],
)
def test_a_corrupted_tensor_of_the_engine_is_named(copy: EnginePair, parameter: str, index: int, tensor: str) -> None:
    """In the engine's own process, in the matrix that it multiplies with, after the copying and before the proof."""
    manifest, proof = copy.update()
    copy.spoil(parameter, index, 1e-6)
    assert problem(manifest, proof, copy.engine.apply_weights(manifest)).startswith(f"its tensor {tensor} has checksum")
    copy.mend()
    assert problem(manifest, proof, copy.engine.apply_weights(manifest)) == ""


def test_the_canary_tells_what_lies_outside_every_tensor(copy: EnginePair) -> None:
    """A table of the engine's own, which no manifest lists: every checksum is right, and it computes something else."""
    manifest, proof = copy.update()
    for place in range(0, 32 * 16, 32):  # the cosine of each position's first angle
        copy.spoil(f"{ATTENTION}.rotary_emb.cos_sin_cache", place, -2.0)
    receipt = copy.engine.apply_weights(manifest)
    assert receipt.checksums == proof.checksums
    assert "its logprob of canary token" in problem(manifest, proof, receipt)
    copy.mend()
    assert problem(manifest, proof, copy.engine.apply_weights(manifest)) == ""
