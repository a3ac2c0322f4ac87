"""A token cache with every kind of byte of its file damaged: it is refused, or said to be damaged, or right."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from common.messages import SlotRef
from common.token_cache import COLUMNS, CacheError, Geometry, TokenCache, prompt_key
from common.token_cache.header import HEADER_BYTES, INDEX_VERSION
from common.token_cache.layout import SLOT_RECORD, Layout, width
from tools.fuzz.damage import Damage, Damaged, damages
from tools.fuzz.isolation import try_all
from tools.fuzz.report import Result, Tally

GEOMETRY = Geometry(slots=3, max_prompt_tokens=5, max_response_tokens=7, prompts=4)
LAYOUT = Layout.of(GEOMETRY)
RUN, FINGERPRINT = "fuzz", "tokenizer"
PROMPTS = {prompt_key(text, "", FINGERPRINT): [7 * n + k for k in range(2 + n)] for n, text in enumerate("abc")}
RESPONSE = 5
SLOW_S = 2.0


def regions(step: int) -> list[tuple[str, range]]:
    """What lies where; every ``step``-th byte of the parts that are large."""
    n, g = GEOMETRY.prompts, LAYOUT
    tables = (
        ("sequences", g.sequences, 8 * n), ("keys", g.keys, 16 * n), ("lengths", g.lengths, 4 * n),
        ("nexts", g.nexts, 4 * n), ("heads", g.heads, 4 * g.buckets), ("pins", g.pins, 4 * n), ("ages", g.ages, 8 * n),
        ("checksums", g.checksums, 4 * n),
    )  # fmt: skip
    found = [("header", range(0, HEADER_BYTES, step)), ("index version", range(INDEX_VERSION, INDEX_VERSION + 8))]
    for name in SLOT_RECORD.names or ():
        kind, offset = SLOT_RECORD.fields[name][:2]  # type: ignore[index]
        for slot in range(GEOMETRY.slots):
            start = g.slot_table + slot * SLOT_RECORD.itemsize + offset
            found.append((f"slot {slot} {name}", range(start, start + kind.itemsize)))
    found += [(name, range(start, start + size, step)) for name, start, size in tables]
    found.append(("prompt ids", range(g.prompt_ids, g.prompt_ids + 4 * n * GEOMETRY.max_prompt_tokens, step)))
    for name, dtype in COLUMNS.items():
        start = g.bodies + g.columns[name]
        found.append((f"column {name}", range(start, start + width(name, GEOMETRY) * dtype.itemsize, step)))
    return found


def sizes() -> list[int]:
    """Where a file may be cut, or to what it may grow."""
    ends = (LAYOUT.slot_table, LAYOUT.sequences, LAYOUT.fixed_end, LAYOUT.bodies, LAYOUT.file_size)
    return [
        0,
        1,
        8,
        HEADER_BYTES - 1,
        HEADER_BYTES,
        *(end + by for end in ends for by in (-1, 1)),
        2 * LAYOUT.file_size,
    ]


class CacheTrial:
    """One file, made by this process: two leased slots, one free, three prompts."""

    def __init__(self, step: int) -> None:
        self.cases = damages(regions(step), sizes())
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fuzz-quartet-"))
        self.path = self.folder / "tokens"
        with TokenCache.create(self.path, run=RUN, fingerprint=FINGERPRINT, geometry=GEOMETRY) as cache:
            for key, ids in PROMPTS.items():
                cache.put_prompt(key, ids)
            self.refs = [cache.allocate(key) for key in list(PROMPTS)[:2]]
            for ref in self.refs:
                cache.set_scalars(ref, response_length=RESPONSE, finish_reason="stop", sample=ref.slot, step=1)
                cache.column("rewards", ref)[:RESPONSE] = 0.5
            problems = cache.check()
        assert not problems, problems
        self.file = Damaged(self.path)

    def __len__(self) -> int:
        return len(self.cases)

    def name(self, number: int) -> str:
        return f"case {number}, {self.cases[number].name}"

    def close(self) -> None:
        self.file.close()
        shutil.rmtree(self.folder)

    def attempt(self, number: int, tally: Tally) -> None:
        """A reader first, then a coordinator that takes over, which changes the file."""
        case = self.cases[number]
        try:
            changed = self.file.damage(case)
            refused = self._read(case, changed, tally)
            self._take_over(refused, tally)
        finally:
            self.file.restore()

    def _read(self, case: Damage, changed: bool, tally: Tally) -> bool:
        """Whether attaching was refused, which any change of the header must be."""
        try:
            cache = TokenCache.attach(self.path, run=RUN, fingerprint=FINGERPRINT)
        except CacheError:
            tally.outcomes["refused"] += 1
            return True
        if changed and (case.region == "header" or case.size >= 0):
            tally.fail(case.name, "is taken for a sound cache")
        with cache:
            told = cache.check()
            wrong = [text for text in (self._prompt(cache, key) for key in PROMPTS) if text]
            wrong += [text for text in (self._slot(cache, ref) for ref in self.refs) if text]
        if wrong and not told:
            tally.fail(case.name, f"check() finds nothing, but {wrong[0]}")
        tally.outcomes["told by check()" if told else "nothing to tell"] += 1
        return False

    def _prompt(self, cache: TokenCache, key: bytes) -> str:
        """What a reader gets of a prompt that is not its own ids; none at all, or an error, is no wrong data."""
        try:
            found = cache.get_prompt(key, copy=True)
        except CacheError:
            return ""
        wrong = found is not None and found.tolist() != PROMPTS[key]
        return f"prompt {key.hex()[:8]} reads as {found}" if wrong else ""

    def _slot(self, cache: TokenCache, ref: SlotRef) -> str:
        """Reads all that a slot has; its prompt must be its own."""
        try:
            cache.scalars(ref)
            for name in COLUMNS:
                cache.column(name, ref).sum()
                cache.response(name, ref).sum()
                cache.rows(name, [ref], width(name, GEOMETRY)).sum()
                cache.views(name, [ref])
            found = cache.prompt_ids(ref)
        except CacheError:
            return ""
        expected = PROMPTS[list(PROMPTS)[self.refs.index(ref)]]
        return f"the prompt of slot {ref.slot} reads as {found}" if found.tolist() != expected else ""

    def _take_over(self, refused: bool, tally: Tally) -> None:
        """A coordinator that starts again on the file: an error, or a cache that works."""
        try:
            cache = TokenCache.adopt(self.path, run=RUN, fingerprint=FINGERPRINT)
        except CacheError:
            tally.outcomes["not taken over"] += 1
            return
        if refused:
            tally.fail("take over", "a cache that no reader may attach is taken over")
        with cache:
            try:
                for ref in [*cache.leased(), *cache.in_quarantine()]:
                    cache.scalars(ref)
                    cache.prompt_ids(ref)
                for n in range(GEOMETRY.prompts - len(self.refs)):  # room for these, beside those of the leased slots
                    cache.put_prompt(prompt_key(f"new {n}", "", FINGERPRINT), [n, n])
                ref = cache.allocate(prompt_key("new 0", "", FINGERPRINT))
                cache.free(ref)
                for ref in cache.leased():
                    cache.free(ref)
            except CacheError:
                tally.outcomes["taken over, damage found later"] += 1
                return
        tally.outcomes["taken over"] += 1


def fuzz_cache(seed: int = 0, step: int = 1) -> Result:
    """Every damage of every ``step``-th byte. Nothing is left to chance: ``seed`` only names the run."""
    tally = Tally("cache", seed, SLOW_S)
    try_all(lambda: CacheTrial(step), tally)
    return tally.result()
