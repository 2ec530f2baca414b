"""Peers that send what they should not, and bugs of our own: each costs a session and no more."""

import msgspec
import pytest

from p2pserve.bootstrap import PeerId, Role
from p2pserve.bootstrap.members.election import CLAIM_KIND, encode_claim
from p2pserve.bootstrap.streams.control import Message, Reply, encode_notice
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
                connection.send_nowait(encode_notice("p2p.entries", msgspec.msgpack.encode([[claim]])))
            await elapse(5)
            assert w.nodes[0].coordinator == w.nodes[1].coordinator == before
            assert w.nodes[0].statistics().entries_forged >= 16
            assert PEOPLE[5].peer_id not in w.nodes[0].connected()

    simulate(main)


def test_garbage_in_an_answer_to_gossip_costs_only_that_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(2):
                await w.start(index)
            await elapse(1)

            end = w.air.end_of(PEOPLE[0].peer_id, PEOPLE[1].peer_id)
            send = end.send

            async def garble(frame: bytes) -> None:
                """Every answer of node 0 becomes a digest whose origin is no UTF-8."""
                message = msgspec.msgpack.decode(frame, type=Message)
                if isinstance(message, Reply):
                    nonsense = msgspec.Raw(b"\x93\x81\xa1\xff\x92\x01\x80\x80\x90")
                    frame = msgspec.msgpack.encode(Reply(message.id, nonsense))
                await send(frame)

            monkeypatch.setattr(end, "send", garble)
            await elapse(5)
            assert "answered a digest with nonsense" in caplog.text
            assert await w.nodes[0].request(PEOPLE[1].peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from worker")

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
