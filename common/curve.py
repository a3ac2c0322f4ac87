"""CURVE keys for the bus over tcp: who the coordinator is, and which replicas it lets in (Curve25519, ZeroMQ's own).

KEYS/server.key           the coordinator's public key, which every replica needs       0644
KEYS/server.key_secret    with its secret key, for the coordinator alone                0600
KEYS/client.key           the replicas' public key                                      0644
KEYS/client.key_secret    with its secret key, for replicas                             0600
KEYS/authorised/*.key     public keys of the replicas that are let in                   0644
"""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.auth import load_certificate, load_certificates
from zmq.auth.thread import ThreadAuthenticator

SERVER, CLIENT, AUTHORISED = "server", "client", "authorised"
DOMAIN = "quartet"
_TEMPLATE = """#   {what}
metadata
curve
    public-key = "{public}"
"""


class CurveError(Exception):
    """Keys are missing, unsafe or no keys; the message names the file and says what to do."""


@dataclass(frozen=True)
class ServerKeys:
    """The coordinator's key pair, in Z85, and the public keys of those who may come."""

    public: bytes
    secret: bytes = field(repr=False)
    authorised: frozenset[bytes]

    @classmethod
    def load(cls, directory: Path) -> ServerKeys:
        """Raises CurveError where a key is missing, or where others than its owner may read the secret one."""
        public, secret = _secret_pair(directory / f"{SERVER}.key_secret")
        folder = directory / AUTHORISED
        try:
            authorised = frozenset(load_certificates(folder))
        except (OSError, ValueError) as error:
            raise CurveError(f"{folder}: cannot be read: {error}; `quartet keys` makes it") from error
        if not authorised:
            raise CurveError(f"{folder}: no .key file there, so nobody would be let in; `quartet keys` makes one")
        for key in authorised:
            _require_key(folder, key)
        return cls(public, secret, authorised)


@dataclass(frozen=True)
class ClientKeys:
    """A replica's key pair, and the public key by which it knows the coordinator; all in Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    @classmethod
    def load(cls, directory: Path) -> ClientKeys:
        """Raises CurveError where a key is missing, or where others than its owner may read the secret one."""
        public, secret = _secret_pair(directory / f"{CLIENT}.key_secret")
        return cls(public, secret, _certificate(directory / f"{SERVER}.key")[0])


def make_keys(directory: Path) -> list[Path]:
    """Writes a server's and a client's key pair, the client being authorised; returns the files.

    The directory is made with mode 0700. Raises CurveError where there are keys already: nothing is overwritten.
    """
    folder = directory / AUTHORISED
    secrets, publics = [], []
    for name in (SERVER, CLIENT):
        public, secret = zmq.curve_keypair()
        note = _TEMPLATE.format(what=f"{name}: public key of a Quartet bus", public=public.decode())
        publics.append((directory / f"{name}.key", note))
        if name == CLIENT:
            publics.append((folder / f"{name}.key", note))
        note = _TEMPLATE.format(what=f"{name}: SECRET key of a Quartet bus", public=public.decode())
        secrets.append((directory / f"{name}.key_secret", f'{note}    secret-key = "{secret.decode()}"\n'))
    files = [*((path, text, 0o600) for path, text in secrets), *((path, text, 0o644) for path, text in publics)]
    for path, _, _ in files:
        if path.exists():
            raise CurveError(f"{path}: is there already; give another --directory, or delete the old keys first")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for path, text, mode in files:
            _write(path, text, mode)
    except OSError as error:
        raise CurveError(f"{error.filename or directory}: cannot be written: {error.strerror}") from error
    return [path for path, _, _ in files]


class Doorkeeper:
    """Lets in whoever has an authorised key, and nobody else; works in a thread of its own, beside any event loop."""

    def __init__(self, context: zmq.Context[Any], authorised: frozenset[bytes]) -> None:
        # What it logs of each connection would be a stranger's to fill a disk with.
        quiet = logging.getLogger("curve")
        quiet.setLevel(logging.CRITICAL)
        self._authenticator = ThreadAuthenticator(context, log=quiet)
        self._authenticator.start()
        self._authenticator.certs[DOMAIN] = dict.fromkeys(authorised, True)

    def close(self) -> None:
        self._authenticator.stop()


def serve(socket: zmq.Socket[Any], keys: ServerKeys) -> None:
    """Has every later ``bind`` of a socket take CURVE connections alone, that a Doorkeeper lets in.

    Where there is no Doorkeeper (any more), nobody is let in.
    """
    socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def identify(socket: zmq.Socket[Any], keys: ClientKeys) -> None:
    """Has every later ``connect`` of a socket use CURVE, and talk to nobody but the holder of the server's key."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def _write(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, mode)  # whatever the umask leaves of it
        file.write(text)


def _secret_pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _certificate(path)
    if secret is None:
        raise CurveError(f"{path}: holds no secret key; `quartet keys` makes a pair")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise CurveError(f"{path}: has mode {mode:04o}, others may read it: chmod 600, or make new keys")
    _require_key(path, secret)
    if zmq.curve_public(secret) != public:
        raise CurveError(f"{path}: its public key does not belong to its secret key; make new ones by `quartet keys`")
    return public, secret


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        raise CurveError(f"{path}: no key can be read from it: {error}; `quartet keys` makes it") from error
    _require_key(path, public)
    return public, secret


def _require_key(path: Path, key: bytes) -> None:
    from zmq.utils import z85

    try:
        if len(key) != 40 or len(z85.decode(key)) != 32:
            raise ValueError(f"{len(key)} characters")
    except (KeyError, ValueError) as error:
        raise CurveError(f"{path}: holds no key of 40 characters in Z85 ({error}); `quartet keys` makes it") from error
