"""Whatever the other side of an exchange says: it is refused or taken, and what is held of it is bounded."""

import json
import random

import h11
import msgspec
import pytest
import trio

from p2pserve.bootstrap import PeerId, RemoteError
from p2pserve.bootstrap.errors import ProtocolError
from p2pserve.node import methods
from p2pserve.node.http.answering import EXCHANGES_EACH, STALLED_S
from p2pserve.node.http.asking import AnswerLost, CarriedAnswer
from p2pserve.node.http.messages import PIECE_BYTES, WINDOW_PIECES, HttpAnswer, HttpHeader, HttpMore, HttpOpen
from p2pserve.node.messages import StopRequest

from .http_world import Box, Seen, Send, echo, http_world, in_virtual_time, pass_time, until, wait_long

CHAT = "/v1/chat/completions"


def any_answer(rng: random.Random) -> HttpAnswer:
    return HttpAnswer(
        exchange="x",
        status=rng.choice((0, 0, 0, 0, 100, 200, 599)),
        headers=(HttpHeader(b"a", b"b"),) * rng.randrange(2),
        data=b"d" * rng.choice((0, 0, 1, PIECE_BYTES)),
        ended=rng.random() < 0.05,
        granted=rng.choice((0, 0, 0, 1, WINDOW_PIECES)),
        failed="why" * (rng.random() < 0.02),
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_answers_in_any_order(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        told: list[HttpMore] = []
        answer = CarriedAnswer(PeerId("box"), "x", told.append)
        given = taken = pieces = 0
        for _ in range(300):
            said = any_answer(rng)
            try:
                answer.on_answer(said)
                given += len(said.data)
            except ProtocolError:
                pass
            assert 0 <= answer.upload.room <= WINDOW_PIECES
            assert given - taken <= WINDOW_PIECES * PIECE_BYTES
            if rng.random() < 0.3 and given > taken:
                taken += len(await answer.read())
                pieces += 1
            assert sum(more.granted for more in told) <= pieces
        answer.lose("the connection broke")
        try:
            while data := await answer.read():
                taken += len(data)
        except AnswerLost:
            assert not answer.has_ended
        assert taken == given

    trio.run(main)


def test_a_front_that_sends_less_than_it_said_is_told() -> None:
    async def main() -> None:
        async with http_world(echo) as world:
            box = world.boxes[0]
            answer = CarriedAnswer(box.peer, "mine", lambda said: None)
            world.asking._answers["mine"] = answer
            opening = HttpOpen(
                exchange="mine",
                method="POST",
                target=CHAT,
                headers=(HttpHeader(b"content-length", b"10"),),
                data=b"12345",
                ended=False,
            )
            await world.client.request(box.peer, methods.HTTP_OPEN, opening, 5.0)
            world.client.notify(box.peer, methods.HTTP_MORE, HttpMore(exchange="mine", data=b"6", ended=True))
            with pytest.raises(Exception, match="the request's body is malformed"):
                await answer.wait_head()
            await until(lambda: box.answering.is_idle)
            opening = msgspec.structs.replace(opening, exchange="other", headers=(HttpHeader(b"x", b"a\r\nb: c"),))
            with pytest.raises(RemoteError, match="this is no HTTP request"):
                await world.client.request(box.peer, methods.HTTP_OPEN, opening, 5.0)
            assert box.answering.is_idle

    in_virtual_time(main)


def test_an_answer_that_nobody_takes_is_given_up() -> None:
    async def flood(box: Box, seen: Seen, send: Send) -> None:
        await send(h11.Response(status_code=200, headers=[("content-type", "text/plain")]))
        while True:
            await send(h11.Data(b"z" * PIECE_BYTES))

    async def main() -> None:
        async with http_world(flood) as world:
            browser, box = world.connect(), world.boxes[0]
            await browser.send("GET", "/v1/models")
            await pass_time(STALLED_S - 10)
            assert "exchanges=1" in repr(box.answering)
            await pass_time(20)
            assert box.answering.is_idle
            with pytest.raises(h11.RemoteProtocolError):
                await browser.read()

    in_virtual_time(main)


def test_a_box_takes_so_many_of_one_peer_and_the_rest_is_told_when_to_come() -> None:
    async def main() -> None:
        async with http_world(wait_long) as world:
            box = world.boxes[0]
            for number in range(EXCHANGES_EACH):
                opening = HttpOpen(exchange=f"e{number}", method="GET", target="/v1/models")
                await world.client.request(box.peer, methods.HTTP_OPEN, opening, 5.0)
            told = await world.connect().ask("GET", "/v1/models")
            assert told.status == 503
            assert "too many HTTP requests" in json.loads(told.body)["error"]["message"]
            for number in range(EXCHANGES_EACH):
                world.client.notify(box.peer, methods.HTTP_STOP, StopRequest(request=f"e{number}"))
            await until(lambda: box.answering.is_idle)

    in_virtual_time(main)
