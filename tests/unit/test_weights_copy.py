"""Transport ``copy``: in buckets, whole versions only, and never a view of the writer's memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.messages import TensorEntry
from common.weights.header import WeightsError
from common.weights.layout import model_tensors
from common.weights.memory import WeightMemory, map_set
from common.weights.reader import MIB, WeightReader, buckets
from common.weights.receipts import OWN_COPY
from tests.unit.weights_support import Pair

LARGE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1200}
"""Sizes of a model with tensors of more than a bucket of 1 MiB, and others of a few bytes."""


def test_engine_keeps_its_own_tensors_and_gets_every_version(path: Path) -> None:
    pair = Pair(path, transport="copy")
    own = {name: tensor.data_ptr() for name, tensor in model_tensors(pair.other).items()}
    assert pair.problem() == ""
    manifest = pair.step(1)
    assert all(torch.equal(tensor, pair.values[name]) for name, tensor in model_tensors(pair.other).items()), (
        "an update must not be seen before it is applied"
    )
    receipt = pair.receipt(manifest)
    assert pair.problem(manifest) == ""
    assert receipt.copied_bytes == sum(tensor.nbytes for tensor in pair.values.values())
    assert (receipt.transport, set(receipt.offsets)) == ("copy", {OWN_COPY})
    for name, tensor in model_tensors(pair.other).items():
        assert torch.equal(tensor, model_tensors(pair.model)[name]), name
        assert tensor.data_ptr() == own[name], f"{name} is another tensor than the one that the engine was built with"


def test_an_engine_that_missed_an_update_is_told(path: Path) -> None:
    pair = Pair(path, transport="copy")
    applied = pair.reader.apply(pair.manifest)
    manifest = pair.step(1)
    stale = pair.reader.receipt(manifest, applied, pair.proof.canary_logprobs)
    assert stale.checksums != pair.proof.checksums
    assert all(a != b for a, b in zip(stale.checksums, pair.proof.checksums, strict=True)), "every tensor was updated"


def test_a_corrupted_copy_is_told(path: Path) -> None:
    pair = Pair(path, transport="copy")
    applied = pair.reader.apply(pair.manifest)
    pair.other.model.layers[1].self_attn.k_proj.weight.data[3, 4] += 1e-6
    receipt = pair.reader.receipt(pair.manifest, applied, ())
    wrong = [
        entry.name
        for entry, found, expected in zip(pair.manifest.tensors, receipt.checksums, pair.proof.checksums, strict=True)
        if found != expected
    ]
    assert wrong == ["model.layers.1.self_attn.k_proj.weight"]
    assert pair.problem() == "", "applied anew, it is right again"


def test_a_bucket_may_be_smaller_than_a_tensor(path: Path) -> None:
    pair = Pair(path, transport="copy", **LARGE)
    sizes = [tensor.nbytes for tensor in pair.values.values()]
    assert pair.reader.bucket_bytes == MIB
    assert max(sizes) > MIB > min(sizes), "nothing is tested"
    assert pair.problem() == ""
    assert pair.problem(pair.step(1)) == ""


class BegunInTheMiddle(WeightMemory):
    """Memory whose writer begins an update while a reader copies: just before the first tensor of the last bucket."""

    def __init__(self, pair: Pair, moment: str) -> None:
        memory = map_set(pair.manifest, None)
        super().__init__(memory.buffer, memory.identity, memory.gpu)
        self.pair = pair
        self.moment = moment

    def view(self, entry: TensorEntry) -> torch.Tensor:
        if entry.name == self.moment:
            self.moment = ""
            with torch.enable_grad():
                self.pair.write(1)
        return super().view(entry)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_writer_that_begins_in_the_middle_of_a_copy_is_noticed(path: Path, place: int) -> None:
    pair = Pair(path, transport="copy", **LARGE)
    tensors = model_tensors(pair.other)
    in_buckets = list(buckets([(entry, tensors[entry.name]) for entry in pair.manifest.tensors], MIB))
    assert len(in_buckets) > 3, "nothing is tested"
    memory = BegunInTheMiddle(pair, in_buckets[place][0][0].name)
    reader = WeightReader(pair.manifest, memory, tensors, "copy", bucket_mib=1)
    with pytest.raises(WeightsError, match=r"WRITING\(1\), expected CLEAN\(0\)"):
        reader.apply(pair.manifest)
    later = [] if place == -1 else in_buckets[place + 1 :]
    assert all(not tensor.any() for bucket in later for _, tensor in bucket), "it went on after the writer had begun"
    with pytest.raises(WeightsError, match=r"WRITING\(1\), expected CLEAN\(0\)"):
        reader.apply(pair.manifest)
    manifest = pair.writer.commit(1)
    assert reader.receipt(manifest, reader.apply(manifest), ()).checksums == pair.writer.prove().checksums


def entries(sizes: list[int]) -> list[tuple[TensorEntry, torch.Tensor]]:
    tensor = torch.empty(0)
    return [(TensorEntry(name=str(i), dtype="uint8", shape=(n,), offset=0), tensor) for i, n in enumerate(sizes)]


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 50))
def test_buckets_hold_everything_once_in_order_and_as_much_as_fits(sizes: list[int], limit: int) -> None:
    pairs = entries(sizes)
    found = list(buckets(pairs, limit))
    assert [pair for bucket in found for pair in bucket] == pairs
    totals = [[entry.shape[0] for entry, _ in bucket] for bucket in found]
    assert all(sum(total) <= limit or len(total) == 1 for total in totals)
    assert all(sum(before) + after[0] > limit for before, after in pairwise(totals)), "a bucket had room left"
