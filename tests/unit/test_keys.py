"""Key files: who may read them, what is refused, and the command that makes them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from common.curve import AUTHORISED, ClientKeys, CurveError, ServerKeys, make_keys
from tools.keys import keys

SECRET, PUBLIC = ("server.key_secret", "client.key_secret"), ("server.key", "client.key", f"{AUTHORISED}/client.key")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_secrets_are_their_owners_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "keys"
    before = os.umask(umask)
    try:
        written = make_keys(folder)
    finally:
        os.umask(before)
    assert sorted(str(path.relative_to(folder)) for path in written) == sorted((*SECRET, *PUBLIC))
    assert {mode(folder / name) for name in SECRET} == {0o600}
    assert {mode(folder / name) for name in PUBLIC} == {0o644}
    assert {mode(folder), mode(folder / AUTHORISED)} == {0o700}


def test_the_pairs_know_each_other_and_no_public_file_tells_a_secret(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    server, client = ServerKeys.load(tmp_path / "keys"), ClientKeys.load(tmp_path / "keys")
    assert client.server == server.public
    assert server.authorised == {client.public}
    assert len({server.public, server.secret, client.public, client.secret}) == 4
    for name in PUBLIC:
        text = (tmp_path / "keys" / name).read_bytes()
        assert server.secret not in text
        assert client.secret not in text
    for pair in (server, client):
        assert pair.secret.decode() not in repr(pair)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.key*")}
    with pytest.raises(CurveError, match=r"server\.key_secret: is there already; give another --directory"):
        make_keys(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.key*")} == before


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, bits: int) -> None:
    make_keys(tmp_path)
    for name, load in (("server.key_secret", ServerKeys.load), ("client.key_secret", ClientKeys.load)):
        (tmp_path / name).chmod(bits)
        with pytest.raises(CurveError, match=rf"{name}: has mode {bits:04o}, others may read it: chmod 600"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("server.key_secret", None, "no key can be read from it"),
        ("server.key_secret", "", "No public key found"),
        ("server.key_secret", '    public-key = "{public}"\n', "holds no secret key"),
        ("server.key_secret", '    public-key = "short"\n    secret-key = "short"\n', "no key of 40 characters"),
        ("server.key_secret", '    public-key = "{public}"\n    secret-key = "{public}"\n', "does not belong to"),
        (f"{AUTHORISED}/client.key", None, "nobody would be let in"),
        (f"{AUTHORISED}/client.key", "    public-key = \"" + "\\" * 40 + '"\n', "no key of 40 characters"),
        (f"{AUTHORISED}/client.key", "nothing", "No public key found"),
    ],
)  # fmt: skip
def test_what_is_no_key_is_refused_by_name(tmp_path: Path, name: str, text: str | None, reason: str) -> None:
    make_keys(tmp_path)
    public = ServerKeys.load(tmp_path).public.decode()
    path = tmp_path / name
    path.unlink() if text is None else path.write_text(text.replace("{public}", public))
    with pytest.raises(CurveError, match=reason) as caught:
        ServerKeys.load(tmp_path)
    assert str(path.parent if AUTHORISED in name else path) in str(caught.value)


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    lines = keys(str(tmp_path / "keys"))
    assert sum(line.startswith("wrote ") for line in lines) == 5
    with pytest.raises(CurveError):
        keys(str(tmp_path / "keys"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CurveError, match=r"file.*cannot be written"):
        make_keys(tmp_path / "file" / "keys")
