"""A trainer's and an engine's side of one weight set."""

from __future__ import annotations

from pathlib import Path

import torch

from common.messages import Manifest
from common.weights.shared import WeightReader, WeightWriter, model_parameters
from tests.unit.model_support import random_model


class Pair:
    """A trainer's model and an engine's model of the same architecture, with different values until they share."""

    def __init__(self, path: Path, family: str = "llama") -> None:
        self.model = random_model(family)
        self.other = random_model(family)
        with torch.no_grad():
            for parameter in self.other.parameters():
                parameter.zero_()
        self.values = {name: tensor.detach().clone() for name, tensor in model_parameters(self.model).items()}
        self.writer = WeightWriter(path, "policy", self.model, version=0)
        self.manifest = self.writer.commit(0)
        self.reader = WeightReader(self.other, self.manifest)

    def digest(self, manifest: Manifest | None = None) -> str:
        return self.reader.apply(manifest or self.manifest)[0]

    def step(self, version: int) -> Manifest:
        """One optimizer step by the writer."""
        self.writer.begin(version)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.model(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits.square().mean().backward()
        optimizer.step()
        return self.writer.commit(version)
