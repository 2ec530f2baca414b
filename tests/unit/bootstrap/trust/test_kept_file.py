"""A value in a file: whole or not at all, and set aside where it is damaged."""

import stat
from pathlib import Path

import msgspec
import pytest

from p2pserve.bootstrap.trust.kept_file import KeptFile


class Kept(msgspec.Struct, frozen=True):
    number: int


def file_in(folder: Path, said: list[str] | None = None) -> KeptFile[Kept]:
    return KeptFile(folder / "home" / "a.kept", Kept, b"kept-1\n", (said if said is not None else []).append)


def test_what_is_saved_is_loaded_and_private(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    assert (file.load(), file.written_at()) == (None, 0)
    file.save(Kept(1))
    file.save(Kept(2))
    assert file.load() == Kept(2)
    assert file.written_at() > 0
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert [each.name for each in file.path.parent.iterdir()] == ["a.kept"]


@pytest.mark.parametrize("at", [0, 7, 22, 23, -1])
def test_one_that_is_damaged_is_set_aside_with_one_line(tmp_path: Path, at: int) -> None:
    said: list[str] = []
    file = file_in(tmp_path, said)
    file.save(Kept(7))
    raw = bytearray(file.path.read_bytes())
    raw[at] ^= 1
    file.path.write_bytes(raw)
    assert file.load() is None
    assert len(said) == 1
    assert "a.kept is damaged" in said[0]
    assert file.path.with_suffix(".damaged").read_bytes() == raw
    assert file.load() is None
    assert len(said) == 1, "it is told once"


def test_one_of_another_kind_is_set_aside(tmp_path: Path) -> None:
    said: list[str] = []
    KeptFile(tmp_path / "home" / "a.kept", Other, b"kept-1\n").save(Other("text"))
    assert file_in(tmp_path, said).load() is None
    assert len(said) == 1


class Other(msgspec.Struct, frozen=True):
    text: str


def test_what_cannot_be_read_or_written_is_an_error(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    file.path.mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        file.load()
    with pytest.raises(OSError, match="directory"):
        file.save(Kept(1))
    assert [each.name for each in file.path.parent.iterdir()] == ["a.kept"], "nothing half written stays"
