"""Rules between the fields of a config. Imports nothing heavy."""

from __future__ import annotations

import os
import re
from fractions import Fraction

from common.config import Config, LearnerConfig, LoRAConfig
from common.config_loading import ConfigError, embedded_file
from common.config_values import (
    cache_prompts,
    cache_slots,
    devices,
    difference_bounds,
    evaluation_wave,
    has_critic,
    lora_alpha,
    reward_functions,
    samples_per_step,
)

GROUP_ESTIMATORS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"})
"""Advantage estimators that compare the responses to one prompt with each other."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM takes (0.25.1 to 0.32.0)."""

VLLM_COLDEST = 0.01
"""Lowest temperature that vLLM samples with (0.25.1 to 0.32.0)."""

_DEVICE = re.compile(r"^(auto|cpu|cuda(:\d+)?|(GPU|MIG)-[\w/-]+)$")
_DATA_SUFFIXES = (".jsonl", ".parquet")


def check_config(config: Config) -> None:
    """Raises ConfigError for the first rule between fields that the config breaks."""
    _check_lora(config.model.lora)
    _check_sampling(config)
    _check_devices(config)
    _check_data(config)
    _check_rewards(config)
    _check_objective(config)
    _check_learner(config, "trainer", config.trainer)
    _check_learner(config, "critic", config.critic)
    _check_cache(config)
    _check_timeouts(config)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _check_lora(lora: LoRAConfig) -> None:
    if lora.rank == 0:
        return
    ranks = ", ".join(str(rank) for rank in LORA_RANKS)
    _require(lora.rank in LORA_RANKS, f"model.lora.rank: expected 0 (off) or one of {ranks}, found {lora.rank}")
    factor = Fraction(lora_alpha(lora), lora.rank)
    _require(
        (factor.numerator * factor.denominator).bit_count() == 1,
        f"model.lora.alpha: expected model.lora.rank = {lora.rank} times a power of two, such as {lora.rank} or "
        f"{2 * lora.rank}, found {lora.alpha}: the engine multiplies the adapter by alpha / rank, and only a power of "
        "two changes no digit, so that engine and trainer compute with the same numbers",
    )
    twice = len(set(lora.targets)) != len(lora.targets)
    _require(
        bool(lora.targets) and not twice and all(target.isidentifier() for target in lora.targets),
        f"model.lora.targets: expected different names of projections, such as 'q_proj', found {lora.targets}",
    )


def _check_sampling(config: Config) -> None:
    rollout = config.rollout
    why = (
        "training samples with temperature only: a token that the cut took out of the sampled distribution would have "
        "probability 0 there and not in the trainer, and the probability ratio would be wrong; eval.top_k and "
        "eval.top_p cut in evaluation"
    )
    _require(rollout.top_k == 0, f"rollout.top_k: expected 0, found {rollout.top_k}; {why}")
    _require(rollout.top_p == 1.0, f"rollout.top_p: expected 1.0, found {rollout.top_p}; {why}")
    _require(
        rollout.engine != "vllm" or rollout.temperature >= VLLM_COLDEST,
        f"rollout.temperature: expected at least {VLLM_COLDEST} with rollout.engine = 'vllm', which raises anything "
        f"lower to it, so that it would not sample what the trainer computes with, found {rollout.temperature}; use "
        "rollout.engine = 'torch' for lower ones",
    )
    warn, stop = difference_bounds(config)
    why = "" if rollout.warn_difference else f" (0 with model.dtype = {config.model.dtype!r})"
    _require(
        stop >= warn,
        f"rollout.stop_difference: expected 0 or at least rollout.warn_difference = {warn:g}{why}, which is told "
        f"before, found {rollout.stop_difference:g}",
    )
    group = config.ppo.advantage in GROUP_ESTIMATORS
    _require(
        not group or rollout.responses_per_prompt >= 2,
        f"rollout.responses_per_prompt: expected at least 2 with ppo.advantage = {config.ppo.advantage!r}, which "
        f"compares the responses to one prompt, found {rollout.responses_per_prompt}",
    )


def _check_devices(config: Config) -> None:
    named = devices(config)
    for section, device in named.items():
        _require(
            bool(_DEVICE.match(device)),
            f"{section}.device: expected auto, cpu, cuda, cuda:N or a GPU's UUID, found {device!r}",
        )
    by_uuid = {device.startswith(("GPU-", "MIG-")) for device in named.values() if device != "cpu"}
    _require(
        len(by_uuid) < 2,
        "trainer.device: name GPUs all by number or all by UUID, since it matters which services share one; found "
        + ", ".join(f"{section}.device = {device!r}" for section, device in named.items()),
    )


def _check_data(config: Config) -> None:
    prompts = config.prompts
    if prompts.source == "reasoning_gym":
        for key, files in (("prompts.train", prompts.train), ("eval.data", config.eval.data)):
            _require(
                not files,
                f"{key}: expected no files with prompts.source = 'reasoning_gym', which generates its rows; found "
                f"{files}. Use prompts.source = 'file' to read them",
            )
        return
    _require(
        bool(prompts.train),
        "prompts.train: expected at least one .jsonl or .parquet file with prompts.source = 'file', found none",
    )
    seen: dict[str, str] = {}
    for key, files in (("prompts.train", prompts.train), ("eval.data", config.eval.data)):
        for index, name in enumerate(files):
            place = f"{key}[{index}]"
            path = embedded_file(name)
            _require(
                path.endswith(_DATA_SUFFIXES),
                f"{place}: expected a file ending in {' or '.join(_DATA_SUFFIXES)}, found {name!r}",
            )
            _require(os.path.isfile(path), f"{place}: no such file: {name} (looked at {os.path.abspath(path)})")
            same = seen.setdefault(os.path.realpath(path), place)
            _require(same == place, f"{place}: {name} is the file of {same}; each file is read once, for one purpose")


def _check_rewards(config: Config) -> None:
    reward = config.reward
    _require(
        not (reward.function and reward.functions),
        f"reward.function: found {reward.function!r} beside {len(reward.functions)} entries of reward.functions; "
        "expected one of the two (reward.function = '' switches the short form off)",
    )
    functions = reward_functions(config)
    _require(
        bool(functions),
        "reward.function: expected a built-in scorer such as 'exact_match', or path/to/file.py:function; found none",
    )
    _require(
        any(entry.weight != 0 for entry in functions),
        "reward.functions: every weight is 0, so that no response would be rewarded; expected one that is not",
    )
    for index, entry in enumerate(functions):
        key = "reward.function" if reward.function else f"reward.functions[{index}].function"
        _check_reward_function(key, entry.function)


def _check_reward_function(key: str, name: str) -> None:
    path, colon, function = name.rpartition(":")
    if not colon and not name.endswith(".py") and "/" not in name:
        _require(name.isidentifier(), f"{key}: expected a built-in name or path/to/file.py:function, found {name!r}")
        return
    _require(
        path.endswith(".py") and function.isidentifier(),
        f"{key}: expected path/to/file.py:function, found {name!r}",
    )
    _require(os.path.isfile(path), f"{key}: no such file: {path} (looked at {os.path.abspath(path)})")


def _check_objective(config: Config) -> None:
    ppo = config.ppo
    _require(
        ppo.dual_clip == 0 or ppo.dual_clip > 1,
        f"ppo.dual_clip: expected 0 (off) or a factor above 1, found {ppo.dual_clip}",
    )
    _require(
        ppo.dual_clip == 0 or ppo.loss != "gspo",
        f"ppo.dual_clip: expected 0 with ppo.loss = 'gspo', which has no dual clip, found {ppo.dual_clip}",
    )
    _require(
        ppo.clip_low < 1,
        f"ppo.clip_low: expected less than 1, since the ratio is clipped at 1 - clip_low, found {ppo.clip_low}",
    )
    _require(
        ppo.kl.controller == "fixed" or ppo.kl.placement == "reward",
        f"ppo.kl.controller: 'adaptive' needs ppo.kl.placement = 'reward', found placement {ppo.kl.placement!r}",
    )
    _require(
        has_critic(config) or config.critic.warmup_steps == 0,
        f"critic.warmup_steps: expected 0 with ppo.advantage = {ppo.advantage!r}, which has no critic, found "
        f"{config.critic.warmup_steps}",
    )
    _require(
        config.critic.warmup_steps < config.run.steps,
        f"critic.warmup_steps: expected fewer than run.steps = {config.run.steps}, since the policy does not learn in "
        f"them, found {config.critic.warmup_steps}",
    )


def _check_learner(config: Config, section: str, learner: LearnerConfig) -> None:
    samples = samples_per_step(config)
    _require(
        learner.mini_batch <= samples,
        f"{section}.mini_batch: expected at most a step's {samples} samples (prompts.per_step x "
        f"rollout.responses_per_prompt), found {learner.mini_batch}",
    )
    optimizer = learner.optimizer
    _require(
        all(0 <= beta < 1 for beta in optimizer.betas),
        f"{section}.optimizer.betas: expected two numbers in [0, 1), found {list(optimizer.betas)}",
    )


def _check_cache(config: Config) -> None:
    samples, slots = samples_per_step(config), cache_slots(config)
    _require(
        slots >= samples,
        f"cache.slots: expected at least a step's {samples} samples (prompts.per_step x "
        f"rollout.responses_per_prompt), found {slots}; 0 chooses {2 * samples}",
    )
    needed = max(config.prompts.per_step, evaluation_wave(config))
    found = cache_prompts(config)
    _require(
        found >= needed,
        f"cache.prompts: expected at least {needed}, the prompts that are in use at one time (prompts.per_step, or "
        f"the rows of an evaluation that cache.slots holds), found {found}; 0 chooses enough",
    )


def _check_timeouts(config: Config) -> None:
    timeouts = config.timeouts
    for name in ("start", "generate", "evaluate", "update", "checkpoint"):
        limit: float = getattr(timeouts, name)
        _require(
            timeouts.progress > limit,
            f"timeouts.progress: expected more than timeouts.{name} = {limit:g}, since work that is within its own "
            f"limit is no standstill, found {timeouts.progress:g}",
        )
