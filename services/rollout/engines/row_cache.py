"""Key and value memory of the ``torch`` engine: a fixed row for each sample, of fixed capacity."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class RowLayer(CacheLayerMixin):
    """One layer's memory, [rows, heads, capacity, head size]; each row is written at its own position.

    The whole capacity is always returned and the engine masks what a row has not written, so that the shape of the
    attention never depends on what else is in the batch.
    """

    is_sliding = False

    def __init__(self, rows: int, capacity: int, positions: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.capacity = capacity
        self.positions = positions
        self.row_index = torch.arange(rows, device=positions.device)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_zeros(self.rows, key_states.shape[1], self.capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(self.rows, value_states.shape[1], self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys[self.row_index, :, self.positions] = key_states[:, :, 0]
        self.values[self.row_index, :, self.positions] = value_states[:, :, 0]
        return self.keys, self.values

    def fill(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes prompts' keys and values [n, heads, length, head size] at the start of the given rows [n]."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self.keys is not None
        assert self.values is not None
        self.keys[rows, :, : keys.shape[2]] = keys
        self.values[rows, :, : values.shape[2]] = values

    def release(self) -> None:
        """Gives the memory back; the next write takes it again."""
        self.keys = self.values = None
        self.is_initialized = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.capacity

    def get_max_cache_shape(self) -> int:
        return self.capacity


class PromptLayer(CacheLayerMixin):
    """Holds the keys and values of one prefill, as they come."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class RowCache(Cache):
    """All layers' rows. ``positions`` [rows] int64 is where each row writes next; the engine moves it on."""

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device) -> None:
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.row_layers = [RowLayer(rows, capacity, self.positions) for _ in range(layers)]
        super().__init__(layers=list(self.row_layers))

    def fill(self, rows: torch.Tensor, prompts: PromptCache, members: torch.Tensor) -> None:
        """Copies members [n] of a prefill batch into rows [n]."""
        for row_layer, prompt_layer in zip(self.row_layers, prompts.prompt_layers, strict=True):
            assert prompt_layer.keys is not None
            assert prompt_layer.values is not None
            row_layer.fill(rows, prompt_layer.keys[members], prompt_layer.values[members])

    def release(self) -> None:
        for layer in self.row_layers:
            layer.release()


class PromptCache(Cache):
    """Keys and values of one prefill batch."""

    def __init__(self, layers: int) -> None:
        self.prompt_layers = [PromptLayer() for _ in range(layers)]
        super().__init__(layers=list(self.prompt_layers))
