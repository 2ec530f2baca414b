"""Keys on disk: made once, private, whole or not at all, and errors a person can act on."""

import errno
import os
import stat
from pathlib import Path

import pytest

from p2pserve.bootstrap import Identity, IdentityError, NetworkKey, verify
from p2pserve.bootstrap.errors import AddressError
from p2pserve.bootstrap.trust.keys import parse_peer_id, public_key_of


def test_an_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    first = Identity.load_or_create(tmp_path / "home")
    again = Identity.load_or_create(tmp_path / "home")
    assert first.peer_id == again.peer_id
    assert first.peer_id.startswith("12D3KooW")
    assert public_key_of(first.peer_id) == first.public


def test_the_known_peer_id_of_a_known_key() -> None:
    # The test vector of RFC 8032 (first key), with the id that libp2p gives it.
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    assert Identity(seed).public.hex().startswith("d75a980182b10ab7d54bfed3c964073a")
    assert Identity(seed).peer_id == "12D3KooWQK1wnefoLrcVHbbnf5tLzbopUd3K3bFAoJpA7YJgL5pV"


@pytest.mark.parametrize("kind", [Identity, NetworkKey])
def test_the_file_is_private(tmp_path: Path, kind: type[Identity] | type[NetworkKey]) -> None:
    folder = tmp_path / "a" / "home"
    kind.load_or_create(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / kind.FILE).stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == [kind.FILE]


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 31, b"x" * 33, bytes(32)])
def test_a_damaged_key_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / Identity.FILE).write_bytes(content)
    with pytest.raises(IdentityError, match=r"damaged; restore it .* or delete it") as caught:
        Identity.load_or_create(tmp_path)
    assert str(tmp_path / Identity.FILE) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / Identity.FILE).read_bytes() == content


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(IdentityError, match=r"no space left on device; free some space") as caught:
            Identity.load_or_create(tmp_path / "home")
    assert "identity.key" in str(caught.value)
    assert list((tmp_path / "home").iterdir()) == []
    assert Identity.load_or_create(tmp_path / "home").peer_id  # and it works once there is room


def test_a_disk_that_takes_one_byte_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: whole(descriptor, bytes(data[:1])))
        first = Identity.load_or_create(tmp_path)
    assert Identity.load_or_create(tmp_path).peer_id == first.peer_id


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    (tmp_path / Identity.FILE).mkdir()
    with pytest.raises(IdentityError, match=r"cannot read key file .*: is a directory"):
        Identity.load_or_create(tmp_path)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    with pytest.raises(IdentityError, match=r"cannot read key file .*: not a directory"):
        Identity.load_or_create(tmp_path / "home")


def test_signatures() -> None:
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign(b"payload")
    assert verify(one.peer_id, b"payload", signature)
    assert not verify(other.peer_id, b"payload", signature)
    assert not verify(one.peer_id, b"another", signature)
    assert not verify(one.peer_id, b"payload", signature[:-1])
    assert "seed" not in repr(one)


@pytest.mark.parametrize(
    "text", ["", "12D3KooW", "0OIl", "Q" * 1000, "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "ä"]
)
def test_what_is_no_peer_id(text: str) -> None:
    assert not verify(text, b"payload", bytes(64))
    with pytest.raises(AddressError, match="is not a peer id; write"):
        parse_peer_id(text)
