"""What the token cache's tests share."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from common.messages import SlotRef
from common.token_cache import Geometry, TokenCache, prompt_key
from common.token_cache.layout import Layout

RUN = "demo"
FINGERPRINT = "tok-1"
GEOMETRY = Geometry(slots=6, max_prompt_tokens=33, max_response_tokens=1027, prompts=4)
LAYOUT = Layout.of(GEOMETRY)


def key(name: object) -> bytes:
    return prompt_key(str(name), "template", FINGERPRINT)


def create(path: Path, geometry: Geometry = GEOMETRY) -> TokenCache:
    return TokenCache.create(path, run=RUN, fingerprint=FINGERPRINT, geometry=geometry)


def attach(path: Path, writes: frozenset[str] = frozenset()) -> TokenCache:
    return TokenCache.attach(path, run=RUN, fingerprint=FINGERPRINT, writes=writes)


@contextmanager
def shared_path() -> Generator[Path]:
    """A path in shared memory where there is no file yet."""
    with TemporaryDirectory(dir="/dev/shm", prefix="test-quartet-") as directory:
        yield Path(directory, "tokens")


def lease(cache: TokenCache, count: int, length: int = 0) -> list[SlotRef]:
    """Slots of one prompt of three tokens."""
    cache.put_prompt(key("p"), [5, 6, 7])
    refs = [cache.allocate(key("p")) for _ in range(count)]
    for ref in refs:
        cache.set_scalars(ref, response_length=length)
    return refs


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
