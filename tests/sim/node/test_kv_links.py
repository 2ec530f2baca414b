"""Which links an engine has: one for each two workers, agreed on once, and never one of an earlier life."""

import random

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pserve.bootstrap import NetworkError, PeerId, RequestTimeout
from p2pserve.kvtransport.wire.tickets import LinkTicket, issue_link
from p2pserve.node.engine.protocol import WorkerRank
from p2pserve.node.links.kv_links import LEASE_S, Ends, IncomingLinks, OutgoingLinks

P, Q = (Ends(PeerId(peer), WorkerRank(), WorkerRank()) for peer in "pq")
P1 = P._replace(source=WorkerRank(stage=1))


async def elapse(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def test_each_two_workers_have_one_link() -> None:
    links = IncomingLinks(random.Random(1).randbytes)
    ticket = links.of(P)
    assert links.of(P) is ticket
    assert ticket.lease_s == LEASE_S
    for other in (links.of(Q), links.of(P1), links.of(P._replace(target=WorkerRank(tp=1)))):
        assert {ticket.link, ticket.secret}.isdisjoint({other.link, other.secret})
        assert links.knows(other.link)
    assert links.knows(ticket.link)
    assert not links.knows(b"?" * 16)
    assert repr(links) == "<IncomingLinks 4>"


def test_a_sender_that_is_gone_leaves_no_link_behind() -> None:
    links = IncomingLinks(random.Random(1).randbytes)
    ticket, second, other = links.of(P), links.of(P1), links.of(Q)
    assert links.forget_peer(P.peer) == [ticket, second]
    assert links.forget_peer(P.peer) == []
    assert not any(links.knows(each.link) for each in (ticket, second))
    assert links.knows(other.link)
    again = links.of(P)
    assert again.link != ticket.link
    assert again.secret != ticket.secret
    links.forget_all()
    assert not any(links.knows(each.link) for each in (ticket, other, again))
    assert repr(links) == "<IncomingLinks 0>"


class Asked:
    """A node that answers with the link of its present life, after a second."""

    def __init__(self) -> None:
        self.questions: list[Ends] = []
        self.answers: dict[Ends, LinkTicket | NetworkError] = {}
        self._random = random.Random(2)

    def new(self, ends: Ends) -> LinkTicket:
        ticket = self.answers[ends] = issue_link(LEASE_S, self._random.randbytes)
        return ticket

    async def __call__(self, ends: Ends) -> LinkTicket:
        self.questions.append(ends)
        await elapse(1.0)
        answer = self.answers[ends]
        if isinstance(answer, NetworkError):
            raise answer
        return answer


def test_callers_share_one_question() -> None:
    async def main() -> None:
        asked = Asked()
        expected = {P: asked.new(P), Q: asked.new(Q), P1: asked.new(P1)}
        links = OutgoingLinks(asked)
        found: list[tuple[Ends, LinkTicket]] = []

        async def use(ends: Ends) -> None:
            found.append((ends, await links.to(ends, 1)))

        async with trio.open_nursery() as nursery:
            for ends in (P, P, Q, P, P1):
                nursery.start_soon(use, ends)
        assert len(asked.questions) == 3
        assert set(asked.questions) == {P, Q, P1}
        assert trio.current_time() == pytest.approx(1.0)  # nobody waits for another's question
        assert len(found) == 5
        assert all(ticket == expected[ends] for ends, ticket in found)
        assert await links.to(P, 1) == expected[P]
        assert len(asked.questions) == 3

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_restarted_engine_is_asked_again() -> None:
    async def main() -> None:
        asked = Asked()
        first = asked.new(P)
        links = OutgoingLinks(asked)
        assert await links.to(P, 1) == first
        second = asked.new(P)
        assert await links.to(P, 1) == first
        assert await links.to(P, 2) == second
        assert len(asked.questions) == 2

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_question_that_failed_is_asked_anew_by_the_next() -> None:
    async def main() -> None:
        asked = Asked()
        asked.answers[P] = RequestTimeout("no answer")
        links = OutgoingLinks(asked)
        with pytest.raises(RequestTimeout):
            await links.to(P, 1)
        expected = asked.new(P)
        assert await links.to(P, 1) == expected

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_caller_that_gives_up_leaves_the_question_to_the_next() -> None:
    async def main() -> None:
        asked = Asked()
        expected = asked.new(P)
        links = OutgoingLinks(asked)
        found: list[LinkTicket] = []

        async def use() -> None:
            found.append(await links.to(P, 1))

        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as first:
                nursery.start_soon(use)
                await wait_all_tasks_blocked()
                first.cancel()
            with trio.move_on_after(0.5):
                await links.to(P, 1)
        assert found == [expected]

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_what_is_forgotten_is_asked_for_again() -> None:
    async def main() -> None:
        asked = Asked()
        first = asked.new(P)
        links = OutgoingLinks(asked)
        links.forget(P)
        await links.to(P, 1)
        links.forget(P)
        assert links.forget_peer(P.peer) == []
        assert await links.to(P, 1) == first
        assert links.forget_peer(Q.peer) == []
        assert links.forget_peer(P.peer) == [first]
        second = asked.new(P)
        assert await links.to(P, 1) == second
        links.forget_all()
        assert repr(links) == "<OutgoingLinks 0>"
        assert await links.to(P, 1) == second
        assert len(asked.questions) == 4

    trio.run(main, clock=MockClock(autojump_threshold=0))
