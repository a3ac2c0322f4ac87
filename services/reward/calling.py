"""Calls a reward function and checks what it returns. Used in the child process only.

Two conventions, told apart by the names of the parameters:

    batch   score(prompts, responses, ground_truths, metadata, **options) -> one float for each sample
    verl    compute_score(data_source, solution_str, ground_truth, extra_info, **options) -> float or {"score": float}
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from services.reward.wire import OptionValue

Convention = Literal["batch", "verl"]
Value = float | str
"""A finite score, or why there is none."""

SHOWN_CHARACTERS = 80
MESSAGE_CHARACTERS = 500


class ReturnedError(Exception):
    """A function returned something else than a score for each sample."""


@dataclass(frozen=True)
class ScoreFunction:
    """A loaded function. ``file`` is the user's file, empty for built-in functions."""

    name: str
    function: Callable[..., object]
    convention: Convention
    options: Mapping[str, OptionValue]
    file: str = ""

    def score(
        self,
        prompts: list[str],
        responses: list[str],
        ground_truths: list[object],
        metadata: list[object],
        sources: list[str],
    ) -> list[Value]:
        """One value for each sample. Where the function refuses a batch, each sample is given to it alone."""
        samples = list(zip(prompts, responses, ground_truths, metadata, sources, strict=True))
        if self.convention == "verl":
            return [self.alone(*sample) for sample in samples]
        noted = [with_source(extra, source) for extra, source in zip(metadata, sources, strict=True)]
        try:
            return self.batch(prompts, responses, ground_truths, noted)
        except ReturnedError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001  the user's function may raise anything
            traceback.print_exc()
            problem = self.raised(error)
        return [problem] if len(samples) == 1 else [self.alone(*sample) for sample in samples]

    def batch(
        self, prompts: list[str], responses: list[str], ground_truths: list[object], metadata: list[object]
    ) -> list[Value]:
        """Calls the function once, with lists of its own; raises ReturnedError, and whatever the function raises."""
        returned = self.function(list(prompts), list(responses), list(ground_truths), list(metadata), **self.options)
        if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
            raise ReturnedError(
                f"{self.name} returned {shown(cast('object', returned))}; expected a list of {len(responses)} floats"
            )
        values = list(cast("Iterable[object]", returned))
        if len(values) != len(responses):
            raise ReturnedError(
                f"{self.name} returned {len(values)} values for {len(responses)} samples: {shown(values)}"
            )
        return [self.checked(value) for value in values]

    def alone(self, prompt: str, response: str, ground_truth: object, extra: object, source: str) -> Value:
        """The value of one sample."""
        try:
            if self.convention == "batch":
                return self.batch([prompt], [response], [ground_truth], [with_source(extra, source)])[0]
            returned = self.function(
                data_source=source, solution_str=response, ground_truth=ground_truth, extra_info=extra, **self.options
            )
        except ReturnedError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  the user's function may raise anything
            return self.raised(error)
        if isinstance(returned, Mapping) and "score" in returned:
            returned = cast("Mapping[str, object]", returned)["score"]
        return self.checked(cast("object", returned))

    def checked(self, value: object) -> Value:
        """A finite float, from whatever number the function returned, numpy's and torch's scalars included."""
        if isinstance(value, float | int) or (not isinstance(value, str) and hasattr(value, "__float__")):
            try:
                number = float(cast("float", value))
            except (TypeError, ValueError, OverflowError, RuntimeError):
                return f"{self.name} returned {shown(value)}; expected a finite float"
            if math.isfinite(number):
                return number
        return f"{self.name} returned {shown(value)}; expected a finite float"

    def raised(self, error: Exception) -> str:
        """The exception and, in the user's file, where it came from."""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
        place = f" ({Path(self.file).name}, line {lines[-1]})" if lines else ""
        return f"{self.name} raised {type(error).__name__}: {message(error)}{place}"


def with_source(extra: object, source: str) -> object:
    """A row's metadata as batch functions get it: a dictionary that has the row's ``data_source`` too."""
    if extra is None:
        extra = {}
    if not isinstance(extra, dict) or not source or "data_source" in extra:
        return cast("object", extra)
    return {**cast("dict[str, object]", extra), "data_source": source}


def message(error: Exception) -> str:
    """What an exception says, short enough for a log and fit for UTF-8; never raises."""
    try:
        text = str(error).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001  a __str__ of the user's
        print(f"str of a {type(error).__name__} failed", file=sys.stderr)  # noqa: T201
        return "(it cannot be shown)"
    return text if len(text) <= MESSAGE_CHARACTERS else f"{text[:MESSAGE_CHARACTERS]}…"


def shown(value: object) -> str:
    """A value as an error quotes it; never raises."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  a __repr__ of the user's
        print(f"repr of a {type(value).__name__} failed", file=sys.stderr)  # noqa: T201
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
