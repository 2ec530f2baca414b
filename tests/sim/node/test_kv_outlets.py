"""How KV gets from a node to others: which paths are chosen from which tables, and which links are used.

On a virtual clock; the other nodes are scripted, choice and steering are the real ones.
"""

import pytest
import trio

from p2pserve.bootstrap import Address, RemoteError, Unreachable
from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
from p2pserve.kvtransport.routing.paths import NoPath
from p2pserve.kvtransport.wire.tickets import issue_link, issue_transfer
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.settings import WAN, BoxLinkSettings

from .kv_world import LIFE_S, LONG, MB, MODEL, R2, R, S, T, elapse, figures, labels, open_world, part_of, play

# ---- what is chosen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "given"), [(30.0, 30.0), (WAN.max_transfer_s + 1, WAN.max_transfer_s), (3600.0, WAN.max_transfer_s)]
)
def test_a_receiver_cannot_have_blocks_held_for_as_long_as_it_likes(asked: float, given: float) -> None:
    async def main() -> None:
        async with open_world() as world:
            ticket = world.ticket(deadline_s=asked)
            outlet = await world.outlets.open(part_of(T, ticket), LONG)
            assert outlet.ticket.deadline_s == given
            assert outlet.ticket.transfer == ticket.transfer

    play(main)


def test_a_link_that_nothing_is_known_of_is_dialled_directly() -> None:
    async def main() -> None:
        async with open_world() as world:
            outlet = await world.outlet()
            assert outlet.link == world.links[T]
            (path,) = outlet.paths
            assert (path.host, path.port, path.label, path.relay) == ("target.example", 7000, "direct", None)
            assert path.streams >= 1
            assert outlet.gbps > 0
            assert outlet.rtt_s > 0
            assert world.asked == [(T, "link.open")]
            again = await world.outlet()
            assert again.link == outlet.link
            assert world.asked == [(T, "link.open")]
            choice = world.choice(T)
            assert choice is not None
            assert choice.vias == {None}
            assert world.choice(R) is None

    play(main)


def test_a_choice_is_kept_until_figures_are_news() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.triangle(direct=1.0, hop=0.1)
            world.knowledge.estimator(T).on_ping(0.02, now=trio.current_time())
            await world.outlet()  # from now on there are paths in use
            await world.outlet()
            kept = world.choice(T)
            await elapse(1.0)
            world.knowledge.estimator(T).on_ping(0.02, now=trio.current_time())
            assert labels(await world.outlet()) == {"direct"}
            assert world.choice(T) is kept
            world.link(R, T, figures(9.0))  # as the relay says
            world.link(S, R, figures(9.0))  # as it was measured here
            assert R in labels(await world.outlet())

    play(main)


def test_a_long_link_gets_the_streams_that_fill_it() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.link(S, T, LinkFigures(rtt_s=0.1, one_stream_gbps=0.2, capacity_gbps=1.0))
            (path,) = (await world.outlet()).paths
            assert path.streams >= 5

    play(main)


@pytest.mark.parametrize("days_ahead", [0, 3])
def test_a_relay_is_taken_where_it_is_the_better_way_and_its_permit_is_kept(days_ahead: int) -> None:
    async def main() -> None:
        async with open_world() as world:
            world.relay_clock = days_ahead * 86_400.0  # which is its own affair
            world.triangle()
            outlet = await world.outlet()
            path = next(path for path in outlet.paths if path.label == R)
            assert (path.host, path.port) == ("relay-1.example", 7000)
            assert path.relay is not None
            assert (path.relay.next_host, path.relay.next_port) == ("target.example", 7000)
            assert outlet.gbps > 0.5
            assert (await world.outlet()).paths == outlet.paths
            assert world.asked.count((R, "relay.open")) == 1
            await elapse(LIFE_S - WAN.permit_margin_s + 1)
            later = next(path for path in (await world.outlet()).paths if path.label == R)
            assert later.relay != path.relay
            assert world.asked.count((R, "relay.open")) == 2
            world.outlets.forget_peer(R)  # and comes back: it knows nothing of what it had agreed to
            world.triangle()
            await world.outlet()
            assert world.asked.count((R, "relay.open")) == 3

    play(main)


@pytest.mark.parametrize("case", ["as good directly", "does not relay", "no address", "no figures", "unknown here"])
def test_no_relay_without_a_reason_and_the_means(case: str) -> None:
    async def main() -> None:
        async with open_world(BoxLinkSettings(box=BoxFigures(up_gbps=2.0))) as world:
            world.triangle(direct=2.0 if case == "as good directly" else 0.1)
            if case == "does not relay":
                world.member(R, relay_gbps=0.0)
            elif case == "no address":
                del world.addresses[R]
            elif case == "no figures":
                world.tables[R] = messages.LinkTable()
                world.learn()
            elif case == "unknown here":
                del world.estimators[R]
            assert labels(await world.outlet()) == {"direct"}
            assert (R, "relay.open") not in world.asked

    play(main)


def test_a_relay_that_does_not_answer_costs_a_transfer_no_more_than_its_permit_may() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.triangle()
            world.hung.add(R)
            began = trio.current_time()
            assert labels(await world.outlet()) == {"direct"}
            assert trio.current_time() - began < WAN.permit_ask_s + 0.1
            await world.outlet()
            assert world.asked.count((R, "relay.open")) == 1

    play(main)


def test_a_relay_that_refuses_is_left_out_for_a_while() -> None:
    """The direct path gets what it needs then, not a single stream; and another relay has its chance."""

    async def main() -> None:
        async with open_world() as world:
            world.triangle()
            world.link(S, T, LinkFigures(rtt_s=0.1, one_stream_gbps=0.02, capacity_gbps=0.1))
            world.faults[R] = RemoteError("no-relay", "this node forwards nothing for others")
            (path,) = (await world.outlet()).paths
            assert (path.label, path.relay) == ("direct", None)
            assert path.streams >= 5
            choice = world.choice(T)
            assert choice is not None
            assert choice.vias == {None}
            await world.outlet()
            assert world.asked.count((R, "relay.open")) == 1
            world.triangle(relay=R2)
            assert R2 in labels(await world.outlet())
            del world.faults[R]
            world.outlets.forget_peer(R2)
            del world.addresses[R2]
            await elapse(WAN.relay_refused_s)
            assert R in labels(await world.outlet())

    play(main)


def test_a_node_without_an_address_cannot_be_pushed_to() -> None:
    async def main() -> None:
        async with open_world() as world:
            for gone in (None, Address("", 0)):
                world.addresses.pop(T) if gone is None else world.addresses.update({T: gone})
                with pytest.raises(Unreachable, match="address"):
                    await world.outlet()

    play(main)


def test_a_node_that_does_not_answer_is_said_so_and_asked_again() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.faults[T] = Unreachable("nobody answers")
            with pytest.raises(Unreachable):
                await world.outlet()
            del world.faults[T]
            assert (await world.outlet()).link == world.links[T]

    play(main)


def test_a_path_that_costs_too_much_is_not_taken() -> None:
    async def main() -> None:
        async with open_world(BoxLinkSettings(box=BoxFigures(up_usd_per_gb=0.02), max_usd_per_gb=0.01)) as world:
            world.link(S, T, figures(1.0))
            with pytest.raises(NoPath):
                await world.outlet()

    play(main)


def test_what_flows_already_counts() -> None:
    """A second transfer over the same relay gets what the first one leaves."""

    async def main() -> None:
        async with open_world() as world:
            world.triangle()
            await world.outlet()
            world.report({"direct": 0}, 50 * MB)
            assert world.selector.moving(trio.current_time()) == 1
            await elapse(WAN.fresh_s + 0.1)  # its engine has fallen silent: whatever it was, it is over
            assert world.selector.moving(trio.current_time()) == 0

    play(main)


# ---- links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advert", ["has come", "is late"])
def test_an_engine_that_has_been_restarted_is_asked_for_its_new_link(advert: str) -> None:
    """Its ticket may be here before gossip tells of the restart."""

    async def main() -> None:
        async with open_world() as world:
            old = (await world.outlet()).link
            world.links[T] = issue_link(600.0, world.rng.randbytes)
            if advert == "has come":
                world.lives[T] = 2
                world.learn()
            found = await world.outlet()
            assert found.link == world.links[T] != old
            assert world.paths == [(old.link, ())]  # nobody dials there any more
            assert world.choice(T) is not None
            assert len(world.selector.links_to(T)) == 1

    play(main)


def test_a_ticket_of_a_link_that_its_node_does_not_know_is_refused() -> None:
    async def main() -> None:
        async with open_world() as world:
            forged = issue_transfer(b"?" * 16, "kv4", 30.0, world.rng.randbytes)
            with pytest.raises(TransferError, match="not the one"):
                await world.outlets.open(part_of(T, forged), LONG)
            assert len(world.asked) == 2
            assert (await world.outlet()).link == world.links[T]

    play(main)


def test_each_two_workers_have_a_link_of_their_own_and_a_part_of_the_bytes() -> None:
    async def main() -> None:
        async with open_world() as world:
            half = protocol.KvSlice(first_layer=0, last_layer=MODEL.layers // 2, first_head=0, last_head=1)
            whole = await world.outlet(tokens=100, codec="raw")
            expected = world.bytes_of(T)[0] * len(half.layers) * len(half.heads)
            first, second = whole.link, issue_link(600.0, world.rng.randbytes)
            world.links[T] = second  # what the other worker's question is answered with
            part = part_of(T, world.ticket(codec="raw"), half, protocol.WorkerRank(tp=1))
            outlet = await world.outlets.open(part, 100)
            assert (outlet.link, outlet.slice, outlet.ticket) == (second, half, part.ticket)
            sent = world.bytes_of(T)[1]
            assert sent == pytest.approx(expected / (MODEL.layers * MODEL.kv_heads), rel=0.01)
            assert world.asked == [(T, "link.open"), (T, "link.open")]
            assert world.paths == []  # the first link is no earlier life of the second
            assert world.outlets.forget_peer(T) == [first, second]

    play(main)


def test_transfers_that_begin_at_once_share_the_link_and_its_books() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.triangle()
            found: list[protocol.Outlet] = []

            async def one() -> None:
                found.append(await world.outlet())

            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(one)
            assert len(found) == 4
            assert {outlet.link for outlet in found} == {world.links[T]}
            assert world.asked.count((T, "link.open")) == 1
            assert len(world.selector.links_to(T)) == 1

    play(main)


def test_what_ends_with_a_node_or_with_this_nodes_engine() -> None:
    async def main() -> None:
        async with open_world() as world:
            await world.outlet()
            assert world.outlets.forget_peer(T) == [world.links[T]]
            assert world.outlets.forget_peer(T) == []
            assert world.choice(T) is None
            world.report({"direct": 1}, 1)  # on its way when the node was lost
            await world.outlet()
            world.outlets.forget_all()
            assert world.choice(T) is None
            await world.outlet()
            assert world.asked.count((T, "link.open")) == 3

    play(main)
