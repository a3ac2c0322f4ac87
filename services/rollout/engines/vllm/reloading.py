"""``copy`` for models whose layout in vLLM is not known: through vLLM's own ``load_weights``, tensor by tensor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from common.messages import Manifest, Receipt, TensorEntry
from common.weights.checksum import tensor_checksums
from common.weights.header import require_clean
from common.weights.layout import dtype_name
from common.weights.memory import WeightMemory
from common.weights.reader import Applied, WeightReader, buckets, synchronize, used_bytes


class ReloadingReader(WeightReader):
    """Loads the set anew at each version.

    What vLLM made of a tensor cannot be told apart here, so only tensors that the engine has under the same name, dtype
    and shape are checked by checksum; the others are proved by the canary alone, and the receipt counts them.
    """

    def __init__(self, manifest: Manifest, memory: WeightMemory, model: Any, bucket_mib: int) -> None:
        placeholders = {entry.name: torch.empty(0) for entry in manifest.tensors}
        super().__init__(manifest, memory, placeholders, "copy", bucket_mib)
        self.model = model
        self.device = next(model.parameters()).device
        modules = dict(model.named_modules())
        paths = {entry: entry.name.rpartition(".") for entry in manifest.tensors}
        self.places = {entry: (modules[path[0]], path[2]) for entry, path in paths.items() if path[0] in modules}

    def prepare(self, manifest: Manifest) -> None:
        """vLLM rearranges what was loaded once, when the model is built; ``apply`` then loads into that form."""
        self._load(manifest, lambda: None)

    def apply(self, manifest: Manifest) -> Applied:
        require_clean(self.path, manifest.version)
        self._load(manifest, lambda: require_clean(self.path, manifest.version))
        return Applied(manifest.nbytes, time.monotonic())

    @torch.no_grad()
    def _load(self, manifest: Manifest, check: Callable[[], None]) -> None:
        for bucket in buckets([(entry, self.memory.buffer) for entry in manifest.tensors], self.bucket_bytes):
            self.model.load_weights((entry.name, self._value(entry)) for entry, _ in bucket)
            synchronize(self.device)
            check()

    def _value(self, entry: TensorEntry) -> torch.Tensor:
        """From another GPU by way of the host: that one may not write into vLLM's pool (``common.weights.staging``)."""
        view = self.memory.view(entry)
        return view if view.device == self.device else view.cpu()

    def checked(self) -> dict[str, torch.Tensor]:
        """By name, what the model has now: vLLM may have put other parameters in the places of those loaded first."""
        found = {entry: getattr(module, attribute, None) for entry, (module, attribute) in self.places.items()}
        return {entry.name: held for entry, held in found.items() if held is not None and same_form(held, entry)}

    def receipt(
        self, manifest: Manifest, applied: Applied, canary_logprobs: Sequence[float], stale_tokens: int = 0
    ) -> Receipt:
        synchronize(self.device)
        checked = self.checked()
        sums = dict(zip(checked, tensor_checksums(list(checked.values())), strict=True))
        require_clean(self.path, manifest.version)
        return Receipt(
            transport="copy", identity=self.identity, offsets=(-1,) * len(manifest.tensors),
            checksums=tuple(sums.get(entry.name, 0) for entry in manifest.tensors),
            unchecked=tuple(i for i, entry in enumerate(manifest.tensors) if entry.name not in sums),
            canary_logprobs=tuple(canary_logprobs), stale_tokens=stale_tokens, copied_bytes=applied.copied_bytes,
            held=applied.held, device_used_bytes=used_bytes(self.device),
        )  # fmt: skip


def same_form(held: torch.Tensor, entry: TensorEntry) -> bool:
    """Whether an engine's tensor may be the set's as it is; a square matrix may have been transposed."""
    same = tuple(held.shape) == entry.shape and dtype_name(held.dtype) == entry.dtype
    return same and len(set(entry.shape)) == len(entry.shape)
