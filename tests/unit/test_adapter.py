"""LoRA policies: plain names in the weight set, an untouched base, the same numbers with and without the adapter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.adapter import adapter_info, adapter_off, add_adapter, inner_model, load_policy
from common.config import LoRAConfig, ModelConfig, OptimizerConfig
from common.config_checks import LORA_RANKS, check_config
from common.config_loading import ConfigError, load_config
from common.config_values import lora_alpha
from common.learner import Learner
from common.messages import AdapterInfo, Proof, Receipt
from common.model import load_causal_lm
from common.models import resolve_model
from common.service import ReplicaError
from common.weights.layout import entry_bytes, model_tensors
from common.weights.memory import map_set
from common.weights.names import adapter_tensors, is_adapter_tensor, plain_name, without_adapter
from common.weights.reader import attach_model
from common.weights.receipts import problem
from common.weights.writer import WeightWriter
from services.trainer.policy_directory import save_policy
from tests.unit.model_support import CPU, random_model

IDS = torch.tensor([[5, 6, 7, 8]])
TINY = ModelConfig(path="tiny", lora=LoRAConfig(rank=8, alpha=16))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@torch.no_grad()
def change(policy: Any) -> None:
    """Changes what is trained, as an update does."""
    torch.manual_seed(3)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight", "model.layers.0.mlp.up_proj.weight"),
        ("base_model.model.model.layers.0.mlp.up_proj.base_layer.bias", "model.layers.0.mlp.up_proj.bias"),
        ("base_model.model.m.q_proj.lora_A.default.weight", "m.q_proj.lora_A.weight"),
        ("m.q_proj.lora_B.default.weight", "m.q_proj.lora_B.weight"),
        ("base_model.model.lm_head.weight", "lm_head.weight"),
        ("model.default.weight", "model.default.weight"),
        ("transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
    ],
)
def test_plain_names(name: str, plain: str) -> None:
    assert plain_name(name) == plain


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_base_keeps_its_names_and_its_fused_layout(tmp_path: Path, family: str) -> None:
    plain = model_tensors(random_model(family))
    lora = LoRAConfig(rank=8)
    policy = add_adapter(random_model(family), lora, seed=1)
    writer = WeightWriter(tmp_path / "policy", "policy", policy, version=0, adapter=adapter_info(lora))
    manifest = writer.commit(0)
    base = without_adapter(manifest)
    assert [entry.name for entry in base.tensors] == [
        entry.name for entry in WeightWriter(tmp_path / "plain", "p", random_model(family), version=0).entries
    ]
    assert {entry.name: entry.shape for entry in base.tensors} == {n: tuple(t.shape) for n, t in plain.items()}
    layer = "model.layers.1.self_attn."
    places = {entry.name: entry for entry in manifest.tensors}
    q, k, v = (places[f"{layer}{name}_proj.weight"] for name in "qkv")
    assert (q.offset + entry_bytes(q), k.offset + entry_bytes(k)) == (k.offset, v.offset)
    adapters = adapter_tensors(manifest)
    assert len(adapters) == 2 * 2 * len(lora.targets)
    assert places[f"{layer}q_proj.lora_A.weight"].shape == (8, q.shape[1])
    assert places[f"{layer}q_proj.lora_B.weight"].shape == (q.shape[0], 8)
    assert manifest.adapter == AdapterInfo(rank=8, alpha=8, targets=tuple(lora.targets))


def test_a_plain_policy_has_no_adapter(tmp_path: Path) -> None:
    manifest = WeightWriter(tmp_path / "policy", "policy", random_model("llama"), version=0).commit(0)
    assert manifest.adapter is None
    assert without_adapter(manifest) is manifest
    assert adapter_tensors(manifest) == ()
    assert isinstance(load_policy(ModelConfig(path="tiny"), CPU, 1), type(load_causal_lm(TINY, CPU)))


def test_a_new_policy_is_the_base_and_its_seed_decides_its_adapter() -> None:
    base = load_causal_lm(TINY, CPU)
    first, same, other = (model_tensors(load_policy(TINY, CPU, seed)) for seed in (1, 1, 2))
    name = "model.layers.0.mlp.down_proj.lora_A.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    assert all(not tensor.any() for name, tensor in first.items() if name.endswith("lora_B.weight"))
    assert torch.equal(logits(load_policy(TINY, CPU, 1)), logits(base))


def test_without_its_adapter_a_trained_policy_is_the_base_bit_for_bit(tmp_path: Path) -> None:
    policy = load_policy(TINY, CPU, 1)
    WeightWriter(tmp_path / "policy", "policy", policy, version=0)
    change(policy)
    reference = logits(load_causal_lm(TINY, CPU))
    assert (logits(policy) - reference).abs().max() > 0.1
    with adapter_off(policy):
        assert torch.equal(logits(policy), reference)
    assert (logits(policy) - reference).abs().max() > 0.1, "the adapter is on again"
    assert {is_adapter_tensor(plain_name(n)) for n, p in policy.named_parameters() if p.requires_grad} == {True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_changes_the_adapter_alone(tmp_path: Path, dtype: Any) -> None:
    policy = load_policy(ModelConfig(path="tiny", dtype=dtype, lora=LoRAConfig(rank=8)), CPU, 1)
    writer = WeightWriter(tmp_path / "policy", "policy", policy, version=0)
    assert {entry.dtype for entry in writer.entries} == {dtype}, "adapters are shared in the dtype that engines use"
    learner = Learner(policy, OptimizerConfig(learning_rate=1e-2), total_steps=1)
    before = dict(zip(writer.entries, writer.prove().checksums, strict=True))
    for version in (1, 2):  # B is zero in the first step, so that A has no gradient there
        writer.begin(version)
        learner.accumulate(policy(input_ids=IDS, labels=IDS, use_cache=False).loss)
        learner.apply()
        writer.commit(version)
    after = dict(zip(writer.entries, writer.prove().checksums, strict=True))
    assert {entry.name for entry in before if before[entry] != after[entry]} == {
        entry.name for entry in writer.entries if is_adapter_tensor(entry.name)
    }


def test_engine_torch_takes_the_adapter_over(tmp_path: Path) -> None:
    policy = load_policy(TINY, CPU, 1)
    writer = WeightWriter(tmp_path / "policy", "policy", policy, 0, adapter=adapter_info(TINY.lora))
    change(policy)
    manifest = writer.commit(0)
    engine = inner_model(load_policy(TINY, CPU, 9))
    reader = attach_model(engine, manifest, map_set(manifest, None))
    receipt = reader.receipt(manifest, reader.apply(manifest), ())
    assert problem(manifest, writer.prove(), receipt) == ""
    assert torch.equal(logits(engine), logits(policy))


def receipt_of(manifest: Any, proof: Proof, **fields: Any) -> Receipt:
    offsets = tuple(-1 if is_adapter_tensor(entry.name) else entry.offset for entry in manifest.tensors)
    fields = {"offsets": offsets, "checksums": proof.checksums} | fields
    return Receipt(transport="alias", identity=manifest.identity, canary_logprobs=(), **fields)


def test_receipts_allow_a_copy_of_the_adapter_and_nothing_else(tmp_path: Path) -> None:
    lora = LoRAConfig(rank=8)
    policy = add_adapter(random_model("llama"), lora, seed=1)
    writer = WeightWriter(tmp_path / "policy", "policy", policy, version=0, adapter=adapter_info(lora))
    manifest, proof = writer.commit(0), writer.prove()
    assert problem(manifest, proof, receipt_of(manifest, proof)) == ""
    wrong = tuple(total + is_adapter_tensor(e.name) for e, total in zip(manifest.tensors, proof.checksums, strict=True))
    first = adapter_tensors(manifest)[0].name
    assert problem(manifest, proof, receipt_of(manifest, proof, checksums=wrong)).startswith(f"its tensor {first} has")
    copied = receipt_of(manifest, proof, offsets=(-1,) * len(manifest.tensors))
    assert problem(manifest, proof, copied).startswith("its tensor model.embed_tokens.weight is a copy of its own")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_one_model_with_the_adapter_beside_it(tmp_path: Path, dtype: Any) -> None:
    config = ModelConfig(path="tiny", dtype=dtype, lora=LoRAConfig(rank=8, alpha=16, targets=["q_proj", "down_proj"]))
    policy = load_policy(config, CPU, 1)
    writer = WeightWriter(tmp_path / "policy", "policy", policy, version=0)
    change(policy)
    before, target = writer.prove(), tmp_path / "final"
    nbytes = save_policy(policy, resolve_model("tiny"), target)
    assert writer.prove() == before, "merged in a copy"
    assert nbytes == sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    kind, allowed = policy.dtype, {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    merged: Any = AutoModelForCausalLM.from_pretrained(str(target), local_files_only=True)
    assert merged.dtype == kind
    assert (logits(merged) - logits(policy)).abs().max() < allowed
    base: Any = AutoModelForCausalLM.from_pretrained(str(resolve_model("tiny")), dtype=kind, local_files_only=True)
    loaded = peft.PeftModel.from_pretrained(base, str(target / "adapter"), autocast_adapter_dtype=False)
    assert torch.equal(logits(loaded.eval()), logits(policy))


def test_a_missing_projection_is_named() -> None:
    with pytest.raises(ReplicaError, match=r"no projection 'c_attn'; it has .*down_proj"):
        add_adapter(random_model("llama"), LoRAConfig(rank=8, targets=["q_proj", "c_attn"]), seed=1)


def test_without_peft_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # what Python itself does where an import is not to be had
    with pytest.raises(ReplicaError, match=r"pip install 'quartet\[lora\]'"):
        load_policy(TINY, CPU, 1)


def lora_config(*overrides: str) -> LoRAConfig:
    config = load_config("tiny", overrides)
    check_config(config)
    return config.model.lora


def test_lora_is_off_by_default() -> None:
    assert adapter_info(lora_config()) is None
    lora_config("model.lora.alpha=3")


@pytest.mark.parametrize("rank", LORA_RANKS)
@pytest.mark.parametrize("factor", [0.5, 1, 4])
def test_alpha_may_be_rank_times_a_power_of_two(rank: int, factor: float) -> None:
    alpha = max(1, int(factor * rank))
    assert lora_alpha(lora_config(f"model.lora.rank={rank}", f"model.lora.alpha={alpha}")) == alpha
    assert lora_alpha(lora_config(f"model.lora.rank={rank}")) == rank


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.lora.rank=8", "model.lora.alpha=12"], "model.lora.alpha: expected model.lora.rank = 8 times a power"),
        (["model.lora.rank=16", "model.lora.alpha=24"], "such as 16 or 32, found 24"),
        (["model.lora.rank=4"], "model.lora.rank: expected 0 (off) or one of 1, 8, 16, 32, 64, "),
        (["model.lora.rank=8", "model.lora.targets=[]"], "model.lora.targets: expected different names"),
        (["model.lora.rank=8", 'model.lora.targets=["a", "a"]'], "found ['a', 'a']"),
    ],
)
def test_wrong_lora_settings_are_named(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        lora_config(*overrides)
    assert said in str(error.value)
