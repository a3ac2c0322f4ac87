"""A process with an engine of its own, as the rollout service is one: ``vllm_driver.py FOLDER``.

Its engine is built on a manifest in which two norms have each other's offset. Writes ``outcome.json``: the manifest
that was committed, its proof, and the engine's receipt and facts. Then it waits for the end of its standard input.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from common.config_loading import load_config
from common.messages import Manifest, Proof, Receipt
from common.model import canary_ids, canary_logprobs, load_causal_lm
from common.models import resolve_model
from common.records import write_whole
from common.weights.writer import WeightWriter
from services.rollout.engines.vllm.engine import EnginePlace, VLLMEngine
from services.rollout.engines.vllm.loader import LoadOrder
from services.rollout.engines.vllm.worker import EngineFacts

OUTCOME = "outcome.json"
EXCHANGED = ("model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight")


class Outcome(msgspec.Struct):
    """What the driver writes."""

    manifest: Manifest
    proof: Proof
    receipt: Receipt
    facts: EngineFacts


def exchanged(manifest: Manifest) -> Manifest:
    """The manifest with the offsets of two tensors of one shape exchanged."""
    first, second = (next(entry for entry in manifest.tensors if entry.name == name) for name in EXCHANGED)
    offsets = {first.name: second.offset, second.name: first.offset}
    tensors = tuple(
        msgspec.structs.replace(entry, offset=offsets.get(entry.name, entry.offset)) for entry in manifest.tensors
    )
    return msgspec.structs.replace(manifest, tensors=tensors)


def main(folder: Path) -> None:
    config = load_config("tiny", ["rollout.engine=vllm", "rollout.device=cpu", "rollout.rows=4"])
    source, cpu = resolve_model(config.model.path), torch.device("cpu")
    model = load_causal_lm(config.model, cpu)
    with torch.no_grad():  # norms of equal values could not be told apart by what is computed with them
        for name in EXCHANGED:
            model.get_parameter(name).copy_(model.get_parameter(EXCHANGED[0]))
    writer = WeightWriter(folder / "policy", "policy", model, version=0)
    canary = canary_ids(model.config.vocab_size)
    manifest = writer.commit(0, canary)
    order = LoadOrder(exchanged(manifest), None, "alias", 1)
    engine = VLLMEngine(config, frozenset({2}), EnginePlace(source, cpu, folder / "engine.log", False), order)
    outcome = Outcome(
        manifest, writer.prove(canary_logprobs(model, canary)), engine.apply_weights(manifest), engine.facts
    )
    write_whole(folder / OUTCOME, msgspec.json.encode(outcome))
    sys.stdin.read()
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
