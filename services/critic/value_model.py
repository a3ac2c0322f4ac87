"""The value model: a causal transformer with a scalar head in place of its language-model head."""

from __future__ import annotations

import torch
from torch import nn

from common.batch import Batch, response_states
from common.config import ModelConfig
from common.model import load_backbone


class ValueModel(nn.Module):
    """Values of the states before each response token, and of the state after the last one.

    The head starts at zero: the first advantages are then the discounted rewards themselves, not noise.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.backbone = load_backbone(config, device)
        hidden: int = self.backbone.config.get_text_config().hidden_size
        self.head = nn.Linear(hidden, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values [B, T] and bootstrap values [B], float32; a row's bootstrap value is after its last token."""
        states = response_states(self.backbone, batch)
        values = self.head(states.float()).squeeze(-1)
        return values[:, :-1], values.gather(1, batch.lengths.unsqueeze(1)).squeeze(1)
