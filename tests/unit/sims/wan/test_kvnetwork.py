"""What the owner of the KV programs tells each box, and what it makes of their answers."""

import pytest

from p2pserve.kvtransport.routing.paths import KVPath
from p2pserve.sims.wan import Scenario, WanBox, WanError, WanPair
from p2pserve.sims.wan.kv import orders
from p2pserve.sims.wan.kv.kvbox import FRAME_BYTES

from .fakes import FakeWan, kv_network, ordered

DIRECT = KVPath("paris", "nyc", None, 8, 0.8)
RELAYED = KVPath("paris", "nyc", "london", 4, 0.5)


def three(**pair: float) -> FakeWan:
    box = WanBox(up_gbps=2, down_gbps=1)
    return FakeWan(
        Scenario(boxes=dict.fromkeys(("paris", "nyc", "london"), box), default=WanPair(rtt_ms=50, gbps=0.8, **pair))
    )


def test_programs_start_in_every_box_and_are_killed_with_the_network() -> None:
    wan = three()
    with kv_network(wan) as network:
        assert "0 links measured" in repr(network)
        assert wan.killed == []
    assert sorted(wan.killed) == ["london", "nyc", "paris"]
    assert wan.closed


def test_a_program_that_does_not_start_takes_the_others_with_it() -> None:
    wan = three()
    wan.dead.add("nyc")
    with pytest.raises(WanError, match="the KV program in nyc has ended with exit code 9"), kv_network(wan):
        pass
    assert sorted(wan.killed) == ["london", "nyc", "paris"]
    assert wan.closed


def test_an_error_names_the_box_that_had_it() -> None:
    wan = three()
    wan.refusals[orders.Listen] = "no room"
    with kv_network(wan) as network, pytest.raises(WanError, match=r"^nyc: no room$"):
        network.connect("paris", "nyc", [DIRECT])
    assert ordered(wan, orders.Connect) == [], "nothing dials a box that does not listen"


def test_a_link_is_pinged_and_then_filled_by_as_many_streams_as_the_fastest_pair_takes() -> None:
    wan = three()
    with kv_network(wan) as network:
        figures = network.measure("paris", "nyc")
        assert "1 links measured" in repr(network)
    assert figures.rtt_s == pytest.approx(0.05)
    assert figures.capacity_gbps == pytest.approx(0.8)
    ping, expect, send = (order for _, order in wan.orders)
    assert isinstance(ping, orders.PingOrder)
    assert (ping.host, ping.port) == ("paris>nyc", 7003)
    assert isinstance(expect, orders.ExpectBurst)
    assert isinstance(send, orders.SendBurst)
    assert expect.ticket == send.ticket
    assert send.ticket.streams >= 4, "as many as a node's burst has at least"
    assert send.ticket.seconds == pytest.approx(0.5 + 10 * 0.05), "a node's burst is as long"
    assert [box for box, _ in wan.orders] == ["paris", "nyc", "paris"], "the receiver expects it first"


def test_known_are_the_links_that_were_measured_and_what_every_box_has_and_costs() -> None:
    wan = three()
    with kv_network(wan, usd_per_gb=0.03) as network:
        assert network.known().links == {}
        network.measure("paris", "nyc")
        network.measure("paris", "nyc")
        known = network.known()
    assert set(known.links) == {("paris", "nyc")}, "each direction by itself"
    assert set(known.boxes) == {"paris", "nyc", "london"}
    box = known.boxes["london"]
    assert (box.up_gbps, box.down_gbps, box.up_usd_per_gb, box.down_usd_per_gb) == (2, 1, 0.03, 0.03)


def test_the_receiver_listens_before_the_sender_connects_and_both_forget() -> None:
    wan = three()
    with kv_network(wan) as network, network.connect("paris", "nyc", [DIRECT]) as transfers:
        listen, connect = (order for _, order in wan.orders)
        assert isinstance(listen, orders.Listen)
        assert isinstance(connect, orders.Connect)
        assert listen.link == connect.link
        assert [(path.host, path.port, path.label, path.streams) for path in connect.paths] == [
            ("paris>nyc", 7003, "direct", 8)
        ]
        assert connect.paths[0].relay is None
        assert repr(transfers) == f"<BulkTransfers paris -> nyc, link {connect.link.link.hex()[:8]}>"
        wan.orders.clear()
    assert wan.orders == [(box, orders.Forget(connect.link.link)) for box in ("paris", "nyc")]


def test_a_relay_is_told_whom_to_expect_before_it_is_dialled() -> None:
    wan = three()
    with kv_network(wan) as network:
        direct, relayed = network.dialled([DIRECT, RELAYED])
        (box, admit), *more = wan.orders
    assert not more, "a direct path needs nobody's leave"
    assert box == "london"
    assert isinstance(admit, orders.Admit)
    assert (admit.permit.next_host, admit.permit.next_port) == ("london>nyc", 7003)
    assert direct.relay is None
    assert relayed.relay == admit.permit
    assert (relayed.host, relayed.port, relayed.label, relayed.streams) == ("paris>london", 7006, "via london", 4)


def test_every_path_through_a_relay_has_a_permit_of_its_own() -> None:
    wan = three()
    with kv_network(wan) as network:
        one, other = network.dialled([RELAYED, RELAYED])
    assert one.relay is not None
    assert other.relay is not None
    assert one.relay.permit != other.relay.permit
    assert one.relay.secret != other.relay.secret


def test_what_is_moved_takes_what_its_bytes_take_at_the_links_rate() -> None:
    wan = three()
    with kv_network(wan) as network, network.connect("paris", "nyc", [DIRECT]) as transfers:
        moved = transfers.move([30, 10])
    assert moved.delivered
    assert moved.bytes == 40 * FRAME_BYTES
    assert moved.by_path == {"direct": 40 * FRAME_BYTES}
    # Each has half of 0.8 Gb/s.
    assert moved.seconds == pytest.approx(30 * FRAME_BYTES * 8e-9 / 0.4)
    assert moved.gbps == pytest.approx(8e-9 * moved.bytes / moved.seconds)


def test_the_receiver_expects_the_very_transfers_that_are_sent() -> None:
    wan = three()
    with kv_network(wan) as network, network.connect("paris", "nyc", [DIRECT]) as transfers:
        wan.orders.clear()
        transfers.start([2, 3])
    (first, expect), (second, send) = wan.orders[:2]
    assert (first, second) == ("nyc", "paris")
    assert isinstance(expect, orders.Expect)
    assert isinstance(send, orders.Send)
    assert expect.transfers == send.transfers
    assert [bulk.frames for bulk in send.transfers] == [2, 3]
    assert len({bulk.ticket.transfer for bulk in send.transfers}) == 2


def test_transfers_that_are_forgotten_are_spoken_of_no_more() -> None:
    wan = three()
    with kv_network(wan) as network, network.connect("paris", "nyc", [DIRECT]) as transfers:
        transfers.move([5])
        transfers.forget()
        assert transfers.look().transfers == ()
        assert transfers.move([7, 1]).bytes == 8 * FRAME_BYTES
        transfers.forget()
        assert transfers.move([2]).bytes == 2 * FRAME_BYTES, "forgetting adds up"


def test_a_failed_transfer_is_an_error_that_says_how_many_and_why() -> None:
    wan = three()
    with kv_network(wan) as network, network.connect("paris", "nyc", [DIRECT]) as transfers:
        wan.failure = "the window ran dry"
        with pytest.raises(WanError, match=r"^2 of 2 transfers failed: the window ran dry$"):
            transfers.move([5, 5])


def test_whoever_waits_sees_progress_at_every_look_but_the_last() -> None:
    wan = three()
    seen: list[int] = []
    with kv_network(wan) as network, network.connect("paris", "nyc", [DIRECT]) as transfers:
        transfers.start([40])
        moved = transfers.wait(lambda moved: seen.append(sum(moved.by_path.values())))
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] < moved.bytes
    assert len(seen) == pytest.approx(moved.seconds / 0.05, abs=1.01), "20 looks a second"


def test_changed_paths_carry_the_rest_and_the_relay_says_how_much_it_forwarded() -> None:
    wan = three()
    with kv_network(wan) as network, network.connect("paris", "nyc", [DIRECT]) as transfers:
        transfers.start([60])
        wan.sleep(0.2)
        transfers.set_paths([RELAYED])
        moved = transfers.wait()
        assert network.relayed("london") == moved.by_path["via london"] > 0
        assert network.relayed("nyc") == 0
    assert moved.by_path["direct"] == pytest.approx(0.2 * 0.8e9 / 8)
    assert sum(moved.by_path.values()) == moved.bytes
