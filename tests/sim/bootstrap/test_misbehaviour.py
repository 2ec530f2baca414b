"""Peers that send what they should not, and bugs of our own: each costs a session and no more."""

import msgspec
import pytest

from p2pserve.bootstrap import PeerId, Role
from p2pserve.bootstrap.members.election import CLAIM_KIND, encode_claim
from p2pserve.bootstrap.members.states import Tell
from p2pserve.bootstrap.streams.control import encode_body, encode_notice
from p2pserve.bootstrap.trust.entries import sign_entry

from .worlds import PEOPLE, Echo, asking, elapse, simulate, world


def test_a_client_that_claims_leads_nobody_and_is_thrown_out() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(2):
                await w.start(index)
            client = await w.start(5, role=Role.CLIENT)
            await elapse(5)
            before = w.nodes[0].coordinator
            connection = w.air.end_of(client.peer_id, PEOPLE[0].peer_id)
            (life,) = [member.incarnation for member in client.members() if member.peer_id == client.peer_id]
            for epoch in range(50, 70):
                claim = sign_entry(PEOPLE[5], CLAIM_KIND, life, epoch, encode_claim(epoch))
                connection.send_nowait(encode_notice("p2p.tell", encode_body(Tell((claim,)))))
            await elapse(5)
            assert w.nodes[0].coordinator == w.nodes[1].coordinator == before
            assert w.nodes[0].statistics().entries_forged >= 16
            assert PEOPLE[5].peer_id not in w.nodes[0].connected()

    simulate(main)


def test_messages_of_a_newer_release_are_skipped() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(2):
                await w.start(index)
            end = w.air.end_of(PEOPLE[0].peer_id, PEOPLE[1].peer_id)
            for _ in range(50):
                end.send_nowait(msgspec.msgpack.encode(["z", 7, {"a": 1}]))  # a kind of message that is not known
                end.send_nowait(encode_notice("p2p.news", b"\xa1a"))  # a notice that is not known
                end.send_nowait(encode_notice("p2p.tell", msgspec.msgpack.encode([[], [], None, None, False, "more"])))
            await elapse(5)
            assert await w.nodes[0].request(PEOPLE[1].peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from worker")
            assert PEOPLE[0].peer_id in w.nodes[1].connected()

    simulate(main)


@pytest.mark.parametrize("dialler", [0, 1])
def test_a_bug_in_a_session_costs_only_that_session(
    dialler: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dialled: node 1 dialled node 0, its bootstrap."""

    async def main() -> None:
        async with world() as w:
            for index in range(2):
                await w.start(index)
            await elapse(6)
            victim, other = w.nodes[dialler], w.nodes[1 - dialler]
            lost: list[PeerId] = []
            victim.on_peer_lost(lost.append)

            async def fail() -> bytes:
                raise KeyError("a bug")

            monkeypatch.setattr(w.air.end_of(victim.peer_id, other.peer_id), "receive", fail)
            other.publish("load", b"1")
            await elapse(5)
            assert lost == [other.peer_id]
            assert victim.entries("load") == {other.peer_id: b"1"}, "connected again, and gossip brought it"
            w.check_full_mesh()
            assert "KeyError: 'a bug'" in caplog.text

    simulate(main)


def test_a_peer_that_sends_garbage_is_disconnected_and_the_rest_goes_on() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(3):
                await w.start(index)
            await elapse(3)
            for _ in range(20):
                w.air.end_of(PEOPLE[1].peer_id, PEOPLE[0].peer_id).send_nowait(b"\xc1 nonsense")
            await elapse(0.2)
            assert PEOPLE[1].peer_id not in w.nodes[0].connected()
            await elapse(30)
            assert PEOPLE[1].peer_id not in w.nodes[0].connected(), "banned for a minute"
            assert w.nodes[0].connected() == {PEOPLE[2].peer_id}
            await elapse(90)
            w.check_full_mesh()

    simulate(main)
