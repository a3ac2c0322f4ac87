"""What a soak looks at: records against the ledger, the token cache, slots that nobody gives back, services' memory."""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from common.models import resolve_model
from common.records import SampleRecord, StepMetrics, Summary
from common.run_files import RunDirectory
from common.token_cache import CacheError, TokenCache
from common.tokenizer import load_tokenizer

MODEL = "tiny"
FLAT = 0.05
AGES_S = (10.0, 20.0, 40.0, 80.0, 160.0)
"""Classes of age: younger processes still load, and of older ones only those of one class are compared."""
LEAST = 5
"""Measurements of a class that make a comparison."""
LOOKS, BETWEEN_S = 3, 0.05
"""Looks at the cache, and the least time from one to the next."""
Found = tuple[dict[str, Any], list[str]]


def check_records(files: RunDirectory, samples_per_step: int) -> Found:
    """Summary, ledger, metrics.jsonl and samples.jsonl must tell of the same steps and samples, each once, in order."""
    if not files.summary.exists():
        return {}, [f"{files.summary} was not written"]
    summary = msgspec.json.decode(files.summary.read_bytes(), type=Summary)
    try:
        lines = [msgspec.json.decode(line, type=StepMetrics) for line in files.metrics.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        return {}, [f"{files.metrics} is damaged: {error}"]
    measured = [line.step for line in lines if "eval/rows" not in line.values]
    ledger = sqlite3.connect(files.ledger)
    try:
        steps = [step for (step,) in ledger.execute("SELECT step FROM steps ORDER BY step")]
        states = {
            step: (count, settled)
            for step, count, settled in ledger.execute(
                "SELECT step, count(*), sum(state IN ('scored', 'masked')) FROM samples WHERE wave = 0 GROUP BY step"
            )
        }
        masked = ledger.execute("SELECT count(*) FROM samples WHERE state = 'masked'").fetchone()[0]
        kinds = Counter(kind for (kind,) in ledger.execute("SELECT kind FROM events"))
        lost_leases = ledger.execute("SELECT count(*) FROM leases WHERE state IN ('lost', 'late')").fetchone()[0]
        epochs = ledger.execute("SELECT count(*) FROM epochs").fetchone()[0]
    finally:
        ledger.close()
    expected = list(range(1, summary.steps + 1))
    wrong = [
        f"{place} tells of {len(found)} steps, from {found[:1]} to {found[-1:]}; the summary of {summary.steps}"
        for place, found in (("the ledger", steps), ("metrics.jsonl", measured))
        if found != expected
    ]
    unsettled = {step: states.get(step, (0, 0)) for step in steps if states.get(step) != (samples_per_step,) * 2}
    lost = sum(max(0, samples_per_step - settled) for _, settled in unsettled.values())
    wrong += [
        f"step {step}: {count} samples in the ledger, {settled} of them scored or masked, expected {samples_per_step}"
        for step, (count, settled) in list(unsettled.items())[:5]
    ]
    doubled, odd = check_samples(files, steps, samples_per_step)
    facts = {
        "steps": summary.steps, "samples": summary.samples, "lost_samples": lost, "doubled_samples": doubled,
        "masked_samples": masked, "coordinators": epochs, "rewinds": kinds["rewind"], "deaths_seen": kinds["death"],
        "lost_leases": lost_leases,
    }  # fmt: skip
    return facts, [*wrong, *odd]


def check_samples(files: RunDirectory, steps: Sequence[int], samples_per_step: int) -> tuple[int, list[str]]:
    """samples.jsonl: every sample of every finished step once, in order; the step under way may follow."""
    written: dict[int, list[int]] = defaultdict(list)
    order: list[int] = []
    for line in files.samples.read_bytes().splitlines():
        try:
            sample = msgspec.json.decode(line, type=SampleRecord)
        except msgspec.DecodeError as error:
            return 0, [f"{files.samples} is damaged after step {order[-1:]}: {error}"]
        written[sample.step].append(sample.sample)
        if order[-1:] != [sample.step]:
            order.append(sample.step)
    expected = list(range(samples_per_step))
    wrong = [f"samples.jsonl: step {step} has samples {written[step]}" for step in steps if written[step] != expected]
    doubled = sum(len(found) - len(set(found)) for found in written.values())
    if order[: len(steps)] != list(steps) or len(order) > len(steps) + 1:
        wrong.append(f"samples.jsonl: {len(order)} steps follow each other, expected the {len(steps)} finished ones")
    return doubled, wrong[:5]


def check_slots(copies: Sequence[Path], run: str) -> Found:
    """Copies of the token cache, several steps apart: what is leased in both was never given back."""
    fingerprint = load_tokenizer(resolve_model(MODEL)).fingerprint
    leased: list[set[tuple[int, int]]] = []
    wrong: list[str] = []
    for copy in copies:
        with TokenCache.adopt(copy, run=run, fingerprint=fingerprint) as cache:
            leased.append({(ref.slot, ref.generation) for ref in (*cache.leased(), *cache.in_quarantine())})
    leaked = sorted(leased[0] & leased[1]) if len(leased) == 2 else []
    if leaked:
        wrong.append(f"slots (number, generation) {leaked[:5]} are leased for several steps")
    return {"leased_slots": [len(found) for found in leased], "leaked_slots": len(leaked)}, wrong


def check_cache(path: Path, run: str, still: Callable[[], AbstractContextManager[None]]) -> list[str]:
    """What ``TokenCache.check`` finds at each of several looks, within ``still`` the cache's writer stands still.

    It may have been stopped in the middle of a change. So a kind of finding counts, whatever its numbers, that is there
    at every look.
    """
    fingerprint = load_tokenizer(resolve_model(MODEL)).fingerprint
    lasting: dict[str, str] = {}
    for look in range(LOOKS):
        with still():
            try:
                with TokenCache.attach(path, run=run, fingerprint=fingerprint) as cache:
                    found = cache.check()
            except CacheError as error:
                found = [str(error)]
        kinds = {re.sub(r"\d+", "", text): text for text in found}
        lasting = {kind: text for kind, text in kinds.items() if look == 0 or kind in lasting}
        if not lasting:
            return []
        time.sleep(BETWEEN_S)
    return list(lasting.values())


def is_stopped(pid: int) -> bool:
    """Whether a process stands still after SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Memory:
    """Resident memory of every service, by the age of its process."""

    def __init__(self) -> None:
        self.first_seen: dict[int, float] = {}
        self.seen: list[tuple[str, float, float, int]] = []
        """(service, time of the soak, age of the process, bytes)."""

    def measure(self, service: str, pid: int, now: float) -> None:
        size = resident(pid)
        if size:
            age = now - self.first_seen.setdefault(pid, now)
            self.seen.append((service, now, age, size))

    def growth(self, whole: float) -> Found:
        """Largest memory in the last third over that in the middle third, by service, in its worst class of age.

        A process grows while it warms up, so that only processes of one class of age are compared, over all of the
        service's lives.
        """
        peaks: dict[tuple[str, float, int], list[int]] = defaultdict(list)
        for service, now, age, size in self.seen:
            third = int(3 * now / whole)
            if age >= AGES_S[0] and third > 0:
                peaks[service, max(start for start in AGES_S if start <= age), min(third, 2)].append(size)
        facts: dict[str, Any] = {}
        wrong: list[str] = []
        for service, age in sorted({(service, age) for service, age, _ in peaks}):
            middle, last = peaks[service, age, 1], peaks[service, age, 2]
            if min(len(middle), len(last)) < LEAST:
                continue
            ratio = max(last) / max(middle) - 1
            fact = {"age_s": age, "middle_mib": mib(max(middle)), "last_mib": mib(max(last)), "growth": round(ratio, 4)}
            if service not in facts or ratio > facts[service]["growth"]:
                facts[service] = fact
            if ratio > FLAT:
                wrong.append(f"{service}: memory has grown from the middle third to the last: {fact}")
        return facts, wrong


def resident(pid: int) -> int:
    """Bytes of a process's resident memory, shared pages included; 0 where it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0


def mib(nbytes: int) -> float:
    return round(nbytes / 2**20, 1)
