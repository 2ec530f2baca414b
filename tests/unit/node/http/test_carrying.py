"""HTTP from a front over sessions to scripted API servers: what arrives, what moves elsewhere, what is called off."""

import json
import re

import h11
import pytest
import trio
import trio.testing

from p2pserve.node import methods
from p2pserve.node.http.admission import FrontRules
from p2pserve.node.http.messages import PIECE_BYTES, WINDOW_PIECES, HttpAnswer, HttpMore
from p2pserve.node.web.envelope import describe_error

from .http_world import (
    NO_HEADERS,
    Box,
    Script,
    Seen,
    Send,
    begin_and_wait,
    begin_events,
    echo,
    http_world,
    in_virtual_time,
    pass_time,
    stream_three,
    until,
    wait_long,
)

CHAT = "/v1/chat/completions"


def test_requests_and_answers_arrive_whole_on_one_connection() -> None:
    async def main() -> None:
        async with http_world(echo) as world:
            browser, box = world.connect(), world.boxes[0]
            told = await browser.ask(
                "GET", "/v1/models?limit=2", headers={"x-request-id": "mine-1", "authorization": "Bearer secret"}
            )
            assert told.status == 200
            assert json.loads(told.body) == {
                "box": box.peer,
                "method": "GET",
                "target": "/v1/models?limit=2",
                "size": 0,
            }
            assert told.headers["x-request-id"] == "mine-1"
            for size in (10, 300_000, 3_000_000):  # within the request, beyond it, and many windows
                told = await browser.ask("POST", CHAT, b"x" * size)
                assert json.loads(told.body)["size"] == size
            seen = box.seen[0].headers
            assert seen["x-p2p-client"] == world.client.peer_id
            assert "authorization" not in seen
            assert seen["x-request-id"] == "mine-1"
            await trio.testing.wait_all_tasks_blocked()
            assert "exchanges=0" in repr(world.asking)
            assert box.answering.is_idle

    in_virtual_time(main)


def test_a_stream_arrives_event_by_event() -> None:
    async def main() -> None:
        go_on = trio.Event()

        async def script(box: Box, seen: Seen, send: Send) -> None:
            await begin_events(send)
            await send(h11.Data(b"data: one\n\n"))
            await go_on.wait()
            await send(h11.Data(b"data: two\n\n"))
            await send(h11.EndOfMessage())

        async with http_world(script) as world:
            browser = world.connect()
            await browser.send("POST", CHAT, b"{}")
            head = await browser.event()
            assert isinstance(head, h11.Response)
            assert (await browser.event()).data == b"data: one\n\n"  # type: ignore[attr-defined]
            go_on.set()
            assert (await browser.event()).data == b"data: two\n\n"  # type: ignore[attr-defined]
            assert isinstance(await browser.event(), h11.EndOfMessage)

    in_virtual_time(main)


@pytest.mark.parametrize("how", ["no api", "draining", "503", "older release"])
def test_a_box_that_cannot_is_replaced(how: str) -> None:
    async def unavailable(box: Box, seen: Seen, send: Send) -> None:
        await send(h11.Response(status_code=503, headers=[("content-length", "0")]))
        await send(h11.EndOfMessage())

    async def main() -> None:
        async with http_world(unavailable if how == "503" else echo, echo) as world:
            first, second = world.boxes
            if how == "no api":
                first.has_api = False
            elif how == "draining":
                first.answering.drain()
            elif how == "older release":
                del first.network._handlers._requests[methods.HTTP_OPEN.name]
            told = await world.connect().ask("POST", CHAT, b"{}")
            assert json.loads(told.body)["box"] == second.peer
            if how == "503":  # of the last one it is the answer
                world.memory.kill(second.peer)
                told = await world.connect().ask("POST", CHAT, b"{}")
                assert told.status == 503

    in_virtual_time(main)


@pytest.mark.parametrize("size", [2, 1_000_000])
def test_a_request_of_which_nothing_was_answered_is_sent_again_elsewhere(size: int) -> None:
    async def main() -> None:
        async with http_world(wait_long, echo) as world:
            first, second = world.boxes
            browser = world.connect()
            await browser.send("POST", CHAT, b"y" * size)
            await until(lambda: first.seen)
            world.memory.kill(first.peer)
            told = await browser.read()
            assert json.loads(told.body) | {"target": CHAT} == {
                "box": second.peer,
                "method": "POST",
                "target": CHAT,
                "size": size,
            }

    in_virtual_time(main)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (CHAT, rb'data: one\n\ndata: \{"error":\{"message":"the box.*"code":502\}\}\n\ndata: \[DONE\]\n\n'),
        ("/v1/messages", rb'data: one\n\nevent: error\ndata: \{"type":"error",.*\}\n\n'),
        ("/v1/responses", rb'data: one\n\nevent: error\ndata: \{"type":"error","code":"502",.*\}\n\n'),
    ],
)
def test_a_stream_that_has_begun_ends_with_an_error_event(path: str, expected: bytes) -> None:
    async def main() -> None:
        async with http_world(begin_and_wait, echo) as world:
            browser = world.connect()
            await browser.send("POST", path, b"{}")
            assert isinstance(await browser.event(), h11.Response)
            first = await browser.event()
            assert isinstance(first, h11.Data)
            world.memory.kill(world.boxes[0].peer)
            body = first.data
            while isinstance(event := await browser.event(), h11.Data):
                body += event.data
            assert isinstance(event, h11.EndOfMessage)  # as a stream should end, for the client's parser
            assert re.fullmatch(expected, bytes(body))
            assert world.boxes[1].seen == []  # a part of an answer is not asked for twice

    in_virtual_time(main)


def test_an_answer_of_known_length_that_breaks_off_is_seen_to_be_short() -> None:
    async def script(box: Box, seen: Seen, send: Send) -> None:
        await send(h11.Response(status_code=200, headers=[("content-length", "100")]))
        await send(h11.Data(b"half"))
        await pass_time(1000)

    async def main() -> None:
        async with http_world(script) as world:
            browser = world.connect()
            await browser.send("GET", "/v1/models")
            await browser.event()
            await browser.event()
            world.memory.kill(world.boxes[0].peer)
            with pytest.raises(h11.RemoteProtocolError):
                await browser.event()

    in_virtual_time(main)


@pytest.mark.parametrize("script", [wait_long, begin_and_wait])
def test_a_client_that_hangs_up_cancels_at_the_box(script: Script) -> None:
    async def main() -> None:
        async with http_world(script) as world:
            browser, box = world.connect(), world.boxes[0]
            await browser.send("POST", CHAT, b"{}")
            await until(lambda: box.seen)
            await browser.stream.aclose()
            with trio.fail_after(3):
                await until(lambda: box.answering.is_idle)
            if script is begin_and_wait:
                await box.hung_up.wait()
            assert "connections=0 held=0" in repr(world.front)

    in_virtual_time(main)


def test_a_slow_reader_does_not_fill_the_box() -> None:
    async def flood(box: Box, seen: Seen, send: Send) -> None:
        await send(h11.Response(status_code=200, headers=[("content-type", "text/plain")]))
        for _ in range(400):
            await send(h11.Data(b"z" * PIECE_BYTES))
        await send(h11.EndOfMessage())

    async def main() -> None:
        async with http_world(flood) as world:
            browser, box = world.connect(), world.boxes[0]
            await browser.send("GET", "/v1/models")
            await pass_time(60)
            held = box.sent
            assert held <= (2 * WINDOW_PIECES + 8) * PIECE_BYTES
            await pass_time(60)
            assert box.sent == held
            told = await browser.read()
            assert len(told.body) == 400 * PIECE_BYTES

    in_virtual_time(main)


def test_an_api_server_that_does_not_read_is_not_filled() -> None:
    async def main() -> None:
        async with http_world(wait_long) as world:
            browser, box = world.connect(), world.boxes[0]
            box.read_body = False
            await browser.send("POST", CHAT, b"x" * 3_000_000)
            await pass_time(30)
            (answer,) = world.asking._answers.values()
            assert answer.upload.room == 0

    in_virtual_time(main)


def test_nobody_serves() -> None:
    async def main() -> None:
        async with http_world() as world:
            browser = world.connect()
            told = await browser.ask("POST", CHAT, b"{}")
            assert (told.status, told.headers["retry-after"]) == (503, "5")
            assert "no node of this network serves a model now" in json.loads(told.body)["error"]["message"]
            assert (await browser.ask("GET", "/health")).status == 503
            assert (await browser.ask("GET", "/live")).status == 200
        async with http_world(echo) as world:
            assert (await world.connect().ask("GET", "/health")).status == 200
            assert world.boxes[0].seen == []
            assert (await world.connect().ask("GET", "/health?generate=1")).status == 200
            assert world.boxes[0].seen[0].target == "/health?generate=1"

    in_virtual_time(main)


@pytest.mark.parametrize("status", [400, 413, 422, 429, 503, 504])
def test_what_a_box_refuses_is_told_as_it_is(status: int) -> None:
    said = describe_error(status, "body: why", "/v1/completions")

    async def refuse(box: Box, seen: Seen, send: Send) -> None:
        assert seen.headers["x-p2p-deadline-s"] == "2"
        headers = [("content-length", str(len(said))), ("retry-after", "7"), ("x-request-id", "of-the-box")]
        await send(h11.Response(status_code=status, headers=headers))
        await send(h11.Data(said))
        await send(h11.EndOfMessage())

    async def main() -> None:
        async with http_world(refuse) as world:
            told = await world.connect().ask("POST", "/v1/completions", b"{}", {"x-p2p-deadline-s": "2"})
            assert (told.status, told.headers["retry-after"], told.body) == (status, "7", said)
            assert told.headers["x-request-id"] == "of-the-box"

    in_virtual_time(main)


def test_keys_guard_all_but_health() -> None:
    async def main() -> None:
        async with http_world(echo, rules=FrontRules(keys=("secret-1", "secret-2"))) as world:
            browser = world.connect()
            for shown in (NO_HEADERS, {"authorization": "Bearer secret-3"}, {"x-api-key": "secret"}):
                told = await browser.ask("GET", "/v1/models", headers=shown)
                assert (told.status, told.headers["www-authenticate"]) == (401, "Bearer")
                assert json.loads(told.body)["error"]["type"] == "authentication_error"
            for shown in ({"authorization": "Bearer secret-1"}, {"x-api-key": "secret-2"}):
                told = await browser.ask("GET", "/v1/models", headers={**shown, "host": "box.example:80"})
                assert told.status == 200
            assert (await browser.ask("OPTIONS", "/v1/models")).status == 200
            assert (await browser.ask("GET", "/health")).status == 200
            assert (await browser.ask("HEAD", "/v1/models")).status == 401  # and no body, or the next would fail
            assert (await browser.ask("GET", "/metrics")).status == 401
        async with http_world(echo) as world:
            assert (await world.connect().ask("GET", "/v1/models", headers={"host": "evil.example"})).status == 403
            assert world.boxes[0].seen == []

    in_virtual_time(main)


def test_a_body_of_too_many_bytes_is_refused_before_it_is_sent() -> None:
    async def main() -> None:
        async with http_world(echo) as world:
            browser = world.connect()
            head = h11.Request(
                method="POST", target=CHAT, headers=[("host", "localhost"), ("content-length", str(17 << 20))]
            )
            await browser.stream.send_all(browser.http.send(head) or b"")
            told = await browser.read()
            assert (told.status, told.headers["connection"]) == (413, "close")
            assert "held=0" in repr(world.front)
            assert world.boxes[0].seen == []

    in_virtual_time(main)


@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 140_000, 431),
        (b"GET /v1/" + b"y" * 9_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 414),
    ],
)
def test_what_is_no_http_is_answered_and_closed(garbage: bytes, status: int) -> None:
    async def main() -> None:
        async with http_world(echo) as world:
            browser = world.connect()
            world.nursery.start_soon(browser.stream.send_all, garbage)
            browser.http.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
            assert (await browser.read()).status == status

    in_virtual_time(main)


def test_the_next_request_may_come_before_the_answer() -> None:
    async def main() -> None:
        async with http_world(stream_three) as world:
            browser = world.connect()
            head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
            world.nursery.start_soon(browser.stream.send_all, head + head)
            for _ in range(2):
                browser.http.send(h11.Request(method="GET", target="/v1/models", headers=[("host", "localhost")]))
                browser.http.send(h11.EndOfMessage())
                assert (await browser.read()).body == b"data: one\n\ndata: two\n\ndata: [DONE]\n\n"

    in_virtual_time(main)


def test_a_hostile_box_and_a_hostile_front_are_hung_up_on() -> None:
    async def main() -> None:
        async with http_world(wait_long) as world:
            browser, box = world.connect(), world.boxes[0]
            await browser.send("POST", CHAT, b"{}")
            await until(lambda: box.seen)
            (exchange,) = world.asking._answers
            for _ in range(20):  # a body without a head, of which some are forgiven
                box.network.notify(world.client.peer_id, methods.HTTP_ANSWER, HttpAnswer(exchange=exchange, data=b"x"))
            assert (await browser.read()).status == 503
        async with http_world(wait_long) as world:
            browser, box = world.connect(), world.boxes[0]
            await browser.send("POST", CHAT, b"{}")
            await until(lambda: box.seen)
            (exchange,) = world.asking._answers
            for _ in range(20):
                world.client.notify(box.peer, methods.HTTP_MORE, HttpMore(exchange=exchange, granted=8))
            await until(lambda: box.answering.is_idle)

    in_virtual_time(main)


def test_nobody_says_for_another_who_he_is() -> None:
    async def main() -> None:
        async with http_world(echo) as world:
            hostile = {"x-p2p-client": "somebody", "connection": "x-secret", "x-secret": "1"}
            assert (await world.connect().ask("POST", CHAT, b"x" * 10, hostile)).status == 200
            seen = world.boxes[0].seen[0].headers
            assert seen["x-p2p-client"] == world.client.peer_id
            assert "x-secret" not in seen

    in_virtual_time(main)


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200 OK\r\nconte", b"garbage\r\n\r\n"], ids=["nothing", "half a head", "garbage"]
)
def test_an_api_server_that_breaks_off_is_no_answer(said: bytes) -> None:
    async def main() -> None:
        async with http_world(echo) as world:
            box = world.boxes[0]

            async def connect() -> trio.abc.Stream:
                mine, theirs = trio.testing.memory_stream_pair()
                await theirs.send_all(said)
                await theirs.send_eof()
                return mine

            box.answering._connect = connect
            told = await world.connect().ask("POST", CHAT, b"{}")
            assert told.status == 503
            assert "the API server of this node broke off" in json.loads(told.body)["error"]["message"]
            assert box.answering.is_idle

    in_virtual_time(main)


def test_a_box_that_hangs_is_left_for_another_one() -> None:
    async def main() -> None:
        async with http_world(wait_long, echo) as world:
            first, second = world.boxes
            browser = world.connect()
            await browser.send("POST", CHAT, b"{}")
            await until(lambda: first.seen)
            world.asking._on_hung(first.peer, True)
            assert json.loads((await browser.read()).body)["box"] == second.peer
            await pass_time(1.0)
            assert first.answering.is_idle, "it was only slow, and is told to stop"

    in_virtual_time(main)


def test_a_box_that_hangs_for_a_moment_is_not_left() -> None:
    """For as long as it has taken so far: another one would take that, too."""

    async def main() -> None:
        async with http_world(wait_long, echo) as world:
            first, second = world.boxes
            browser = world.connect()
            await browser.send("POST", CHAT, b"{}")
            await until(lambda: first.seen)
            await pass_time(10.0)
            world.asking._on_hung(first.peer, True)
            await pass_time(8.0)
            world.asking._on_hung(first.peer, False)
            await pass_time(8.0)
            assert not second.seen
            world.asking._on_hung(first.peer, True)
            began = trio.current_time()
            assert json.loads((await browser.read()).body)["box"] == second.peer
            assert trio.current_time() - began == pytest.approx(26.0, abs=1.0)

    in_virtual_time(main)


def test_a_box_that_hangs_before_it_has_taken_a_request_is_left_too() -> None:
    async def main() -> None:
        async with http_world(echo, echo) as world:
            first, second = world.boxes
            asked = trio.Event()

            async def connect() -> trio.abc.Stream:
                asked.set()
                await trio.sleep_forever()
                raise AssertionError

            first.answering._connect = connect
            browser = world.connect()
            await browser.send("POST", CHAT, b"{}")
            await asked.wait()
            world.asking._on_hung(first.peer, True)
            with trio.fail_after(2):
                assert json.loads((await browser.read()).body)["box"] == second.peer
            await until(lambda: first.answering.is_idle)

    in_virtual_time(main)
