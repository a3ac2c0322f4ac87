"""Config: presets, overrides, errors that name their key, rules between fields, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config
from common.config_checks import check_config
from common.config_loading import (
    ConfigError,
    config_digest,
    embedded_file,
    from_json,
    load_config,
    preset_names,
    to_json,
    to_toml,
)
from common.config_values import (
    cache_prompts,
    cache_slots,
    evaluation_wave,
    has_critic,
    reward_functions,
    samples_per_step,
)

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = ("torch", "numpy", "transformers", "tomli_w", "pyarrow", "tokenizers")


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def checked(tmp_path: Path, *overrides: str) -> Config:
    """A config of two small files with overrides, after ``check_config``."""
    for name in ("train.jsonl", "eval.jsonl"):
        write(tmp_path / name, "{}\n")
    files = [f'prompts.train=["{tmp_path}/train.jsonl"]', f'eval.data=["{tmp_path}/eval.jsonl"]']
    base = write(tmp_path / "base.toml", '[reward]\nfunction = "exact_match"\n')
    config = load_config(base, [*files, *overrides])
    check_config(config)
    return config


def test_presets_are_complete_configs_and_survive_both_encodings(tmp_path: Path) -> None:
    assert preset_names() == ["smollm2", "tiny"]
    for name in preset_names():
        config = load_config(name)
        assert config.run.name == name
        assert load_config(write(tmp_path / f"{name}.toml", to_toml(config))) == config
        assert from_json(to_json(config)) == config


def test_presets_pass_their_checks() -> None:
    check_config(load_config("tiny"))
    config = load_config("smollm2")
    check_config(config)
    assert samples_per_step(config) == 16
    assert config.run.steps == 3
    assert [entry.function for entry in reward_functions(config)] == ["last_number"]


def test_to_toml_writes_every_default() -> None:
    text = to_toml(Config())
    assert "min_ratio = 0.0" in text
    assert "heartbeat = 1.0" in text
    assert "controller = " in text


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rollout.temperature=1", "rollout.temperature", 1.0),
        ("run.name=tiny-7b.x", "run.name", "tiny-7b.x"),
        ("run.name=7", "run.name", "7"),
        ("model.path=1e3", "model.path", "1e3"),
        ("model.path='a b'", "model.path", "a b"),
        ("run.directory=a=b\nc=3", "run.directory", "a=b\nc=3"),
        ("ppo.whiten=false", "ppo.whiten", False),
        ("trainer.optimizer.betas=[0.8, 0.9]", "trainer.optimizer.betas", (0.8, 0.9)),
        ("prompts.reasoning_gym.options.max_terms=2", "prompts.reasoning_gym.options", {"max_terms": 2}),
    ],
)
def test_overrides(tmp_path: Path, override: str, key: str, value: object) -> None:
    found: object = load_config(write(tmp_path / "empty.toml", ""), [override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_later_overrides_win() -> None:
    assert load_config("tiny", ["run.seed=2", "run.seed=3"]).run.seed == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.row=3", ["rollout.row: ", "Did you mean rollout.rows?", "--set rollout.row=3"]),
        ("rolout.rows=3", ["rolout.rows: ", "Did you mean rollout?"]),
        ("rollout.epochs=3", ["rollout.epochs: ", "Did you mean critic.epochs or trainer.epochs?"]),
        ("ppo.kl.foo.bar=1", ["ppo.kl.foo.bar: ", "no such key"]),
        ("rollout.rows=0", ["rollout.rows: ", "expected int >= 1", "found 0"]),
        ("rollout.rows=many", ["rollout.rows: ", "expected int", "found 'many'"]),
        ("run.steps=1.5", ["run.steps: ", "expected int", "found 1.5"]),
        ("run.name=../x", ["run.name: ", "found '../x'"]),
        ("ppo.loss=pppo", ["ppo.loss: ", "'ppo', 'gspo'", "found 'pppo'"]),
        ("ppo.kl=3", ["ppo.kl: ", "expected a table", "found 3"]),
        ("ppo.gamma=1.5", ["ppo.gamma: ", "<= 1.0", "found 1.5"]),
        ("ppo.entropy=nan", ["ppo.entropy: ", "finite", "found nan"]),
        ("reward.functions=[{weight=inf}]", ["reward.functions[0].weight: ", "finite"]),
        ("reward.functions=[{weigth=1}]", ["reward.functions[0].weigth: ", "Did you mean", "weight?"]),
        ("prompts.reasoning_gym.options.a={b=1}", ["prompts.reasoning_gym.options", "--set prompts", "{'b': 1}"]),
        ("trainer.optimizer.betas=[0.9]", ["trainer.optimizer.betas: ", "length 2", "found [0.9]"]),
        ("rollout.rows.x=1", ["rollout.rows.x: ", "rollout.rows has the value 16"]),
        ("rollout={rows=3}", ["rollout is a whole section", "section.key=value"]),
        ("rows=3", ["rows is no key", "Did you mean rollout.rows or eval.rows?", "section.key=value"]),
        ("rollout.rows", ["expected section.key=value"]),
        ("=3", ["expected section.key=value"]),
        ("rollout..rows=3", ["expected section.key=value"]),
    ],
)
def test_a_wrong_override_names_key_expectation_and_finding(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("smollm2", [override])
    for word in words:
        assert word in str(error.value)


def test_a_wrong_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.toml", "[ppo]\nclip_hihg = 0.3\n")
    with pytest.raises(ConfigError, match=r"ppo\.clip_hihg.*Did you mean ppo\.clip_high\?") as error:
        load_config(path, ["run.seed=3"])
    assert path in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"[run\n", "not valid TOML"), (b"\xff", "not valid TOML")],
)
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        load_config(str(path))
    assert str(path) in str(error.value)


def test_an_unknown_preset_lists_the_presets() -> None:
    with pytest.raises(ConfigError, match=r"smolm2: neither a preset nor a file\. Did you mean smollm2\?.*tiny"):
        load_config("smolm2")


def test_json_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="another version"):
        from_json(b'{"run":{"nam":"x"}}')


def test_digest_follows_every_field_and_not_the_order_of_options(tmp_path: Path) -> None:
    config = load_config("tiny")
    assert config_digest(config) == config_digest(load_config("tiny"))
    assert config_digest(config) != config_digest(load_config("tiny", ["log.samples=9"]))
    key = "prompts.reasoning_gym.options"
    one = load_config("tiny", [f"{key}={{a = 1, b = 2}}"])
    two = load_config("tiny", [f"{key}={{b = 2, a = 1}}"])
    assert config_digest(one) == config_digest(two)


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False), st.text(max_size=20))
def test_any_value_survives_both_encodings(number: float, text: str) -> None:
    config = load_config("tiny", [f"ppo.kl.coefficient={number!r}"])
    config = from_json(to_json(config))
    assert config.ppo.kl.coefficient == number
    options = {"name": text}
    gym = msgspec.structs.replace(config.prompts.reasoning_gym, options=options)
    config = msgspec.structs.replace(config, prompts=msgspec.structs.replace(config.prompts, reasoning_gym=gym))
    assert from_json(to_json(config)) == config


def test_automatic_values(tmp_path: Path) -> None:
    config = checked(tmp_path, "prompts.per_step=200", "rollout.responses_per_prompt=3")
    assert samples_per_step(config) == 600
    assert cache_slots(config) == 1200
    assert cache_prompts(config) == 8 * 200 + 500
    assert evaluation_wave(config) == 500
    assert has_critic(config)
    small = checked(tmp_path, "prompts.per_step=4", "eval.data=[]", "cache.slots=9")
    assert (cache_slots(small), cache_prompts(small), evaluation_wave(small)) == (9, 1024, 0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.top_k=5"], r"rollout\.top_k: expected 0, found 5; .*probability 0"),
        (["rollout.top_p=0.9"], r"rollout\.top_p: expected 1\.0, found 0\.9; .*probability 0"),
        (
            ["rollout.engine=vllm", "rollout.temperature=0.009"],
            r"rollout\.temperature: expected at least 0\.01 with rollout\.engine = 'vllm'.*found 0\.009",
        ),
        (["reward.functions=[{}]"], r"reward\.function: found 'exact_match' beside 1"),
        (["reward.function=''"], r"reward\.function: expected a built-in scorer"),
        (["reward.function=''", "reward.functions=[{weight=0.0}]"], r"reward\.functions: every weight is 0"),
        (["reward.function=no/such.py:score"], r"reward\.function: no such file: no/such\.py"),
        (["reward.function=such.py"], r"reward\.function: expected path/to/file\.py:function"),
        (["reward.function=such.py:a-b"], r"reward\.function: expected path/to/file\.py:function"),
        (["reward.function=a b"], r"reward\.function: expected a built-in name"),
        (["cache.slots=63"], r"cache\.slots: expected at least a step's 64 samples.*found 63; 0 chooses 128"),
        (["cache.prompts=100"], r"cache\.prompts: expected at least 128.*found 100"),
        (["ppo.advantage=rloo"], r"rollout\.responses_per_prompt: expected at least 2.*found 1"),
        (["trainer.mini_batch=65"], r"trainer\.mini_batch: expected at most a step's 64 samples.*found 65"),
        (["critic.mini_batch=65"], r"critic\.mini_batch: "),
        (["ppo.kl.controller=adaptive", "ppo.kl.placement=loss"], r"ppo\.kl\.controller: 'adaptive' needs"),
        (["ppo.dual_clip=0.5"], r"ppo\.dual_clip: expected 0 \(off\) or a factor above 1, found 0\.5"),
        (["ppo.dual_clip=1"], r"ppo\.dual_clip: "),
        (["ppo.dual_clip=3", "ppo.loss=gspo"], r"ppo\.dual_clip: expected 0 with ppo\.loss = 'gspo'.* found 3"),
        (["ppo.clip_low=1.0"], r"ppo\.clip_low: "),
        (["trainer.optimizer.betas=[0.9, 1.0]"], r"trainer\.optimizer\.betas: .*found \[0\.9, 1\.0\]"),
        (["critic.warmup_steps=100"], r"critic\.warmup_steps: expected fewer than run\.steps = 100"),
        (["critic.warmup_steps=1", "ppo.advantage=reinforce_pp"], r"critic\.warmup_steps: expected 0.*no critic"),
        (["rollout.device=gpu"], r"rollout\.device: expected auto, cpu, cuda, cuda:N or a GPU's UUID, found 'gpu'"),
        (["trainer.device=cuda:x"], r"trainer\.device: "),
        (
            ["trainer.device=cuda:1", "rollout.device=GPU-1a-2b"],
            r"all by number or all by UUID.*rollout\.device = 'GPU-1",
        ),
        (["prompts.train=[]"], r"prompts\.train: expected at least one"),
        (["prompts.train=['x.csv']"], r"prompts\.train\[0\]: expected a file ending in \.jsonl or \.parquet"),
        (["eval.data=['x.jsonl']"], r"eval\.data\[0\]: no such file: x\.jsonl"),
        (["prompts.source=reasoning_gym"], r"prompts\.train: expected no files"),
    ],
)
def test_rules_between_fields(tmp_path: Path, overrides: list[str], words: str) -> None:
    checked(tmp_path)
    with pytest.raises(ConfigError, match=words):
        checked(tmp_path, *overrides)


def test_evaluating_on_training_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.data\[0\]: .* is the file of prompts\.train\[0\]"):
        checked(tmp_path, f"eval.data=['{tmp_path}/../{tmp_path.name}/train.jsonl']")


def test_a_users_reward_function_is_accepted(tmp_path: Path) -> None:
    write(tmp_path / "mine.py", "def score(): ...\n")
    config = checked(tmp_path, f"reward.function={tmp_path}/mine.py:score")
    assert reward_functions(config)[0].weight == 1.0


def test_embedded_files_lie_beside_the_presets() -> None:
    assert Path(embedded_file("quartet:tiny.toml")).is_file()
    assert embedded_file("a/b.jsonl") == "a/b.jsonl"


def test_parsing_a_config_loads_nothing_heavy() -> None:
    code = (
        "import sys, common\n"
        "from common.config_loading import load_config\n"
        "from common.config_checks import check_config\n"
        "check_config(load_config('smollm2', ['run.seed=2']))\n"
        f"print([name for name in {FORBIDDEN!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
