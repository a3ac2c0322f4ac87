"""Carrying out one order of the coordinator: whatever the service does, there is exactly one answer."""

from __future__ import annotations

import logging
import resource
import time

from common.messages import ApplyWeights, Done, Failed, Lease, Message, WeightsApplied
from common.service import LeaseFailed, Outbox, ReplicaError, Service

log = logging.getLogger("replica")

Order = Lease | ApplyWeights


def carry_out(service: Service, order: Order, outbox: Outbox) -> Message:
    """Worker thread: computes; every exception becomes a Failed that names it. The answer's epoch is the order's.

    Raises ReplicaError where the service itself is gone, such as an engine whose process has died.
    """
    epoch, work, started = order.epoch, order.work, time.monotonic()
    try:
        if isinstance(order, ApplyWeights):
            receipt = service.apply_weights(order.manifest)
            return WeightsApplied(epoch=epoch, work=work, version=order.manifest.version, receipt=receipt)
        result = service.handle(order, outbox)
        hits, misses = service.cache_counts()
    except ReplicaError:
        raise  # the service is of no more use, so this replica ends
    except LeaseFailed as error:
        log.error("work %d failed (%s): %s", work, error.kind, error)
        return Failed(epoch=epoch, work=work, kind=error.kind, message=str(error))
    except Exception as error:
        log.exception("work %d failed", work)
        return Failed(epoch=epoch, work=work, kind="error", message=f"{type(error).__name__}: {error}")
    return Done(
        epoch=epoch, work=work, result=result, started=started, ended=time.monotonic(), cache_hits=hits,
        cache_misses=misses, memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )  # fmt: skip
