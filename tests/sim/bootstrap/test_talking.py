"""Requests and notices between members, and what a lost connection does to them."""

import logging

import pytest
import trio

from p2pserve.bootstrap import MemberState, PeerId, PeerLost, RemoteError, RequestTimeout, Role
from p2pserve.bootstrap.errors import ProtocolError
from p2pserve.bootstrap.methods import EVERYONE, Method

from .worlds import PEOPLE, Echo, Wrong, asking, elapse, simulate, telling, world


def test_requests_and_their_failures(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with world() as w:
            one, other = await w.start(0), await w.start(1)
            peer = other.peer_id

            async def refuse(peer: PeerId, role: Role, body: Echo) -> Echo:
                raise RemoteError("full", "no room for another one")

            async def crash(peer: PeerId, role: Role, body: Echo) -> Echo:
                raise KeyError("a bug")

            async def hang(peer: PeerId, role: Role, body: Echo) -> Echo:
                await trio.sleep_forever()

            async def huge(peer: PeerId, role: Role, body: Echo) -> Echo:
                return Echo("x" * 5_000_000)

            for name, handler in (("refuse", refuse), ("crash", crash), ("hang", hang), ("huge", huge)):
                other.handle(asking(name), handler)
            assert await one.request(peer, asking("echo"), Echo("a"), 1.0) == Echo("a from worker")
            assert await one.request(one.peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from worker")
            for method, code in (
                ("refuse", "full"),
                ("crash", "internal"),
                ("huge", "too_large"),
                ("missing", "unknown_method"),
            ):
                with pytest.raises(RemoteError) as caught:
                    await one.request(peer, asking(method), Echo("a"), 1.0)
                assert caught.value.code == code
            assert "KeyError: 'a bug'" in caplog.text
            with pytest.raises(RequestTimeout, match="did not answer 'hang' within 1 s"):
                await one.request(peer, asking("hang"), Echo("a"), 1.0)
            with pytest.raises(RemoteError, match="malformed"):
                await one.request(peer, Method("echo", Wrong, Echo), Wrong(1), 1.0)
            with pytest.raises(ProtocolError, match="exceeds 4194304"):
                await one.request(peer, asking("echo"), Echo("x" * 5_000_000), 1.0)
            with pytest.raises(PeerLost, match="not connected"):
                await one.request(PEOPLE[7].peer_id, asking("echo"), Echo("a"), 1.0)
            assert await one.request(peer, asking("echo"), Echo("still here"), 1.0) == Echo("still here from worker")

    with caplog.at_level(logging.ERROR):
        simulate(main)


def test_a_request_in_flight_fails_when_its_peer_dies() -> None:
    async def main() -> None:
        async with world() as w:
            one, other = await w.start(0), await w.start(1)

            async def hang(peer: PeerId, role: Role, body: Echo) -> Echo:
                await trio.sleep_forever()

            other.handle(asking("hang"), hang)
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    with pytest.raises(PeerLost, match="was lost"):
                        await one.request(PEOPLE[1].peer_id, asking("hang"), Echo("a"), 100.0)

                nursery.start_soon(ask)
                await elapse(1)
                before = trio.current_time()
                w.kill(1)
            assert trio.current_time() - before < 0.1

    simulate(main)


def test_notices_arrive_in_order_and_a_bad_handler_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with world(loss=0.3) as w:
            one, other = await w.start(0), await w.start(1)
            heard: list[str] = []

            def take(peer: PeerId, role: Role, body: Echo) -> None:
                heard.append(body.text)
                if body.text == "7":
                    raise ValueError("a bug")

            other.on_notice(telling("tell"), take)
            for index in range(50):
                one.notify(other.peer_id, telling("tell"), Echo(str(index)))
            await elapse(5)
            assert heard == [str(index) for index in range(50)]
            assert "a bug" in caplog.text
            with pytest.raises(PeerLost):
                one.notify(PEOPLE[9].peer_id, telling("tell"), Echo("a"))

    simulate(main)


def test_a_client_may_only_do_what_clients_may() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(3):
                await w.start(index)

            async def secret(peer: PeerId, role: Role, body: Echo) -> Echo:
                return body

            w.nodes[0].handle(asking("secret"), secret)
            client = await w.start(5, role=Role.CLIENT)
            await elapse(5)
            assert await client.request(PEOPLE[0].peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from client")
            with pytest.raises(RemoteError, match="clients may not call 'secret'"):
                await client.request(PEOPLE[0].peer_id, asking("secret"), Echo("a"), 1.0)
            assert {int(name) for name in client.entries("name").values()} == {0, 1, 2, 5}
            assert client.coordinator == w.nodes[0].coordinator
            # Those that it did not call know nothing of it, and it can call any of them.
            assert PEOPLE[5].peer_id not in {member.peer_id for member in w.nodes[2].members()}
            assert await client.request(PEOPLE[2].peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from client")
            assert all(node.statistics().entries_forged == 0 for node in w.nodes.values())
            assert w.nodes[0].entries("name").keys() == {PEOPLE[index].peer_id for index in range(3)}

    simulate(main)


@pytest.mark.parametrize("how", ["leave", "close", "die"])
def test_a_client_that_goes_is_gone_at_once(how: str) -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            client = await w.start(5, role=Role.CLIENT)
            await elapse(5)
            assert PEOPLE[5].peer_id in {member.peer_id for member in w.nodes[0].members()}
            if how == "leave":
                await client.leave()
            elif how == "close":
                w.scopes[5].cancel()
            else:
                w.kill(5)
            await elapse(0.5)
            assert [member.peer_id for member in w.nodes[0].members()] == [PEOPLE[0].peer_id]
            assert w.nodes[0].statistics().members == 1

    simulate(main)


def test_a_client_that_only_lost_its_connection_comes_back() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            client = await w.start(5, role=Role.CLIENT)
            await elapse(10)
            w.air.drop_connections(PEOPLE[0].peer_id, PEOPLE[5].peer_id)
            await elapse(2)
            states = {member.peer_id: member.state for member in w.nodes[0].members()}
            assert states[PEOPLE[5].peer_id] is MemberState.ALIVE
            assert await client.request(PEOPLE[0].peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from client")
            w.nodes[0].check_integrity()

    simulate(main)


def test_a_connection_that_only_one_side_lost_is_seen_as_lost_by_both() -> None:
    async def main() -> None:
        async with world() as w:
            one, other = await w.start(0), await w.start(1)
            await elapse(20)
            events: list[str] = []
            other.on_notice(telling("tell"), lambda peer, role, body: events.append(body.text))
            one.on_peer_lost(lambda peer: events.append("lost at one"))
            other.on_peer_lost(lambda peer: events.append("lost at other"))

            async def hang(peer: PeerId, role: Role, body: Echo) -> Echo:
                await trio.sleep_forever()

            async def ask() -> None:
                with pytest.raises(PeerLost, match="has lost this connection"):
                    await one.request(other.peer_id, asking("hang"), Echo("a"), 100.0)
                events.append("request failed")

            other.handle(asking("hang"), hang)
            w.nursery.start_soon(ask)
            await elapse(1)
            w.air.end_of(other.peer_id, one.peer_id).sever("only this side noticed")
            one.notify(other.peer_id, telling("tell"), Echo("into the old stream"))
            await elapse(0.5)
            one.notify(other.peer_id, telling("tell"), Echo("into the new one"))
            await elapse(3)
            assert events == ["lost at other", "lost at one", "request failed", "into the new one"]
            w.check_full_mesh()

    simulate(main)


def test_a_peer_that_does_not_read_gets_no_stream_with_a_gap() -> None:
    async def main() -> None:
        async with world() as w:
            one, other = await w.start(0), await w.start(1)
            await elapse(6)
            heard: list[int] = []
            lost: list[PeerId] = []
            within = True
            other.on_notice(telling("tell"), lambda peer, role, body: heard.append(int(body.text)))
            other.on_peer_lost(lost.append)
            one.on_peer_lost(lambda peer: lost.append(peer) if not within else pytest.fail("called within notify"))
            w.air.block(one.peer_id, other.peer_id)
            told: list[int] = []

            def tell(count: int) -> None:
                for number in range(count):
                    one.notify(other.peer_id, telling("tell"), Echo(str(number)))
                    told.append(number)

            with pytest.raises(PeerLost, match="does not read its messages"):
                tell(5000)
            with pytest.raises(PeerLost):
                one.notify(other.peer_id, telling("tell"), Echo("9999"))
            within = False
            await elapse(0.1)
            assert lost == [other.peer_id]
            w.air.heal()
            await elapse(5)
            assert sorted(lost) == sorted([one.peer_id, other.peer_id])
            assert heard == told, "all before the gap, nothing after it"
            one.notify(other.peer_id, telling("tell"), Echo("7"))
            await elapse(0.1)
            assert heard[len(told) :] == [7]
            w.check_full_mesh()

    simulate(main)


def test_a_notice_does_not_overtake_the_request_before_it() -> None:
    async def main() -> None:
        async with world() as w:
            one, other = await w.start(0), await w.start(1)
            heard: list[str] = []

            async def begin(peer: PeerId, role: Role, body: Echo) -> Echo:
                heard.append(f"begin {body.text}")
                await elapse(1)
                return body

            other.handle(asking("begin"), begin)
            other.on_notice(telling("cancel"), lambda peer, role, body: heard.append(f"cancel {body.text}"))
            async with trio.open_nursery() as nursery:
                for index in range(30):
                    nursery.start_soon(one.request, other.peer_id, asking("begin"), Echo(str(index)), 5.0)
                    await trio.lowlevel.checkpoint()
                    await trio.lowlevel.checkpoint()
                    one.notify(other.peer_id, telling("cancel"), Echo(str(index)))
            for index in range(30):
                assert heard.index(f"begin {index}") < heard.index(f"cancel {index}")

    simulate(main)


@pytest.mark.parametrize(
    ("token_role", "asks_as"),
    [(Role.ADMIN, Role.ADMIN), (Role.CLIENT, Role.CLIENT), (Role.WORKER, Role.CLIENT)],
)
def test_who_comes_as_a_client_asks_as_an_admin_by_an_admins_token_alone(token_role: Role, asks_as: Role) -> None:
    async def main() -> None:
        async with world() as w:
            box = await w.start(0)
            client = await w.start(1, role=Role.CLIENT, token=w.token(token_role))
            assert client.asks_as is asks_as
            told = await client.request(box.peer_id, asking("echo", EVERYONE), Echo("a"), 1.0)
            assert told == Echo(f"a from {asks_as.value}")
            await elapse(30.0)
            assert box.coordinator is not None
            assert box.coordinator[0] == box.peer_id  # though the admin's token may lead: it is no member
            (member,) = (each for each in box.members() if each.peer_id == client.peer_id)
            assert (member.role, member.state) == (Role.CLIENT, MemberState.ALIVE)

    simulate(main)
