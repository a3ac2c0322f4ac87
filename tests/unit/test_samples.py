"""A set of samples gets its slots, in a real token cache, and the journal has their places."""

from __future__ import annotations

from pathlib import Path

from msgspec import Raw

from common.config import Config
from common.config_loading import to_json
from common.token_cache import TokenCache, prompt_key
from services.coordinator.journal import Journal
from services.coordinator.ledger import Ledger
from services.coordinator.prompts import Prompt
from services.coordinator.row import Row
from services.coordinator.sample import move_samples, open_samples
from tests.unit.model_support import token_cache


def prompts(cache: TokenCache, number: int) -> list[Prompt]:
    found: list[Prompt] = []
    for index in range(number):
        key = prompt_key(f"prompt {index}", "", "tok")
        cache.put_prompt(key, [3, 4 + index])
        row = Row(prompt="", ground_truth=Raw(b"null"), metadata=Raw(b"null"), source="", origin=f"rows.jsonl:{index}")
        found.append(Prompt(index=index, text="", key=key, length=2, ids=None, row=row))
    return found


def test_indices_go_on_from_the_first_and_places_begin_in_every_wave(tmp_path: Path) -> None:
    """An evaluation comes in waves; a cache that says another index than the lease has two samples with one number."""
    journal = Journal(Ledger(tmp_path / "ledger.sqlite", to_json(Config()), 1))
    with token_cache() as cache:
        samples = open_samples(cache, journal, prompts(cache, 2), 2, step=0, wave=2, first=4)
        assert [(sample.index, sample.group, sample.place) for sample in samples] == [
            (4, 2, 0), (5, 2, 1), (6, 3, 2), (7, 3, 3),
        ]  # fmt: skip
        assert [sample.prompt.index for sample in samples] == [0, 0, 1, 1]
        assert [cache.scalars(sample.ref).sample for sample in samples] == [4, 5, 6, 7]
        assert [entry.ref for entry in journal.recall(0, 2)] == [sample.ref for sample in samples]
    journal.ledger.close()


def test_a_moved_sample_keeps_its_number_and_its_place(tmp_path: Path) -> None:
    journal = Journal(Ledger(tmp_path / "ledger.sqlite", to_json(Config()), 1))
    with token_cache() as cache:
        samples = open_samples(cache, journal, prompts(cache, 3), 1, step=1)
        before = [sample.ref for sample in samples]
        move_samples(cache, journal, samples[1:], 1)
        assert samples[0].ref == before[0]
        assert not {sample.ref for sample in samples[1:]} & set(before)
        assert [cache.scalars(sample.ref).sample for sample in samples] == [0, 1, 2]
        assert [entry.ref for entry in journal.recall(1, 0)] == [sample.ref for sample in samples]
    journal.ledger.close()
