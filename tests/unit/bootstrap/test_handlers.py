"""Which handler gets what, who may call it, and what its failures cost."""

import logging

import msgspec
import pytest
import trio

from p2pserve.bootstrap import Identity, PeerId, RemoteError, Role
from p2pserve.bootstrap.errors import ProtocolError
from p2pserve.bootstrap.handlers import Handlers
from p2pserve.bootstrap.methods import EVERYONE, Method, Notice

PEER = Identity(b"p" * 32).peer_id


class Number(msgspec.Struct, frozen=True):
    value: int


DOUBLE = Method("double", Number, Number)
COUNT = Method("count", Number, Number, EVERYONE)
TELL = Notice("tell", Number)
SAY = Notice("say", Number, EVERYONE)


def body(value: int) -> bytes:
    return msgspec.msgpack.encode(Number(value))


async def double(peer: PeerId, role: Role, number: Number) -> Number:
    if number.value == 0:
        raise ZeroDivisionError("a bug")
    if number.value < 0:
        raise RemoteError("negative", "no negative numbers")
    if number.value > 1000:
        raise ProtocolError("too large")
    return Number(2 * number.value)


@pytest.fixture
def handlers() -> Handlers:
    found = Handlers()
    found.add_request(DOUBLE, double)
    found.add_request(COUNT, double)
    return found


def serve(handlers: Handlers, method: str, value: int, role: Role = Role.WORKER) -> int:
    return msgspec.msgpack.decode(trio.run(handlers.serve, PEER, role, method, body(value)), type=Number).value


def test_a_request_is_answered_and_counted(handlers: Handlers) -> None:
    assert serve(handlers, "double", 4) == 8
    assert (handlers.served, handlers.failed) == (1, 0)


@pytest.mark.parametrize(
    ("method", "value", "role", "code", "failed"),
    [
        ("missing", 1, Role.WORKER, "unknown_method", 0),
        ("double", 1, Role.CLIENT, "forbidden", 0),
        ("double", -1, Role.WORKER, "negative", 1),
        ("double", 0, Role.ADMIN, "internal", 1),
    ],
)
def test_what_cannot_be_answered_has_a_code(
    handlers: Handlers, method: str, value: int, role: Role, code: str, failed: int
) -> None:
    with pytest.raises(RemoteError) as caught:
        serve(handlers, method, value, role)
    assert caught.value.code == code
    assert handlers.failed == failed


def test_a_bug_is_logged_with_its_traceback_and_not_told(handlers: Handlers, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(RemoteError, match="its log has the details") as caught:
        serve(handlers, "double", 0)
    assert "ZeroDivisionError: a bug" in caplog.text
    assert "a bug" not in str(caught.value)


def test_a_body_of_another_type_is_the_senders_fault(handlers: Handlers) -> None:
    with pytest.raises(ProtocolError, match="the body of 'double' is malformed"):
        trio.run(handlers.serve, PEER, Role.WORKER, "double", b"\x93\x01\x02\x03")
    with pytest.raises(ProtocolError, match="too large"):
        serve(handlers, "double", 2000)
    assert handlers.failed == 1


def test_everyone_may_call_what_is_for_everyone(handlers: Handlers) -> None:
    assert serve(handlers, "count", 5, Role.CLIENT) == 10


def test_a_notice_is_delivered_to_its_handler_only(caplog: pytest.LogCaptureFixture) -> None:
    handlers, heard = Handlers(), list[tuple[Role, int]]()

    def take(peer: PeerId, role: Role, number: Number) -> None:
        heard.append((role, number.value))
        if number.value == 0:
            raise ZeroDivisionError("a bug")
        if number.value < 0:
            raise ProtocolError("negative")

    handlers.add_notice(TELL, take)
    handlers.add_notice(SAY, take)
    handlers.notify(PEER, Role.WORKER, "tell", body(1))
    handlers.notify(PEER, Role.CLIENT, "say", body(2))
    handlers.notify(PEER, Role.WORKER, "of a newer release", body(3))
    with pytest.raises(ProtocolError, match="clients may not"):
        handlers.notify(PEER, Role.CLIENT, "tell", body(4))
    with pytest.raises(ProtocolError, match="negative"):
        handlers.notify(PEER, Role.WORKER, "tell", body(-1))
    assert handlers.failed == 0
    with caplog.at_level(logging.ERROR):
        handlers.notify(PEER, Role.WORKER, "tell", body(0))
    assert handlers.failed == 1
    assert "ZeroDivisionError: a bug" in caplog.text
    assert heard == [(Role.WORKER, 1), (Role.CLIENT, 2), (Role.WORKER, -1), (Role.WORKER, 0)]


def test_a_method_has_one_handler(handlers: Handlers) -> None:
    with pytest.raises(ValueError, match="'double' has a handler already"):
        handlers.add_request(DOUBLE, double)
    assert "double" in repr(handlers)
