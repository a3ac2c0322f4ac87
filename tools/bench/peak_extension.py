"""A worker extension that measures what a benchmark of weights asks for in the engine's process."""

from __future__ import annotations

import torch

from services.rollout.engines.vllm.worker import WorkerExtension

PEAK = f"{__name__}.PeakExtension"


class PeakExtension(WorkerExtension):
    """Adds the peak of this process's GPU memory."""

    def quartet_bench_peak(self) -> int:
        """Bytes by which this process's GPU allocations exceeded what it holds now, since the last call; 0 on CPU."""
        if not torch.cuda.is_available():
            return 0
        extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return extra
