"""Engine ``torch``: batched sampling with a KV cache on any Hugging Face causal LM. Right and deterministic, then fast.

The last bits of a matrix product depend on its shape and on the row, so both are fixed (design, section 6): sample s is
decoded in row s modulo R for all its life, rows without a sample carry dummies, the KV capacity never changes, and a
prompt is prefilled in row s modulo P of a batch whose width depends on that prompt alone. What a sample becomes is then
a function of (weights, prompt, seed, step, sample), whatever else is generated beside it. A finished row is refilled at
once.

    prompt[:-1] --prefill [P, bucket]--> row's KV;   prompt[-1], then each drawn token --decode [R, 1]--> next token
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.adapter import inner_model, load_policy
from common.config import Config
from common.messages import FinishReason, Manifest, Receipt, Sampling, Slept
from common.model import canary_logprobs, pick_device, release_cached
from common.weights.memory import WeightMemory, map_set
from common.weights.reader import WeightReader, attach_model, used_bytes
from services.rollout.engines.interface import EngineError, Request, Response
from services.rollout.engines.row_cache import PromptCache, RowCache
from services.rollout.engines.sampling import draw, sample_uniforms

BUCKET = 8
"""Prompts are prefilled in widths that are multiples of this."""


def bucket_width(prompt_length: int) -> int:
    """Width of the prefill of a prompt whose last token is left to the first decode step."""
    return -(-(prompt_length - 1) // BUCKET) * BUCKET


class _Row:
    """What a row has drawn so far for its sample."""

    def __init__(self, request: Request, uniforms: npt.NDArray[np.float64]) -> None:
        self.request = request
        self.uniforms = uniforms
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    def finished(self, reason: FinishReason) -> Response:
        return Response(self.request.index, np.array(self.ids, np.int32), np.array(self.logprobs, np.float32), reason)


class TorchEngine:
    """See the module's docstring. One instance a process; not thread-safe."""

    def __init__(
        self, config: Config, eos_ids: frozenset[int], pad_id: int,
        open_memory: Callable[[Manifest], WeightMemory] = lambda manifest: map_set(manifest, None),
    ) -> None:  # fmt: skip
        self.device = pick_device(config.rollout.device)
        self.open_memory = open_memory
        self.weights = config.weights
        self.model: Any = inner_model(load_policy(config.model, self.device, config.run.seed)).requires_grad_(False)
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.rows = config.rollout.rows
        self.prefill_rows = config.rollout.prefill_rows
        self.longest_prompt = config.prompts.max_tokens
        self.longest = self.longest_prompt + config.rollout.max_new_tokens
        self.capacity = max(bucket_width(self.longest_prompt), self.longest_prompt) + config.rollout.max_new_tokens
        arguments = inspect.signature(self.model.forward).parameters
        self.cache_argument = "past_key_values" if "past_key_values" in arguments else "cache"
        self._require_positions(self.cache_argument in arguments and "position_ids" in arguments)
        self._require_full_attention()
        self.layers: int = self.model.config.get_text_config().num_hidden_layers
        self.cache = RowCache(self.layers, self.rows, self.capacity, self.device)
        self.slots = torch.arange(self.capacity, device=self.device)
        self.tokens = torch.full((self.rows, 1), self.pad_id, dtype=torch.int64, device=self.device)
        self.reader: WeightReader | None = None
        self.decode_steps = 0  # forward passes, each of one token in every row

    def _require_positions(self, by_arguments: bool) -> None:
        """The engine says which position each row is at; a model that counts for itself would count padding too."""
        text: Any = self.model.config.get_text_config()
        if not by_arguments or getattr(text, "alibi", False):
            raise EngineError(
                f"engine torch needs a model that takes position_ids and a KV cache; {text.model_type} does not"
            )
        room = getattr(text, "max_position_embeddings", None) or self.longest
        if room < self.longest:
            raise EngineError(
                f"prompts.max_tokens + rollout.max_new_tokens = {self.longest}, but {text.model_type} in model.path "
                f"has only {room} positions: lower one of the two"
            )

    def _require_full_attention(self) -> None:
        text: Any = self.model.config.get_text_config()
        # Mistral's family has no layer_types: a window alone makes all its layers sliding.
        window = getattr(text, "sliding_window", None)
        kinds = set(getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
        window = window or self.capacity
        if kinds - {"full_attention", "sliding_attention"} or ("sliding_attention" in kinds and window < self.capacity):
            raise EngineError(
                f"engine torch keeps {self.capacity} positions of full attention, but {text.model_type} has layers "
                f"{sorted(kinds)} with window {window}: lower prompts.max_tokens and rollout.max_new_tokens, "
                "or use another engine"
            )

    # ------------------------------------------------------------ weights

    def apply_weights(self, manifest: Manifest) -> Receipt:
        if self.reader is None or self.reader.identity != manifest.identity:  # a trainer's new memory
            memory = self.open_memory(manifest)
            self.reader = attach_model(
                self.model, manifest, memory, self.weights.transport, self.weights.bucket_mib
            )  # fmt: skip
            release_cached(self.device)  # the weights that the model was loaded with
        applied = self.reader.apply(manifest)
        return self.reader.receipt(manifest, applied, canary_logprobs(self.model, manifest.canary_ids))

    def sleep(self) -> Slept:
        before = used_bytes(self.device)
        self.cache.release()
        release_cached(self.device)
        return Slept(used_before_bytes=before, used_after_bytes=used_bytes(self.device))

    def close(self) -> None:
        self.reader = None

    # ------------------------------------------------------------ generation

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: Sampling, step: int) -> Generator[list[Response]]:
        waiting: list[deque[Request]] = [deque() for _ in range(self.rows)]
        for request in requests:
            self._require_fits(request, sampling)
            waiting[request.sample % self.rows].append(request)
        active: dict[int, _Row] = {}
        while active or any(waiting):
            self._refill(active, waiting, sampling, step)
            ids, logprobs = self._decode(active, sampling)
            finished = self._take(active, ids, logprobs, sampling)
            if finished:
                yield finished

    def _require_fits(self, request: Request, sampling: Sampling) -> None:
        length = len(request.prompt_ids)
        if not 0 < length <= self.longest_prompt or length + sampling.max_new_tokens > self.longest:
            raise EngineError(
                f"sample {request.sample}: a prompt of {length} tokens and {sampling.max_new_tokens} new ones do not "
                f"fit: engine torch was built for prompts of 1 to {self.longest_prompt} tokens, "
                f"{self.longest} with the response"
            )

    def _refill(self, active: dict[int, _Row], waiting: list[deque[Request]], sampling: Sampling, step: int) -> None:
        """Gives every free row its next sample and prefills the new ones."""
        batches: dict[int, list[dict[int, int]]] = {}
        for row in range(self.rows):
            if row in active or not waiting[row]:
                continue
            request = waiting[row].popleft()
            active[row] = _Row(request, sample_uniforms(sampling.seed, step, request.sample, sampling.max_new_tokens))
            self.tokens[row] = int(request.prompt_ids[-1])
            self.cache.positions[row] = len(request.prompt_ids) - 1
            width = bucket_width(len(request.prompt_ids))
            if width:
                self._place(batches.setdefault(width, []), request.sample % self.prefill_rows, row)
        for width, groups in batches.items():
            for members in groups:
                self._prefill(width, {member: (row, active[row].request.prompt_ids) for member, row in members.items()})

    @staticmethod
    def _place(groups: list[dict[int, int]], member: int, row: int) -> None:
        """Puts a row into the first prefill batch whose place ``member`` is free."""
        for group in groups:
            if member not in group:
                group[member] = row
                return
        groups.append({member: row})

    def _prefill(self, width: int, members: dict[int, tuple[int, npt.NDArray[np.int32]]]) -> None:
        ids = torch.full((self.prefill_rows, width), self.pad_id, dtype=torch.int64)
        for member, (_, prompt) in members.items():
            ids[member, : len(prompt) - 1] = torch.from_numpy(prompt[:-1].astype(np.int64))
        # Padding at the end may reach past the last position that the model has.
        positions = (
            torch.arange(width, device=self.device).clamp_(max=self.longest - 1).expand(self.prefill_rows, width)
        )
        causal = self._additive(torch.ones(width, width, dtype=torch.bool, device=self.device).tril())
        prompts = PromptCache(self.layers)
        self.model(
            input_ids=ids.to(self.device), position_ids=positions, use_cache=True, logits_to_keep=1,
            attention_mask=causal.expand(self.prefill_rows, 1, width, width), **{self.cache_argument: prompts},
        )  # fmt: skip
        places = torch.tensor(list(members), device=self.device)
        rows = torch.tensor([row for row, _ in members.values()], device=self.device)
        self.cache.fill(rows, prompts, places)

    def _decode(self, active: dict[int, _Row], sampling: Sampling) -> tuple[list[int], list[float]]:
        """One token for every row, dummies included."""
        uniforms = np.zeros(self.rows)
        for row, state in active.items():
            uniforms[row] = state.uniforms[len(state.ids)]
        positions = self.cache.positions
        visible = self._additive(self.slots <= positions.unsqueeze(1)).view(self.rows, 1, 1, self.capacity)
        logits = self.model(
            input_ids=self.tokens, position_ids=positions.unsqueeze(1), use_cache=True, attention_mask=visible,
            **{self.cache_argument: self.cache},
        ).logits[:, -1]  # fmt: skip
        ids, logprobs = draw(logits, torch.from_numpy(uniforms).to(self.device), sampling)
        self.tokens[:, 0] = ids
        positions += 1
        positions.clamp_(max=self.longest - 1)  # of the dummies
        self.decode_steps += 1
        return ids.tolist(), logprobs.tolist()

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        """The mask as what is added to attention scores: a boolean one means something else to eager attention."""
        return torch.zeros_like(visible, dtype=self.model.dtype).masked_fill_(
            ~visible, torch.finfo(self.model.dtype).min
        )

    def _take(
        self, active: dict[int, _Row], ids: list[int], logprobs: list[float], sampling: Sampling
    ) -> list[Response]:
        """Appends each row's token; ends rows at the end token or at the length limit and turns them into dummies."""
        finished: list[Response] = []
        for row in sorted(active):
            state = active[row]
            state.ids.append(ids[row])
            state.logprobs.append(logprobs[row])
            if ids[row] in self.eos_ids:
                finished.append(active.pop(row).finished("stop"))
            elif len(state.ids) == sampling.max_new_tokens:
                finished.append(active.pop(row).finished("length"))
            else:
                continue
            self.tokens[row] = self.pad_id
            self.cache.positions[row] = 0
        return finished
