"""Token cache between processes: reads without a lock, death of either side, and a file system that runs full."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from common.messages import SlotRef
from common.token_cache import CacheError, Geometry, TokenCache, prompt_key

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
GEOMETRY = Geometry(slots=16, max_prompt_tokens=1024, max_response_tokens=256, prompts=8)

PRELUDE = """
import os, sys
from pathlib import Path
import numpy as np
from common.messages import SlotRef
from common.token_cache import CacheError, Geometry, TokenCache, prompt_key
path = Path(sys.argv[1])
names = {"run": "demo", "fingerprint": "tok"}
def key(number): return prompt_key(str(number), "", "tok")
def ids(number): return np.full(1 + number % 1024, number, np.int32)
def refused(call):
    try: call()
    except CacheError as error: return str(error)
    raise SystemExit("was not refused")
"""


def key(number: int) -> bytes:
    return prompt_key(str(number), "", "tok")


def attach(path: Path) -> TokenCache:
    return TokenCache.attach(path, run="demo", fingerprint="tok")


def adopt(path: Path) -> TokenCache:
    return TokenCache.adopt(path, run="demo", fingerprint="tok")


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm", prefix="test-quartet-") as directory:
        yield Path(directory, "tokens")


def run(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> str:
    """Runs a script in another process to its end; its standard output."""
    command = [*prefix, sys.executable, "-W", "error", "-c", PRELUDE + script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def running(script: str, path: Path) -> Generator[subprocess.Popen[bytes]]:
    """A script in another process, killed at the end."""
    command = [sys.executable, "-W", "error", "-c", PRELUDE + script, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
    assert ready, f"nothing printed within {DEADLINE_S} s"
    text = process.stdout.readline().decode().strip()
    assert text, f"the other process ended with {process.wait(DEADLINE_S)}"
    return text


def test_another_process_reads_all_and_writes_only_its_columns(path: Path) -> None:
    with TokenCache.create(path, run="demo", fingerprint="tok", geometry=GEOMETRY) as cache:
        cache.put_prompt(key(1023), np.full(1024, 1023, np.int32))
        refs = [cache.allocate(key(1023)) for _ in range(3)]
        for ref in refs:
            cache.set_scalars(ref, response_length=255, reward=0.5, finish_reason="length")
        script = """
with TokenCache.attach(path, **names, writes=frozenset({"response_ids"})) as cache:
    refs = [SlotRef(slot, 1) for slot in range(3)]
    assert cache.geometry == Geometry(16, 1024, 256, 8), cache.geometry
    assert np.array_equal(cache.get_prompt(key(1023)), ids(1023)) and cache.get_prompt(key(5)) is None
    assert all(np.array_equal(cache.prompt_ids(ref), ids(1023)) for ref in refs)
    assert (cache.hits, cache.misses) == (4, 1)
    assert cache.scalars(refs[2]).reward == 0.5 and cache.scalars(refs[2]).finish_reason == "length"
    cache.write_rows("response_ids", refs, np.arange(3 * 255).reshape(3, 255).astype(np.int32))
    for view in (cache.column("values", refs[0]), cache.get_prompt(key(1023)), cache.rows("rewards", refs, 2)):
        try: view[:] = 1
        except ValueError: continue
        raise SystemExit("a read-only view was written")
    for call in (lambda: cache.put_prompt(key(2), [1]), lambda: cache.allocate(key(1023)),
                 lambda: cache.free(refs[0]), lambda: cache.set_scalars(refs[0], step=1)):
        assert f"process {os.getpid()} may not" in refused(call)
    assert cache.check() == []
"""
        run(script, path)
        assert cache.rows("response_ids", refs, 255).ravel().tolist() == list(range(3 * 255))
        assert (cache.hits, cache.misses) == (0, 0)
        assert cache.check() == []


def test_a_forked_child_is_not_the_creator(path: Path) -> None:
    script = """
cache = TokenCache.create(path, **names, geometry=Geometry(2, 4, 4, 2))
cache.put_prompt(key(1), [1])
ref = cache.allocate(key(1))
if (child := os.fork()) == 0:
    assert f"process {os.getpid()} may not put" in refused(lambda: cache.put_prompt(key(2), [1]))
    assert f"process {os.getpid()} may not set" in refused(lambda: cache.set_scalars(ref, step=1))
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
cache.set_scalars(ref, step=1)
"""
    run(script, path)


def test_readers_see_a_whole_right_prompt_or_a_miss_under_eviction(path: Path) -> None:
    """Eight entries, 64 prompts in turn: nearly every put evicts what this process may be reading at that moment."""
    script = """
cache = TokenCache.create(path, **names, geometry=Geometry(16, 1024, 256, 8))
cache.put_prompt(key(999), ids(999))
cache.allocate(key(999))
sys.stdout.write("ready\\n"); sys.stdout.flush()
keys = [(key(number), ids(number)) for number in range(400, 464)]
while True:
    for one, value in keys:
        cache.put_prompt(one, value)
"""
    keys = [(number, key(number)) for number in range(400, 464)]
    wrong: list[object] = []
    with running(script, path) as writer:
        line(writer)
        with attach(path) as cache:
            pinned = cache.prompt_ids(SlotRef(0, 1))
            deadline = time.monotonic() + DEADLINE_S
            for lap in range(400):
                for number, one in keys:
                    found = cache.get_prompt(one, copy=True)
                    if found is not None and (len(found) != number + 1 or not (found == number).all()):
                        wrong.append((lap, number, found))
                # A prompt that is never evicted is never missed, whatever moves in its chain.
                if cache.get_prompt(key(999)) is None or not (pinned == 999).all():
                    wrong.append((lap, 999))
                assert time.monotonic() < deadline
            assert wrong == []
            assert writer.poll() is None
            assert cache.hits > 1000
            assert cache.misses > 1000


def test_what_a_dead_coordinator_leaves_is_refused_until_it_is_adopted(path: Path) -> None:
    script = """
cache = TokenCache.create(path, **names, geometry=Geometry(16, 1024, 256, 8))
for number in range(8): cache.put_prompt(key(number), ids(number))
refs = [cache.allocate(key(number)) for number in (3, 3, 5, 6)]
cache.set_scalars(refs[1], response_length=2, reward=0.75, step=9)
cache.column("rewards", refs[1])[1] = 0.75
cache.free(refs[0]); cache.quarantine(refs[3])
print("ready", flush=True)
sys.stdin.buffer.read()
"""
    with running(script, path) as coordinator:
        line(coordinator)
        with pytest.raises(CacheError, match=f"process {coordinator.pid}, is alive; a run has one coordinator"):
            adopt(path)
        with attach(path) as reader:
            coordinator.send_signal(signal.SIGKILL)
            coordinator.wait(DEADLINE_S)
            with pytest.raises(CacheError, match=f"process {coordinator.pid}, is dead; start the run again"):
                attach(path)
            with adopt(path) as cache:
                assert cache.leased() == [SlotRef(1, 1), SlotRef(2, 1)]
                assert cache.in_quarantine() == [SlotRef(3, 1)]
                assert (cache.free_slots, cache.quarantined) == (13, 1)
                assert cache.scalars(SlotRef(1, 1)).reward == 0.75
                assert cache.response("rewards", SlotRef(1, 1)).tolist() == [0, 0.75]
                assert cache.check() == []
                for number in range(100, 120):
                    cache.put_prompt(key(number), np.full(number + 1, number, np.int32))
                # What slots held stayed; what was least recently used went.
                assert [number for number in range(8) if cache.get_prompt(key(number)) is not None] == [3, 5, 6]
                assert cache.allocate(key(119)) == SlotRef(0, 3)
                cache.release(SlotRef(3, 1))
                assert reader.prompt_ids(SlotRef(0, 3)).tolist() == [119] * 120
                with attach(path):
                    assert cache.check() == []


@pytest.mark.parametrize("lines", range(8))
def test_a_coordinator_killed_at_any_moment_leaves_a_cache_that_can_be_adopted(path: Path, lines: int) -> None:
    script = """
cache = TokenCache.create(path, **names, geometry=Geometry(16, 1024, 256, 8))
held = []
number = 0
while True:
    number += 1
    cache.put_prompt(key(number), ids(number))
    held.append((cache.allocate(key(number)), number))
    if len(held) == 6:
        cache.free(held.pop(number % 6)[0])
    if number % 50 == 0: sys.stdout.write(f"{number}\\n"); sys.stdout.flush()
"""
    with running(script, path) as coordinator:
        for _ in range(lines + 1):
            line(coordinator)
        coordinator.kill()
        coordinator.wait(DEADLINE_S)
    with adopt(path) as cache:
        assert cache.check() == []
        refs = cache.leased()
        assert 4 <= len(refs) <= 6
        assert cache.free_slots == 16 - len(refs)
        for ref in refs:
            number = int(cache.prompt_ids(ref)[0])
            found = cache.get_prompt(key(number))
            assert found is not None
            assert found.tolist() == [number] * (1 + number % 1024) == cache.prompt_ids(ref).tolist()
            cache.free(ref)
        for number in range(8):
            cache.put_prompt(key(number), [number])
        assert cache.check() == []
        assert os.stat(path).st_blocks * 512 < 2**16 + 8 * 1024 * 4


MOUNT = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'


def small_file_system(directory: Path) -> tuple[str, ...]:
    """A command prefix under which ``directory`` is a tmpfs of 1 MiB: in a user namespace, or as root."""
    for unshare in (("unshare", "--user", "--map-root-user", "--mount"), ("unshare", "--mount")):
        prefix = (*unshare, "sh", "-c", MOUNT, str(directory))
        if subprocess.run([*prefix, "true"], capture_output=True, timeout=DEADLINE_S, check=False).returncode == 0:
            return prefix
    return ()


FULL = """
limit = os.statvfs(path.parent); free = limit.f_bavail * limit.f_frsize
assert "rollout.max_new_tokens" in refused(lambda: TokenCache.create(
    path, **names, geometry=Geometry(free // 4096, 256, 256, 8)))
cache = TokenCache.create(path, **names, geometry=Geometry(8, 1024, 1024, 8))
cache.put_prompt(key(1), ids(1))
first = cache.allocate(key(1))
filler = os.open(path.with_name("filler"), os.O_RDWR | os.O_CREAT)
size = 1 << 30
end = 0
while size >= 4096:
    try: os.posix_fallocate(filler, end, size); end += size
    except OSError: size //= 2
for lap in range(2):
    message = refused(lambda: cache.allocate(key(1)))
    assert "slot 1: no memory for its" in message and "No space left on device" in message, message
    message = refused(lambda: cache.put_prompt(key(2), ids(2)))
    assert "no memory for prompt entry 1" in message and "No space left on device" in message, message
assert cache.free_slots == 7 and cache.check() == []
# Memory of what was leased before is there: writing all of it on a full file system is no SIGBUS.
cache.column("rewards", first)[:] = 1
with TokenCache.attach(path, **names, writes=frozenset({"response_ids", "returns"})) as writer:
    writer.column("response_ids", first)[:] = 1
    writer.column("returns", first)[:] = 1
assert cache.get_prompt(key(1)).tolist() == [1, 1]
os.unlink(path.with_name("filler")); os.close(filler)
cache.put_prompt(key(2), ids(2))
assert cache.allocate(key(2)) == SlotRef(1, 1)
assert cache.check() == []
cache.free(first); cache.free(SlotRef(1, 1))
for number in range(10, 18): cache.put_prompt(key(number), ids(number))
assert cache.get_prompt(key(1)) is None and cache.check() == []
print("complete")
"""


def test_a_full_file_system_is_an_error_at_allocation_and_nowhere_else(path: Path) -> None:
    prefix = small_file_system(path.parent)
    free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
    # A container that may not mount has a small /dev/shm of its own, which is filled instead.
    assert prefix or free < 2**28, "needs unshare and mount, or a /dev/shm of at most 256 MiB"
    assert run(FULL, path, prefix=prefix) == "complete\n"


def test_importing_the_cache_imports_neither_torch_nor_transformers(path: Path) -> None:
    assert run("print(sorted({'torch', 'transformers'} & set(sys.modules)))", path) == "[]\n"
