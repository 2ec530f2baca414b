"""Which links an engine has: one per peer, agreed on once, and never one of an earlier life."""

import random

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pserve.bootstrap import NetworkError, PeerId, RequestTimeout
from p2pserve.kvtransport.tickets import LinkTicket, issue_link
from p2pserve.node.kv_links import LEASE_S, IncomingLinks, OutgoingLinks

P, Q = PeerId("p"), PeerId("q")


async def elapse(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def test_each_sender_has_one_link() -> None:
    links = IncomingLinks(random.Random(1).randbytes)
    ticket = links.of(P)
    assert links.of(P) is ticket
    assert ticket.lease_s == LEASE_S
    other = links.of(Q)
    assert {ticket.link, ticket.secret}.isdisjoint({other.link, other.secret})
    assert links.knows(ticket.link)
    assert links.knows(other.link)
    assert not links.knows(b"?" * 16)
    assert repr(links) == "<IncomingLinks 2>"


def test_a_sender_that_is_gone_leaves_no_link_behind() -> None:
    links = IncomingLinks(random.Random(1).randbytes)
    ticket, other = links.of(P), links.of(Q)
    assert links.forget_peer(P) == ticket
    assert links.forget_peer(P) is None
    assert not links.knows(ticket.link)
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
        self.questions: list[PeerId] = []
        self.answers: dict[PeerId, LinkTicket | NetworkError] = {}
        self._random = random.Random(2)

    def new(self, peer: PeerId) -> LinkTicket:
        ticket = self.answers[peer] = issue_link(LEASE_S, self._random.randbytes)
        return ticket

    async def __call__(self, peer: PeerId) -> LinkTicket:
        self.questions.append(peer)
        await elapse(1.0)
        answer = self.answers[peer]
        if isinstance(answer, NetworkError):
            raise answer
        return answer


def test_callers_share_one_question() -> None:
    async def main() -> None:
        asked = Asked()
        expected = {P: asked.new(P), Q: asked.new(Q)}
        links = OutgoingLinks(asked)
        found: list[tuple[PeerId, LinkTicket]] = []

        async def use(peer: PeerId) -> None:
            found.append((peer, await links.to(peer, 1)))

        async with trio.open_nursery() as nursery:
            for peer in (P, P, Q, P):
                nursery.start_soon(use, peer)
        assert sorted(asked.questions) == [P, Q]
        assert trio.current_time() == pytest.approx(1.0)  # two peers do not wait for each other
        assert len(found) == 4
        assert all(ticket == expected[peer] for peer, ticket in found)
        assert await links.to(P, 1) == expected[P]
        assert len(asked.questions) == 2

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
        assert links.forget(P) is None
        await links.to(P, 1)
        assert links.forget(P) == first
        second = asked.new(P)
        assert await links.to(P, 1) == second
        links.forget_all()
        assert repr(links) == "<OutgoingLinks 0>"
        await links.to(P, 1)
        assert len(asked.questions) == 3

    trio.run(main, clock=MockClock(autojump_threshold=0))
