"""The weight exchange of a service under test that has no shared weights to ask for."""

from __future__ import annotations

from common.messages import WeightsGranted


class NoWeights:
    """Implements ``common.service.WeightExchange``."""

    def want(self, name: str, gpu: str, nbytes: int = 0) -> WeightsGranted:
        raise AssertionError(f"this service has no business with the memory of weight set {name!r}")
