"""Whatever bytes a peer sends, decoding fails as nonsense and never as a bug of this node."""

import msgspec
import pytest

from p2pserve.bootstrap import DECODE_ERRORS, Identity, PeerId, Role
from p2pserve.bootstrap.errors import ProtocolError
from p2pserve.bootstrap.handlers import Handlers
from p2pserve.bootstrap.members.election import decode_claim
from p2pserve.bootstrap.methods import Notice
from p2pserve.bootstrap.streams.control import decode_greeting
from p2pserve.bootstrap.trust.entries import read_record

NO_TEXT = b"\xa1\xff"
DEEP = b"\x91" * 200_000
PEER: PeerId = Identity(b"p" * 32).peer_id


class Body(msgspec.Struct, array_like=True):
    text: str


@pytest.mark.parametrize("data", [b"\x91" + NO_TEXT, b"\x92\xa1a" + DEEP, b"\x91\x01", b"\xc1"])
def test_the_one_list_of_decoding_errors_is_complete(data: bytes) -> None:
    with pytest.raises(DECODE_ERRORS):
        msgspec.msgpack.decode(data, type=Body)


@pytest.mark.parametrize("data", [b"\x92\xa1x" + NO_TEXT, b"\x93\xa1x\xa1a" + DEEP, NO_TEXT, DEEP, b"\x92" + NO_TEXT])
def test_a_greeting(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="greeting is malformed"):
        decode_greeting(data)


@pytest.mark.parametrize("data", [b"\x95" + NO_TEXT, b"\x95\xa6worker" + NO_TEXT, b"\x91" + DEEP, NO_TEXT])
def test_a_member_record_and_a_claim(data: bytes) -> None:
    assert read_record(data) is None
    assert decode_claim(data, (1, 1)) is None


@pytest.mark.parametrize("data", [b"\x91" + NO_TEXT, b"\x92\xa1a" + DEEP])
def test_a_body(data: bytes) -> None:
    handlers = Handlers()

    def take(peer: PeerId, role: Role, body: Body) -> None:
        pytest.fail("never called")

    handlers.add_notice(Notice("tell", Body), take)

    with pytest.raises(ProtocolError, match="the body of 'tell' is malformed"):
        handlers.notify(PEER, Role.WORKER, "tell", data)
