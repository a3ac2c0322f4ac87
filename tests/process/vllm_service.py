"""The rollout service itself, in the test's process, on a real engine and a real token cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.messages import FinishedSample, Generate, GenerateItem, Lease, Manifest, Proof, SlotRef
from common.run_files import SharedDirectory
from common.service import Assignment
from common.token_cache import COLUMNS, Geometry, TokenCache, prompt_key
from common.tokenizer import load_tokenizer
from services.rollout.service import RolloutService
from tests.no_weights import NoWeights
from tests.process.vllm_support import EnginePair, prompts, sampled


class Sink:
    """An outbox that keeps what is handed on, and calls ``then`` each time."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.finished: list[FinishedSample] = []
        self.then = then

    def samples_finished(self, work: int, samples: list[FinishedSample]) -> None:
        self.finished += samples
        self.then()

    def update_begun(self, version: int) -> None:
        raise AssertionError("no rollout's business")

    def update_committed(self, work: int, manifest: Manifest) -> None:
        raise AssertionError("no rollout's business")

    def state_saved(self, step: int, nbytes: int, seconds: float, error: str = "", digest: str = "") -> None:
        raise AssertionError("an engine has no state")

    def weights_proved(self, proof: Proof) -> None:
        raise AssertionError("no rollout's business")


class Served:
    """The rollout service itself on a real engine and a real token cache with the prompts of ``count`` samples."""

    def __init__(self, pair: EnginePair, folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def given(*_: Any) -> Any:
            return pair.engine

        monkeypatch.setattr("services.rollout.service.build_engine", given)
        fingerprint = load_tokenizer(pair.engine.place.source).fingerprint
        geometry = Geometry(slots=count, max_prompt_tokens=80, max_response_tokens=8, prompts=count)
        self.cache = TokenCache.create(
            folder / "tokens", run="demo", fingerprint=fingerprint, geometry=geometry, writes=frozenset(COLUMNS)
        )
        self.requests = prompts(count)
        self.refs: list[SlotRef] = []
        for request in self.requests:
            key = prompt_key(str(request.index), "", fingerprint)
            self.cache.put_prompt(key, request.prompt_ids)
            self.refs.append(self.cache.allocate(key))
        self.service = RolloutService(
            Assignment("demo", "rollout", 0, pair.config, SharedDirectory(folder), str(folder / "tokens"), str(folder),
                       NoWeights())
        )  # fmt: skip

    def lease(self, version: int) -> Lease:
        items = [
            GenerateItem(ref=ref, sample=request.sample) for ref, request in zip(self.refs, self.requests, strict=True)
        ]
        task = Generate(items=items, sampling=sampled(), version=version)
        return Lease(epoch=1, work=1, step=1, phase="GENERATE", task=task, deadline_s=60.0)

    def close(self) -> None:
        self.service.cache.close()  # the engine is the module's
        self.cache.close()
