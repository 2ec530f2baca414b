"""Peers that send what they should not, and bugs of our own: each costs a session and no more."""

from functools import partial

import msgspec
import pytest

from p2pserve.bootstrap import Bootstrap, Network, PeerId, PeerLost, Refused, Role
from p2pserve.bootstrap.members.election import CLAIM_KIND, encode_claim
from p2pserve.bootstrap.members.states import Tell
from p2pserve.bootstrap.streams.control import Greeting, Rejected, encode_body, encode_greeting, encode_notice
from p2pserve.bootstrap.streams.transport import PeerConnection
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


def reject_as_doubled(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells everybody who dials it that their identity is in use."""

    async def greet(connection: PeerConnection) -> Greeting:
        await connection.receive()
        await connection.send(encode_greeting(Rejected("another node has this identity", 1)))
        raise PeerLost("no more of this")

    monkeypatch.setattr(network._sessions, "_receive_greeting", greet)


def test_a_peer_that_says_that_identities_are_in_use_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(5)
            reject_as_doubled(w.nodes[3], monkeypatch)
            for index in range(3):
                w.air.drop_connections(PEOPLE[3].peer_id, PEOPLE[index].peer_id)
            await elapse(60)
            for index in range(3):
                assert w.nodes[index].connected() == {PEOPLE[other].peer_id for other in range(3) if other != index}
            w.check_agreement(range(3))

    simulate(main)


def test_a_remembered_member_that_refuses_keeps_nobody_from_a_bootstrap_that_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(3):
                await w.start(index)
            await elapse(5)
            reject_as_doubled(w.nodes[2], monkeypatch)
            w.kill(0)
            remembered = (Bootstrap("192.0.2.1", 4002, PEOPLE[2].peer_id),)
            w.nursery.start_soon(partial(w.start, 5, remembered=remembered))
            await elapse(3)
            await w.start(0, ask=(Bootstrap("192.0.2.1", 4001, PEOPLE[1].peer_id),))
            await elapse(3)
            assert w.names(5) >= {0, 1, 5}
            w.kill(5)
            w.kill(0)
            with pytest.raises(Refused, match="another node has this identity"):
                await w.start(6, remembered=remembered)

    simulate(main)
