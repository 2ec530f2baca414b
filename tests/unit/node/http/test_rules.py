"""What a front lets in, what passes of a request's fields, and the form of errors: plain values."""

import json

import pytest

from p2pserve.bootstrap import Address, Role
from p2pserve.bootstrap.errors import AddressError, ProtocolError
from p2pserve.node.http.admission import FrontRules, check_listen, judge
from p2pserve.node.http.bodies import BodyInlet, BodyOutlet
from p2pserve.node.http.event_stream import MAX_EVENT_BYTES, EventSplitter
from p2pserve.node.http.headers import drop_hop_by_hop, pass_request, to_api_server
from p2pserve.node.http.messages import WINDOW_PIECES, HttpHeader
from p2pserve.node.web.envelope import describe_error, describe_event
from p2pserve.node.web.fields import is_allowed, pick_request_id
from p2pserve.node.web.paths import find_refusal, path_of

KEYED = FrontRules(keys=("secret-1",))
LOCAL = [(b"Host", b"127.0.0.1:8000")]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "x.localhost"])
def test_this_machine_alone_needs_no_key(host: str) -> None:
    check_listen(Address(host, 8000), FrontRules())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "box.example"])
def test_a_port_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(AddressError, match=r"^http: .*--api-key"):
        check_listen(Address(host, 8000), FrontRules())
    check_listen(Address(host, 8000), KEYED)


@pytest.mark.parametrize(
    ("method", "target", "role", "status"),
    [
        ("POST", "/v1/chat/completions", Role.CLIENT, None),
        ("GET", "/metrics", Role.CLIENT, None),
        ("GET", "/v1", Role.WORKER, None),
        ("GET", "/v10/x", Role.CLIENT, 404),
        ("GET", "/", Role.ADMIN, 404),
        ("GET", "/v1/../p2p/v1/nodes", Role.CLIENT, 404),
        ("GET", "/v1/%2e%2e/p2p/v1/nodes", Role.CLIENT, 404),
        ("GET", "/v1/..%2Fp2p", Role.CLIENT, 404),
        ("GET", "//evil.example/v1", Role.CLIENT, 404),
        ("GET", "http://evil.example/v1", Role.CLIENT, 404),
        ("GET", "/v1/\x7f", Role.CLIENT, 404),
        ("OPTIONS", "*", Role.CLIENT, 404),
        ("TRACE", "/v1", Role.CLIENT, 405),
        ("CONNECT", "a:1", Role.CLIENT, 405),
        ("GET", "/p2p/v1/nodes", Role.CLIENT, 403),
        ("GET", "/p2p/v1/nodes", Role.WORKER, 403),
        ("GET", "/p2p/v1/nodes", Role.ADMIN, None),
        ("GET", "/dashboard/", Role.CLIENT, 403),
    ],
)
def test_which_requests_are_carried_and_for_whom(method: str, target: str, role: Role, status: int | None) -> None:
    refusal = find_refusal(method, target, role)
    assert (refusal[0] if refusal is not None else None) == status


def test_a_path_ends_before_the_query() -> None:
    assert path_of("/v1/models?a=/../b") == "/v1/models"
    assert path_of("/v1/models") == "/v1/models"


@pytest.mark.parametrize("shown", [(b"Authorization", b"bearer  secret-1"), (b"X-API-Key", b"secret-1")])
def test_a_key_is_shown_as_either_client_does(shown: tuple[bytes, bytes]) -> None:
    assert is_allowed([shown], ("secret-0", "secret-1"))
    assert not is_allowed([shown], ("secret-0",))
    assert judge("GET", "/v1/models", [shown], KEYED) is None


@pytest.mark.parametrize(
    "shown", [[], [(b"authorization", b"secret-1")], [(b"authorization", b"Basic secret-1")], [(b"x-api-key", b"")]]
)
def test_what_is_no_key_lets_nobody_in(shown: list[tuple[bytes, bytes]]) -> None:
    refusal = judge("GET", "/v1/models", shown, KEYED)
    assert refusal is not None
    assert refusal.status == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost:8000", None),
        (b"[::1]:8000", None),
        (b"127.0.0.1", None),
        (b"evil.example", 403),
        (b"127.0.0.1.evil.example", 403),
        (b"[::2]", 403),
    ],
)
def test_without_a_key_only_names_of_this_machine_are_answered(host: bytes, status: int | None) -> None:
    refusal = judge("GET", "/v1/models", [(b"host", host)], FrontRules())
    assert (refusal.status if refusal is not None else None) == status


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ("/v1/" + "x" * 9000, LOCAL, 414),
        ("/v1", [*LOCAL, *[(b"x", b"y")] * 128], 431),
        ("/v1", [*LOCAL, (b"x", b"y" * 17_000)], 431),
        ("/v1", [*LOCAL, (b"x" * 129, b"y")], 431),
        ("/v1", [*LOCAL, *[(b"x", b"y" * 16_000)] * 5], 431),
    ],
)
def test_what_no_message_holds_is_refused_at_the_front(
    target: str, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    refusal = judge("GET", target, headers, FrontRules())
    assert refusal is not None
    assert refusal.status == status


def test_fields_for_one_hop_do_not_pass() -> None:
    headers = [
        (b"Connection", b"close, X-Mine"),
        (b"X-Mine", b"1"),
        (b"Keep-Alive", b"5"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Upgrade", b"websocket"),
        (b"TE", b"trailers"),
        (b"Accept", b"*/*"),
    ]
    assert drop_hop_by_hop(headers) == [(b"Accept", b"*/*")]


def test_how_long_an_answer_may_take_passes() -> None:
    passed = pass_request([(b"X-P2P-Deadline-S", b"3"), (b"x-p2p-role", b"admin")], b"new")
    assert passed == (HttpHeader(b"x-p2p-deadline-s", b"3"), HttpHeader(b"x-request-id", b"new"))
    for role in Role:
        fields = dict(to_api_server([*passed, HttpHeader(b"X-P2P-Role", b"admin")], "12D3", role))
        assert fields[b"x-p2p-deadline-s"] == b"3"
        assert fields.get(b"x-p2p-role") == (b"admin" if role is Role.ADMIN else None)


def test_keys_and_what_boxes_add_do_not_pass() -> None:
    headers = [
        (b"Host", b"localhost"),
        (b"Authorization", b"Bearer secret"),
        (b"X-Api-Key", b"secret"),
        (b"X-P2P-Client", b"somebody"),
        (b"X-Request-ID", b"old"),
        (b"Content-Type", b"application/json"),
    ]
    passed = pass_request(headers, b"new")
    assert passed == (HttpHeader(b"content-type", b"application/json"), HttpHeader(b"x-request-id", b"new"))
    hostile = (*passed, HttpHeader(b"X-P2P-Client", b"somebody"), HttpHeader(b"host", b"a"), HttpHeader(b"TE", b"x"))
    assert to_api_server(hostile, "peer-1", Role.WORKER) == [
        (b"host", b"p2pserve"),
        (b"content-type", b"application/json"),
        (b"x-request-id", b"new"),
        (b"x-p2p-client", b"peer-1"),
        (b"connection", b"close"),
    ]


def test_an_admins_front_says_by_which_name_it_was_asked_and_its_box_whose_it_is() -> None:
    headers = [(b"Host", b"localhost:8000"), (b"Authorization", b"Bearer secret"), (b"X-P2P-Role", b"admin")]
    passed = pass_request(headers, b"new", names_front=True)
    assert passed == (HttpHeader(b"host", b"localhost:8000"), HttpHeader(b"x-request-id", b"new"))
    for role, host in ((Role.ADMIN, b"localhost:8000"), (Role.CLIENT, b"p2pserve"), (Role.WORKER, b"p2pserve")):
        told = to_api_server((*passed, HttpHeader(b"x-p2p-role", b"admin")), "peer-1", role)
        assert [value for name, value in told if name == b"host"] == [host]
        assert [value for name, value in told if name == b"x-p2p-role"] == [b"admin"] * (role is Role.ADMIN)


def test_a_request_id_is_kept_if_it_may_be_printed() -> None:
    assert pick_request_id([(b"X-Request-Id", b"run-7.a_B")]) == b"run-7.a_B"
    for bad in (b"", b"a b", b"x" * 129, b"\xff", b"a\x1b[2J"):
        assert len(pick_request_id([(b"x-request-id", bad)])) == 32


def test_errors_have_the_form_of_the_client() -> None:
    assert json.loads(describe_error(413, "body: too long", "/v1/completions")) == {
        "error": {"message": "body: too long", "type": "request_too_large", "param": "body", "code": 413}
    }
    assert json.loads(describe_error(504, "it took: long", "/v1/messages")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "it took: long"},
    }
    assert describe_event(502, "lost", "/v1/completions").endswith(b"\n\ndata: [DONE]\n\n")
    assert describe_event(502, "lost", "/v1/messages").startswith(b"event: error\ndata: {")
    assert b"\n" not in describe_error(502, "two\nlines", "/")


def test_only_whole_events_pass() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1") == b""
    assert splitter.feed(b"\n") == b""
    assert splitter.feed(b"\ndata: 2\n\nda") == b"data: 1\n\ndata: 2\n\n"
    assert splitter.feed(b"ta: 3\r\n\r") == b""
    assert splitter.feed(b"\n") == b"data: 3\r\n\r\n"
    assert splitter.rest == b""
    assert splitter.feed(b"x" * MAX_EVENT_BYTES) == b""
    assert splitter.feed(b"x") == b"x" * (MAX_EVENT_BYTES + 1)


def test_a_side_that_takes_more_than_it_was_given_is_found_out() -> None:
    outlet, inlet = BodyOutlet(), BodyInlet()
    with pytest.raises(ProtocolError, match="granted"):
        outlet.grant(1)
    for _ in range(WINDOW_PIECES):
        inlet.put(b"x", ended=False)
    with pytest.raises(ProtocolError, match="not granted"):
        inlet.put(b"x", ended=False)
    inlet.put(b"", ended=True)
    with pytest.raises(ProtocolError, match="after its end"):
        inlet.put(b"", ended=True)
    assert inlet.take_grant() == 0
