"""``python -m tools.fuzz TARGET``: prints one JSON object; exit code 1 where a case failed."""

from __future__ import annotations

import argparse
import sys

import msgspec

from tools.fuzz.report import Result

FRAMES = 1_000_000


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz", description="Tries to break what reads foreign bytes."
    )
    parser.add_argument("target", choices=("frames", "cache", "weights", "checkpoints"))
    parser.add_argument("--frames", type=int, default=FRAMES, metavar="N", help=f"mutated frames; default: {FRAMES}")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same frames")
    parser.add_argument("--step", type=int, default=1, metavar="N", help="damage every N-th byte of a file only")
    arguments = parser.parse_args()
    result = run(arguments.target, arguments.frames, arguments.seed, arguments.step)
    print(msgspec.json.encode(result).decode(), flush=True)
    return 1 if result.failed else 0


def run(target: str, frames: int, seed: int, step: int) -> Result:
    if target == "frames":
        from tools.fuzz.frames import fuzz_frames

        return fuzz_frames(frames, seed)
    if target == "cache":
        from tools.fuzz.cache import fuzz_cache

        return fuzz_cache(seed, step)
    if target == "weights":
        from tools.fuzz.weights import fuzz_weights

        return fuzz_weights(seed, step)
    from tools.fuzz.checkpoints import fuzz_checkpoints

    return fuzz_checkpoints(seed, step)


if __name__ == "__main__":
    sys.exit(main())
