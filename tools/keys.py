"""``quartet keys``: the key pairs with which the bus may leave its host."""

from __future__ import annotations

from pathlib import Path

from common.curve import make_keys

DIRECTORY = "keys"


def keys(directory: str = DIRECTORY) -> list[str]:
    """Makes a server's and a client's pair; the lines that say where what is. Raises CurveError."""
    folder = Path(directory)
    written = make_keys(folder)
    return [
        *(f"wrote {path}" for path in written),
        f"the coordinator needs {folder}; a replica elsewhere needs client.key, client.key_secret and server.key of it",
        f"whoever has a public key in {folder / 'authorised'} is let in; remove it there to shut its owner out",
    ]
