"""Whatever the other side of an exchange says: it is refused or taken, and what is held of it is bounded."""

import random

import pytest
import trio

from p2pserve.bootstrap import PeerId
from p2pserve.bootstrap.errors import ProtocolError
from p2pserve.node.http.asking import AnswerLost, CarriedAnswer
from p2pserve.node.http.messages import PIECE_BYTES, WINDOW_PIECES, HttpAnswer, HttpHeader, HttpMore


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
