"""Nodes of two releases in one network: what earlier ones have said is understood, and what a newer one may add.

What was recorded is in `recorded/`, see `recorded.py`. At a release: `REWRITE_RECORDED=1 pytest <this file>`.
"""

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import trio

from p2pserve.bootstrap import JoinToken, ProtocolError, RemoteError, Role
from p2pserve.bootstrap.handlers import Handlers
from p2pserve.bootstrap.members.admission import Admission
from p2pserve.bootstrap.members.states import NetworkState, Tell
from p2pserve.bootstrap.streams import control
from p2pserve.bootstrap.trust.entries import sign_entry
from p2pserve.node.dev.fuzz_messages import add_catalogue
from p2pserve.node.messages import ADVERT, LINKS, PLAN, ExactMessage
from p2pserve.node.planning.manifest import read_manifest
from p2pserve.node.view import NetworkView

from . import recorded
from .recorded import HERE, KEY, KINDS, THERE, holds_all_of, make_node, with_defaults, with_more

if os.environ.get("REWRITE_RECORDED"):
    recorded.save(recorded.record())
BY_RELEASE = recorded.load()


def said() -> Iterator[tuple[str, bytes]]:
    """Every recorded message of every release, with the name of its type."""
    for each in BY_RELEASE.values():
        for name, messages in each["messages"].items():
            yield from ((name, bytes.fromhex(message)) for message in messages)


def by_type() -> list[tuple[type[msgspec.Struct], list[bytes]]]:
    return [(kind, [data for name, data in said() if name == kind.__name__]) for kind in KINDS.values()]


PAIRS = pytest.mark.parametrize(
    ("kind", "messages"), [pytest.param(kind, found, id=kind.__name__) for kind, found in by_type()]
)


def test_this_release_was_recorded_with_every_kind_of_message() -> None:
    assert recorded.RELEASE in BY_RELEASE, "record it: REWRITE_RECORDED=1 pytest tests/unit/node/test_upgrading.py"
    found = BY_RELEASE[recorded.RELEASE]["messages"]
    assert {name for name in KINDS if not found.get(name)} == set(), "messages were added: record them at the release"


def test_every_recorded_kind_still_exists() -> None:
    assert {name for name, _ in said()} <= KINDS.keys()


@PAIRS
def test_what_was_recorded_is_read_and_said_again_with_all_that_it_had(
    kind: type[msgspec.Struct], messages: list[bytes]
) -> None:
    for data in messages:
        message = msgspec.msgpack.decode(data, type=kind)
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        assert holds_all_of(with_defaults(message, again), msgspec.msgpack.decode(data))


@PAIRS
def test_what_a_newer_release_adds_changes_nothing(kind: type[msgspec.Struct], messages: list[bytes]) -> None:
    for data in messages:
        more = with_more(kind, msgspec.msgpack.decode(data))
        assert issubclass(kind, ExactMessage) or more != msgspec.msgpack.decode(data)
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(more), type=kind)
        assert read == msgspec.msgpack.decode(data, type=kind)


def test_the_comparison_sees_what_is_missing() -> None:
    assert holds_all_of({"a": 1, "b": [1, 2]}, {"b": [1]})
    assert not holds_all_of({"b": [1]}, {"a": 1, "b": [1]})
    assert not holds_all_of({"b": []}, {"b": [1]})
    assert not holds_all_of({"b": 2}, {"b": 1})


# -- joining ----------------------------------------------------------------------------------------------------------

RELEASES = pytest.mark.parametrize("joining", [pytest.param(each["joining"], id=r) for r, each in BY_RELEASE.items()])


def hello_of(joining: dict[str, str], **more: Any) -> control.Hello:
    fields = msgspec.msgpack.decode(bytes.fromhex(joining["hello"]))
    found = control.decode_greeting(msgspec.msgpack.encode([*fields, recorded.MORE]))
    assert isinstance(found, control.Hello)
    return msgspec.structs.replace(found, **more)


def tell_of(joining: dict[str, str]) -> Tell:
    frame = msgspec.msgpack.decode(bytes.fromhex(joining["tell"]), type=control.Message)
    assert isinstance(frame, control.NoticeFrame)
    return msgspec.msgpack.decode(frame.body, type=Tell)


@RELEASES
def test_a_member_of_an_earlier_release_comes_in_and_what_it_says_counts(joining: dict[str, str]) -> None:
    hello, node = hello_of(joining), make_node()
    record = Admission(KEY.public).check_greeting(hello, THERE.peer_id, 1e9)
    assert (record.role, record.host) == (Role.WORKER, "192.0.2.1")
    assert JoinToken.parse(joining["token"]).role is Role.WORKER
    node.on_opened(THERE.peer_id, hello.member, 0.0)
    assert node.on_received(THERE.peer_id, tell_of(joining), 0.0) == 0
    for now in (0.0, 0.5):
        node.tick(now, {THERE.peer_id: now}, {})
    assert node.coordinator == (THERE.peer_id, 3)
    view = NetworkView()
    held = {kind: {p: e.payload for p, e in node.table.entries(kind).items()} for kind in (ADVERT, LINKS, PLAN)}
    view.update(held[ADVERT])
    view.update_links(held[LINKS])
    assert set(view.adverts) == set(view.links_told) == {THERE.peer_id}
    assert read_manifest(held[PLAN][THERE.peer_id]) is not None


@RELEASES
def test_a_state_file_of_an_earlier_release_is_taken_up(joining: dict[str, str]) -> None:
    node = make_node()
    node.restore(msgspec.msgpack.decode(bytes.fromhex(joining["state"]), type=NetworkState), 0.0)
    assert node.table.record(THERE.peer_id) is not None
    assert node.state().orders is not None


@RELEASES
def test_who_speaks_another_protocol_is_refused_with_both_versions_and_its_release(joining: dict[str, str]) -> None:
    other = hello_of(joining, version=control.PROTOCOL_VERSION + 1, release="9.0")
    expected = rf"versions {other.version} \(release 9\.0\) and {control.PROTOCOL_VERSION} do not understand each other"
    with pytest.raises(ProtocolError, match=expected):
        Admission(KEY.public).check_greeting(other, THERE.peer_id, 1e9)


# -- what is new ------------------------------------------------------------------------------------------------------


@RELEASES
def test_an_entry_of_a_new_kind_is_kept_and_passed_on(joining: dict[str, str]) -> None:
    node, hello = make_node(), hello_of(joining)
    node.on_opened(THERE.peer_id, hello.member, 0.0)
    news = sign_entry(THERE, "tomorrow", 5, 99, b"\x01")
    assert node.on_received(THERE.peer_id, Tell((news,)), 0.0) == 0
    assert node.table.entry(THERE.peer_id, "tomorrow") == news
    assert news in node.table.delta_for({}, bytes(range(64)))


def test_a_new_method_is_refused_so_that_its_caller_can_tell_and_a_new_notice_is_dropped() -> None:
    handlers = Handlers()
    add_catalogue(handlers)
    with pytest.raises(RemoteError) as refused:
        trio.run(handlers.serve, THERE.peer_id, Role.WORKER, "decode.tomorrow", b"\xc0")
    assert refused.value.code == "unknown_method"
    handlers.notify(THERE.peer_id, Role.WORKER, "p2p.tomorrow", b"\xc1")  # whatever it says
    assert handlers.failed == 0


def test_this_node_and_the_recorded_one_are_two() -> None:
    assert HERE.peer_id != THERE.peer_id
