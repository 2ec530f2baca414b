"""Members remembered between runs: bounded, last seen first, and never a reason to fail."""

import json
import stat
from pathlib import Path

import pytest
import trio

from p2pserve.bootstrap import Bootstrap, Identity, NetworkSettings
from p2pserve.bootstrap.address_book import FILE, MAX_NETWORKS, AddressBook, keep_address_book, merge_seen

PEERS = [Identity(bytes([seed]) * 32).peer_id for seed in range(1, 9)]
NETWORK = b"n" * 32


def at(index: int, port: int = 4001) -> Bootstrap:
    return Bootstrap(f"192.0.2.{index}", port, PEERS[index])


@pytest.mark.parametrize(
    ("seen", "known", "bound", "expected"),
    [
        ((), (), 3, ()),
        ((at(1),), (), 3, (at(1),)),
        ((at(2), at(1)), (at(3), at(1)), 3, (at(2), at(1), at(3))),
        ((at(2), at(1)), (at(3), at(4)), 3, (at(2), at(1), at(3))),
        ((at(1, 5000),), (at(1), at(2)), 3, (at(1, 5000), at(2))),  # it moved
        ((at(1), at(2), at(3)), (), 2, (at(1), at(2))),
    ],
)
def test_who_is_seen_comes_before_who_was_known(
    seen: tuple[Bootstrap, ...], known: tuple[Bootstrap, ...], bound: int, expected: tuple[Bootstrap, ...]
) -> None:
    assert merge_seen(seen, known, bound) == expected


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "home", NETWORK)
    assert book.load() == ()
    book.save((at(1), at(2)))
    book.save((at(3),))
    assert AddressBook(tmp_path / "home", NETWORK).load() == (at(3), at(1), at(2))
    assert [path.name for path in (tmp_path / "home").iterdir()] == [FILE]
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_it_keeps_its_bound(tmp_path: Path) -> None:
    book = AddressBook(tmp_path, NETWORK, NetworkSettings(max_remembered=3))
    book.save(tuple(at(index) for index in range(5)))
    book.save((at(6),))
    assert book.load() == (at(6), at(0), at(1))


def test_networks_do_not_mix_and_the_last_used_stay(tmp_path: Path) -> None:
    for number in range(MAX_NETWORKS + 2):
        AddressBook(tmp_path, bytes([number]) * 32).save((at(number % 8),))
    assert len(json.loads((tmp_path / FILE).read_text())) == MAX_NETWORKS
    assert AddressBook(tmp_path, bytes([1]) * 32).load() == ()
    assert AddressBook(tmp_path, bytes([2]) * 32).load() == (at(2),)
    assert AddressBook(tmp_path, bytes([9]) * 32).load() == (at(1),)


def test_nobody_seen_is_nothing_to_write(tmp_path: Path) -> None:
    AddressBook(tmp_path, NETWORK).save(())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": [["h", 1]]}',
        b'{"a": [["h", 0, "x"]]}',
        b'{"a": [["h", "1", "x"]]}',
        b'{"a": [["h", 1, "nobody"]]}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_like_none_and_is_written_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    book = AddressBook(tmp_path, NETWORK)
    assert book.load() == ()
    book.save((at(1),))
    assert book.load() == (at(1),)


@pytest.mark.parametrize(
    ("host", "port", "is_read"),
    [("h", 1, True), ("h", 65535, True), ("h", 0, False), ("h", 65536, False), ("h", "1", False), (7, 4001, False)],
)
def test_an_address_that_is_none_spoils_the_file(tmp_path: Path, host: object, port: object, is_read: bool) -> None:
    (tmp_path / FILE).write_text(json.dumps({NETWORK.hex(): [[host, port, PEERS[1]]]}))
    assert bool(AddressBook(tmp_path, NETWORK).load()) is is_read


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    book = AddressBook(tmp_path / "home", NETWORK)
    book.save((at(1),))
    assert book.load() == ()
    assert "AddressBook(" in repr(book)


class FakeNetwork:
    """One that sees what it is told."""

    def __init__(self) -> None:
        self.revision = 0
        self.seen: tuple[Bootstrap, ...] = ()
        self.changed = trio.Event()

    def see(self, *members: Bootstrap) -> None:
        self.seen = members
        self.revision += 1
        self.changed.set()
        self.changed = trio.Event()

    async def wait_changed(self, revision: int) -> int:
        while self.revision == revision:
            await self.changed.wait()
        return self.revision

    def seen_members(self) -> tuple[Bootstrap, ...]:
        return self.seen


def test_the_book_is_kept_while_the_network_runs_and_at_its_end(tmp_path: Path) -> None:
    book = AddressBook(tmp_path, NETWORK)

    async def main() -> None:
        network = FakeNetwork()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_address_book, network, book)
            network.see(at(1))
            with trio.fail_after(30):
                while book.load() != (at(1),):
                    await trio.lowlevel.checkpoint()
            network.see(at(1), at(2))  # within the pause: only the end writes it
            nursery.cancel_scope.cancel()
        assert book.load() == (at(1), at(2))

    trio.run(main)
