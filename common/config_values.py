"""What the automatic values of a config come to, and what follows from several of its keys. Imports nothing heavy."""

from __future__ import annotations

import os
from dataclasses import dataclass

from common.config import Config, LoRAConfig, RewardFunctionConfig
from common.messages import Role
from common.models import resolve_model

_WARN_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}
_STOP_FACTOR = 10.0
_SMALL_MODEL_BYTES = 1 << 30
_LARGE_MODEL_EVERY = 10
_GPU_DRIVER = "/dev/nvidiactl"


def samples_per_step(config: Config) -> int:
    """Samples of one step: prompts times responses per prompt."""
    return config.prompts.per_step * config.rollout.responses_per_prompt


def cache_slots(config: Config) -> int:
    """Slots of the token cache, ``cache.slots = 0`` resolved."""
    return config.cache.slots or 2 * samples_per_step(config)


def cache_prompts(config: Config) -> int:
    """Prompts kept in the token cache's index, ``cache.prompts = 0`` resolved."""
    return config.cache.prompts or max(1024, 8 * config.prompts.per_step + evaluation_rows(config))


def evaluation_rows(config: Config) -> int:
    """Most rows that an evaluation takes; 0 if this run does not evaluate."""
    return 0 if config.prompts.source == "file" and not config.eval.data else config.eval.rows


def evaluation_wave(config: Config) -> int:
    """Rows of an evaluation that are in the token cache at one time: those that its slots hold."""
    return min(evaluation_rows(config), cache_slots(config))


@dataclass(frozen=True)
class Limit:
    """Seconds that are waited, and the config keys that they come from, for messages."""

    seconds: float
    keys: str


def start_limit(config: Config) -> Limit:
    """Until every service must be ready: an engine that compiles starts after the trainer it waits for."""
    if config.rollout.engine != "vllm":
        return Limit(config.timeouts.start, "timeouts.start")
    seconds = config.timeouts.start + config.rollout.vllm.start_timeout
    return Limit(seconds, "timeouts.start + rollout.vllm.start_timeout")


def weights_limit(config: Config, *, committed: bool) -> Limit:
    """Longest wait for the memory of a weight set. A consumer of a set that has been committed waits an update longer,
    during which nobody gets it."""
    if not committed:
        return Limit(config.timeouts.start, "timeouts.start")
    return Limit(config.timeouts.start + config.timeouts.update, "timeouts.start + timeouts.update")


@dataclass(frozen=True)
class Snapshots:
    """After which steps trainer and critic save their states (``checkpoint``)."""

    every: int
    may_skip: bool
    """Whether one of these steps is let go where an earlier state is still being written: saving it would wait."""
    kept_every: int = 0
    """Every so many steps a state is to be kept, and so saved in any case; 0: none."""

    def due(self, step: int, last: bool, writing: bool) -> bool:
        """Whether the state after ``step`` is to be saved. ``writing``: another one is not on the disk yet."""
        kept = self.kept_every > 0 and step % self.kept_every == 0
        return kept or last or (step % self.every == 0 and not (self.may_skip and writing))


def snapshots(config: Config) -> Snapshots:
    """``checkpoint.snapshot_every``, 0 resolved by the size of the model's files, and ``checkpoint.every``."""
    wanted = config.checkpoint
    if wanted.snapshot_every:
        return Snapshots(wanted.snapshot_every, may_skip=False, kept_every=wanted.every)
    files = resolve_model(config.model.path).glob("*.safetensors")
    small = sum(file.stat().st_size for file in files) <= _SMALL_MODEL_BYTES
    return Snapshots(1 if small else _LARGE_MODEL_EVERY, may_skip=True, kept_every=wanted.every)


def has_critic(config: Config) -> bool:
    """Whether the advantage estimator needs a critic."""
    return config.ppo.advantage == "gae"


def learner_roles(config: Config) -> tuple[Role, ...]:
    """The services that learn, and so have a state."""
    return ("trainer", "critic") if has_critic(config) else ("trainer",)


def reward_functions(config: Config) -> list[RewardFunctionConfig]:
    """The scorers in order, ``reward.function`` resolved; the first one's unweighted score is the accuracy."""
    if config.reward.function:
        return [RewardFunctionConfig(function=config.reward.function)]
    return list(config.reward.functions)


def gpu_present() -> bool:
    """Whether there is an NVIDIA driver and CUDA_VISIBLE_DEVICES hides not all of its GPUs.

    Found out without loading torch, and so not whether a GPU works, or whether there is one: a driver may have none.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return os.path.exists(_GPU_DRIVER) and not hidden


def uses_gpu(config: Config) -> bool:
    """Whether trainer, critic or an engine of this run computes on a GPU, so that a holder must host shared memory.

    Device ``auto`` counts as a GPU where this process sees one (``gpu_present``).
    """
    present = gpu_present()
    return any(_gpu(device, present) for device in devices(config).values())


def sleeps(config: Config, gpu: bool | None = None) -> bool:
    """Whether rollout engines give their KV cache back during updates, ``rollout.sleep = "auto"`` resolved.

    ``gpu`` says whether device ``auto`` is a GPU; None: it is where this process sees one.
    """
    rollout = config.rollout
    if rollout.sleep != "auto":
        return rollout.sleep == "always"
    present = gpu_present() if gpu is None else gpu
    engine = _gpu(rollout.device, present)
    shared = any(_gpu(device, present) == engine for key, device in devices(config).items() if key != "rollout")
    return rollout.engine == "vllm" and bool(engine) and shared


def devices(config: Config) -> dict[str, str]:
    """What ``device`` says, by section, of those that compute with a model."""
    found = {"rollout": config.rollout.device, "trainer": config.trainer.device}
    return found | ({"critic": config.critic.device} if has_critic(config) else {})


def _gpu(device: str, present: bool) -> str:
    """The GPU that a device string names, by number (``cuda:0``) or UUID; empty: it is the CPU."""
    if device == "cpu" or (device == "auto" and not present):
        return ""
    return "cuda:0" if device in ("auto", "cuda") else device


def lora_alpha(lora: LoRAConfig) -> int:
    """``model.lora.alpha``, 0 resolved."""
    return lora.alpha or lora.rank


def difference_bounds(config: Config) -> tuple[float, float]:
    """``rollout.warn_difference`` and ``rollout.stop_difference`` in nats, 0 resolved."""
    warn = config.rollout.warn_difference or _WARN_DIFFERENCE[config.model.dtype]
    return warn, config.rollout.stop_difference or _STOP_FACTOR * warn
