"""Building a model for memory that is there already: no second copy of its weights is ever allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class EmptyOnMeta(TorchFunctionMode):
    """Allocates no memory for what is only allocated: weights are. What is computed, such as rotary tables, is kept.

    Otherwise placeholders of the whole model would be allocated beside the shared weights, in an engine even in the
    pool that its sleep mode keeps for itself.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def replace_parameters(model: nn.Module, tensors: Mapping[int, torch.Tensor]) -> None:
    """Puts tensors in the place of parameters, given by their ids; tied ones stay one object, frozen ones frozen."""
    parameters = {
        id(parameter): nn.Parameter(tensors[id(parameter)], requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
        if id(parameter) in tensors
    }
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in parameters:
                setattr(module, name, parameters[id(parameter)])
