"""``quartet bench``: each entry names the function that measures, ``() -> dict[str, float]``, figures by name.

Names end in their unit: ``_ms``, ``_us``, ``_gib``, ``_tok_s``, ``_per_s``, ``_ratio``.
"""

from __future__ import annotations

BENCHES: dict[str, str] = {
    "imports": "tools.bench.imports:figures",
    "bus": "tools.bench.bus:figures",
    "token-cache": "tools.bench.token_cache:figures",
    "weights": "tools.bench.weights:figures",
    "copy": "tools.bench.weights:copy_figures",
    "peer-copy": "tools.bench.weights:peer_copy_figures",
    "rollout": "tools.bench.rollout:figures",
    "checkpoint": "tools.bench.checkpoint:figures",
    "step": "tools.bench.step:figures",
}
