"""What the token cache costs: reads of another process' prompts, puts, batches of views, and slots."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import numpy as np

from common.messages import SlotRef
from common.token_cache import Geometry, TokenCache, prompt_key

_TOKENS = 1024
_PROMPTS = 1024
_SLOTS = 256
_ROUNDS = 7
_DEADLINE_S = 60.0
_NAME = "bench"
_GEOMETRY = Geometry(_SLOTS, max_prompt_tokens=_TOKENS, max_response_tokens=_TOKENS, prompts=_PROMPTS)
_KEYS = [prompt_key(str(number), "", _NAME) for number in range(_PROMPTS)]


def figures() -> dict[str, float]:
    """Medians on this machine, one thread, 1,024 tokens a prompt and a response; names end in their unit.

    ``get_1024_us``, ``get_1024_p99_us``: one ``get_prompt`` of a prompt that another process put. ``put_1024_us``: one
    ``put_prompt`` of int32 ids, evicting another. ``views_256x1024_us``, ``rows_256x1024_us``,
    ``gather_256x1024_us``: the response ids of 256 slots that another process leased, as 256 views, as one view of
    neighbouring slots, and as a copy from slots in reverse order. ``allocate_free_256_ms``: 256 slots leased and freed,
    their memory included.
    """
    with TemporaryDirectory(dir="/dev/shm", prefix="quartet-bench-") as directory:
        path = Path(directory, "tokens")
        command = [sys.executable, "-m", __name__, str(path)]
        root = Path(__file__).resolve().parents[2]
        with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as putter:
            try:
                assert putter.stdout is not None
                ready, _, _ = select.select([putter.stdout], [], [], _DEADLINE_S)
                if not ready or putter.stdout.readline() != b"ready\n":
                    raise RuntimeError(f"{path}: the putting process was not ready within {_DEADLINE_S:.0f} s")
                with TokenCache.attach(path, run=_NAME, fingerprint=_NAME) as cache:
                    read = _reads(cache)
            finally:
                putter.kill()
        with TokenCache.create(Path(directory, "own"), run=_NAME, fingerprint=_NAME, geometry=_GEOMETRY) as cache:
            return read | _writes(cache)


def _reads(cache: TokenCache) -> dict[str, float]:
    gets: list[float] = []
    for _ in range(_ROUNDS):
        for key in _KEYS:
            start = time.perf_counter_ns()
            ids = cache.get_prompt(key)
            gets.append((time.perf_counter_ns() - start) / 1e3)
            if ids is None or len(ids) != _TOKENS:
                raise RuntimeError(f"{cache.path}: prompt {key.hex()} was put but not found")
    # The putter leased every slot of a fresh cache: generation 1.
    refs = [SlotRef(slot, 1) for slot in range(_SLOTS)]
    turned = refs[::-1]
    return {
        "get_1024_us": median(gets),
        "get_1024_p99_us": quantiles(gets, n=100)[98],
        "views_256x1024_us": _median_us(lambda: cache.views("response_ids", refs)),
        "rows_256x1024_us": _median_us(lambda: cache.rows("response_ids", refs, _TOKENS)),
        "gather_256x1024_us": _median_us(lambda: cache.rows("response_ids", turned, _TOKENS)),
    }


def _writes(cache: TokenCache) -> dict[str, float]:
    _put_all(cache)
    puts: list[float] = []
    last = b""
    for number in range(_PROMPTS, 3 * _PROMPTS):
        key, ids = prompt_key(str(number), "", _NAME), _ids(number)
        start = time.perf_counter_ns()
        cache.put_prompt(key, ids)
        puts.append((time.perf_counter_ns() - start) / 1e3)
        last = key

    def allocate_and_free() -> None:
        refs = [cache.allocate(last) for _ in range(_SLOTS)]
        for ref in refs:
            cache.free(ref)

    return {"put_1024_us": median(puts), "allocate_free_256_ms": _median_us(allocate_and_free) / 1e3}


def _put_all(cache: TokenCache) -> None:
    for number, key in enumerate(_KEYS):
        cache.put_prompt(key, _ids(number))


def _ids(number: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.arange(number, number + _TOKENS, dtype=np.int32)


def _median_us(call: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(5 * _ROUNDS):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return median(times)


def _put_and_wait(path: Path) -> None:
    """The other process: puts all prompts, leases all slots, and lives until its standard input ends."""
    with TokenCache.create(path, run=_NAME, fingerprint=_NAME, geometry=_GEOMETRY) as cache:
        _put_all(cache)
        for key in _KEYS[:_SLOTS]:
            cache.set_scalars(cache.allocate(key), response_length=_TOKENS)
        print("ready", flush=True)
        sys.stdin.buffer.read()


if __name__ == "__main__":
    _put_and_wait(Path(sys.argv[1]))
