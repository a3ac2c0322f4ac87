"""The trainer service: logprobs of policy and reference into the cache, PPO updates, weights published by version."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.adapter import adapter_info, adapter_off, load_policy
from common.batch import Batch, read_batch, response_logits, write_columns
from common.cache_access import attach_cache, take_counts
from common.checkpoints.role import RoleState
from common.config_values import sleeps
from common.devices import gpu_uuid
from common.learner import Learner
from common.messages import (
    NO_STATE,
    Lease,
    Logprobs,
    LogprobsDone,
    Manifest,
    Proof,
    Receipt,
    RestoreState,
    Result,
    Saved,
    SavePolicy,
    SaveState,
    SlotRef,
    StateRestored,
    Updated,
    UpdatePolicy,
)
from common.model import (
    canary_ids,
    canary_logprobs,
    load_causal_lm,
    pick_device,
    release_cached,
    set_up_torch,
    token_logprobs,
)
from common.models import resolve_model
from common.run_files import RunDirectory
from common.service import Assignment, LeaseFailed, Outbox, ReplicaError
from common.tokenizer import load_tokenizer
from common.weights.layout import model_tensors
from common.weights.memory import WeightMemory, map_buffer
from common.weights.names import is_adapter_tensor
from common.weights.writer import Allocate, WeightWriter
from services.trainer.policy_directory import save_policy
from services.trainer.update import PolicyUpdate

WRITES = frozenset({"logprobs", "ref_logprobs"})


class TrainerService:
    """Implements ``common.service.Service``."""

    def __init__(self, assignment: Assignment) -> None:
        config = self.config = assignment.config
        set_up_torch(config.trainer.threads)
        torch.manual_seed(config.run.seed)
        self.source = resolve_model(config.model.path)
        tokenizer = load_tokenizer(self.source)
        self.checkpoints = RunDirectory(Path(assignment.run_directory)).checkpoints
        self.pad_id = tokenizer.pad_id
        self.cache = attach_cache(assignment, tokenizer.fingerprint, WRITES)
        self.device = pick_device(config.trainer.device)
        self.makes_room = sleeps(config)
        # Loaded on the CPU: the writer puts the parameters straight into the shared memory, so that no second copy of
        # them is ever on the GPU.
        self.policy: Any = load_policy(config.model, torch.device("cpu"), config.run.seed)
        self.reference = None
        if config.ppo.kl.placement != "none" and not config.model.lora.rank:
            self.reference = load_causal_lm(config.model, self.device).requires_grad_(False)
        self.weights = WeightWriter(
            assignment.shared.weights / "policy",
            "policy",
            self.policy,
            version=0,
            allocate=self._allocation(assignment),
            adapter=adapter_info(config.model.lora),
        )
        self.policy.to(self.device)  # the buffers that are no part of the set
        self.learner = Learner(self.policy, config.trainer.optimizer, config.run.steps)
        self.update = PolicyUpdate(config, self.policy, self.learner, self.cache, self.pad_id)
        self.canary = canary_ids(self.policy.config.get_text_config().vocab_size)
        # Memory of an earlier trainer holds some version, but the optimizer's state that belongs to it is gone.
        step = 0 if self.weights.created else NO_STATE
        self.role_state = RoleState("trainer", self.learner, self.device, config.timeouts.checkpoint, step)
        self.role_state.prepare(self._trained())

    def _allocation(self, assignment: Assignment) -> Allocate | None:
        """On a GPU the holder hosts the memory, so that it outlives this process."""
        if self.device.type != "cuda":
            return None
        gpu = gpu_uuid(self.device.index)

        def allocate(nbytes: int) -> tuple[WeightMemory, bool]:
            granted = assignment.weights.want("policy", gpu, nbytes)
            if granted.handle is None:
                raise ReplicaError("the coordinator granted memory for the policy's weights without a handle")
            return map_buffer(granted.handle, nbytes), granted.created

        return allocate

    def ready(self) -> tuple[Manifest, Proof] | None:
        """The committed weights; None in memory that an earlier trainer left, until a state is restored."""
        if self.role_state.step == NO_STATE:
            return None
        return self.weights.commit(self.weights.version, self.canary), self._prove()

    def state(self) -> int:
        """The step whose state is held; ``NO_STATE`` if none is."""
        return self.role_state.step

    def _prove(self) -> Proof:
        return self.weights.prove(canary_logprobs(self.policy, self.canary))

    def handle(self, lease: Lease, outbox: Outbox) -> Result:
        match lease.task:
            case Logprobs(refs=refs, reference=reference):
                return LogprobsDone(tokens=self.write_logprobs(refs, reference))
            case UpdatePolicy() as task:
                return self.update_policy(lease, task, outbox)
            case SavePolicy(name=name, version=version):
                return self.save(name, version)
            case SaveState() as task:
                return self.role_state.save(task, self._trained(), outbox)
            case RestoreState() as task:
                return self.restore(lease, task, outbox)
            case other:
                raise LeaseFailed("error", f"trainer cannot carry out {type(other).__name__}")

    @torch.no_grad()
    def write_logprobs(self, refs: Sequence[SlotRef], reference: bool) -> int:
        """Recomputes the policy's logprobs of one micro-batch, and the reference's where asked for."""
        self.role_state.require("Logprobs")
        batch = read_batch(self.cache, refs, self.pad_id, self.device)
        temperature = self.config.rollout.temperature
        logprobs = token_logprobs(response_logits(self.policy, batch), batch.response_ids, temperature)
        write_columns(self.cache, "logprobs", batch, logprobs)
        if reference:
            logprobs = token_logprobs(self._reference_logits(batch), batch.response_ids, temperature)
            write_columns(self.cache, "ref_logprobs", batch, logprobs)
        return batch.tokens

    def _reference_logits(self, batch: Batch) -> torch.Tensor:
        """[B, T, V]. The reference of a LoRA policy is the policy without its adapter."""
        if self.config.ppo.kl.placement == "none":
            raise LeaseFailed("error", "reference logprobs were asked for, but ppo.kl.placement is 'none'")
        if self.reference is not None:
            return response_logits(self.reference, batch)
        with adapter_off(self.policy):
            return response_logits(self.policy, batch)

    def update_policy(self, lease: Lease, task: UpdatePolicy, outbox: Outbox) -> Updated:
        """WRITING before the first write, CLEAN after the last; then every engine must prove what is proved here.

        The engines take the version over while this side of the proof is computed.
        """
        metrics: dict[str, float] = {}
        tokens = 0
        self.role_state.require("UpdatePolicy")
        self.weights.begin(task.version)
        self.role_state.step = NO_STATE
        outbox.update_begun(task.version)
        if task.refs and not task.skip:
            metrics, tokens = self.update.run(task.refs, lease.step, task.kl_coefficient)
        if self.makes_room:
            release_cached(self.device)
        outbox.update_committed(lease.work, self.weights.commit(task.version, self.canary))
        self.role_state.step = lease.step
        outbox.weights_proved(self._prove())
        return Updated(metrics=metrics, tokens=tokens)

    def restore(self, lease: Lease, task: RestoreState, outbox: Outbox) -> StateRestored:
        """Becomes what it was after ``task.step``, and commits and proves its weights as that version."""
        started = time.monotonic()
        saved = self.role_state.open(task) if task.step else None
        # The base of a LoRA policy is in no state, and may be torn in memory that an earlier trainer left.
        wanted = self._first_tensors() if saved is None or self.weights.adapter else self._empty_tensors()
        if saved is not None:
            self.role_state.load_weights(saved, {name: wanted[name] for name in self._trained()})
        self.role_state.step = NO_STATE
        kept = self.weights.restore(task.step, wanted)
        if saved is None:
            self.role_state.begin_again()
        else:
            self.role_state.load_learner(saved)
        if self.makes_room:
            release_cached(self.device)
        self.role_state.step = task.step
        outbox.update_committed(lease.work, self.weights.commit(task.step, self.canary))
        outbox.weights_proved(self._prove())
        return StateRestored(seconds=time.monotonic() - started, kept=kept)

    def _trained(self) -> dict[str, torch.Tensor]:
        """What a state holds of the shared weights: all of them, or the adapter alone where the base is frozen."""
        views = self.weights.views
        return {name: view for name, view in views.items() if not self.weights.adapter or is_adapter_tensor(name)}

    def _first_tensors(self) -> dict[str, torch.Tensor]:
        """The weights that a run begins with, in memory of their own."""
        policy = load_policy(self.config.model, torch.device("cpu"), self.config.run.seed)
        return {name: tensor.detach() for name, tensor in model_tensors(policy).items()}

    def _empty_tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.empty_like(view, device="cpu") for name, view in self.weights.views.items()}

    def save(self, name: str, version: int) -> Saved:
        """Writes the committed policy; nothing is left under this name if that fails."""
        self.role_state.require("SavePolicy")
        if version != self.weights.version:
            found = self.weights.version
            raise LeaseFailed("stale", f"policy version {version} is to be saved, the trainer committed {found}")
        target = self.checkpoints / name
        return Saved(path=str(target), nbytes=save_policy(self.policy, self.source, target))

    def apply_weights(self, manifest: Manifest) -> Receipt:
        raise LeaseFailed("error", "the trainer writes the policy's weights; it does not apply them")

    def cache_counts(self) -> tuple[int, int]:
        return take_counts(self.cache)

    def close(self) -> None:
        self.role_state.close()
        self.cache.close()
