"""The five situations of path choice over boxes in memory: what is chosen, and which verdict follows from the times."""

from collections.abc import Sequence

import msgspec
import pytest

from p2pserve.sims.wan import Scenario, WanBox, WanPair
from p2pserve.sims.wan.kv import orders, paths
from p2pserve.sims.wan.kv.kvbox import FRAME_BYTES
from p2pserve.sims.wan.kv.paths import RELAY, SOURCE, TARGET, PathCase

from .fakes import FakeWan, kv_network, ordered


def decide(name: str, wan: FakeWan | None = None) -> PathCase:
    """The case's verdict, over its own network or another."""
    maker, run = paths.CASES[name]
    wan = wan or FakeWan(maker())
    with kv_network(wan, paths.USD_PER_GB) as network:
        for a, b in paths.LINKS:
            network.measure(a, b)
        return run(network)


def triangle(direct: WanPair, relayed: WanPair, gbps: float = 2.0) -> FakeWan:
    box = WanBox(up_gbps=gbps, down_gbps=gbps)
    return FakeWan(
        Scenario(boxes=dict.fromkeys((SOURCE, TARGET, RELAY), box), pairs={(SOURCE, TARGET): direct}, default=relayed)
    )


def test_a_many_windows_beat_one_on_a_long_link() -> None:
    case = decide("a")
    assert case.ok
    assert (case.name, case.kind, case.chosen, case.compared_with) == ("a", "proxy", "direct", "one stream")
    # One window over 90 ms is 0.24 Gb/s of the link's 1.5.
    assert case.times_faster == pytest.approx(1.5 / 0.24, rel=0.01)
    assert case.gbps == pytest.approx(1.5, rel=0.01)
    assert case.by_path == {"direct": 100 * FRAME_BYTES}, "warming up does not count"


def test_a_is_missed_where_one_stream_already_fills_the_link() -> None:
    short = WanPair(rtt_ms=2)
    case = decide("a", triangle(short, short, gbps=0.5))
    assert not case.ok
    assert case.times_faster == pytest.approx(1, rel=0.1)


def test_b_a_fat_relay_is_taken_instead_of_a_thin_link() -> None:
    case = decide("b")
    assert case.ok
    assert case.chosen == f"via {RELAY}"
    assert set(case.by_path) == {f"via {RELAY}"}
    assert case.compared_s == pytest.approx(16 * FRAME_BYTES * 8e-9 / 0.03, rel=0.01)
    # Sent twice and received twice, at a cent per GB each time.
    assert case.usd == pytest.approx(4 * 0.01 * 16 * FRAME_BYTES / 1e9)


def test_b_is_missed_where_the_direct_link_is_chosen() -> None:
    alike = WanPair(rtt_ms=10, gbps=0.5)
    case = decide("b", triangle(alike, alike, gbps=0.5))
    assert case.chosen == "direct"
    assert not case.ok
    assert case.usd == pytest.approx(2 * 0.01 * 16 * FRAME_BYTES / 1e9)


def test_b_is_missed_where_the_relay_wins_by_too_little() -> None:
    case = decide("b", triangle(WanPair(rtt_ms=10, gbps=0.3), WanPair(rtt_ms=10), gbps=0.6))
    assert RELAY in case.chosen
    assert 1 < case.times_faster < paths.TIMES_FASTER
    assert not case.ok


def test_c_a_relay_that_is_no_better_is_not_used() -> None:
    case = decide("c")
    assert case.ok
    assert case.chosen == "direct"
    assert case.figures == {"relayed_bytes": 0.0}
    assert case.compared_with == "relay"
    assert case.compared_s > 0
    assert any(line.startswith(f"via {RELAY}") for line in case.why)


def test_c_is_missed_as_soon_as_bytes_are_relayed() -> None:
    case = decide("c", triangle(WanPair(rtt_ms=90, gbps=0.03), WanPair(rtt_ms=20)))
    assert not case.ok
    assert case.figures["relayed_bytes"] == 40 * FRAME_BYTES


def test_d_a_transfer_whose_link_degrades_goes_on_over_the_relay() -> None:
    wan = FakeWan(paths.good_links())
    case = decide("d", wan)
    assert case.ok
    assert case.chosen.startswith(f"direct, then via {RELAY}")
    assert case.figures["changes"] >= 1
    assert sum(case.by_path.values()) == pytest.approx(240 * FRAME_BYTES)
    # What staying would have taken: the time until the fall, and three quarters at 0.03 Gb/s.
    rest = 8e-9 * 0.75 * 240 * FRAME_BYTES / paths.DEGRADED_GBPS
    assert case.compared_s - case.seconds == pytest.approx(rest, rel=0.05)
    assert any(line.startswith("then: direct") for line in case.why)
    assert wan.pair(f"{SOURCE}>{TARGET}")[1] == 1.5, "the link is given back as it was"


def test_d_is_missed_where_the_paths_are_never_changed() -> None:
    class Steady(FakeWan):
        """A network whose links do not change, whoever asks for it."""

        def set_pair(self, a: str, b: str, *, both: bool = True, **changes: float | None) -> None:
            return

    wan = Steady(paths.good_links())
    case = decide("d", wan)
    assert not case.ok
    assert case.figures["changes"] == 0
    assert ordered(wan, orders.SetPathsOrder) == []
    assert case.chosen == "direct"


@pytest.mark.parametrize(
    ("shares", "ok"),
    [
        ([1 / 32] * 32, True),
        # Fair by Jain's index, and yet one has less than half of its share.
        ([0.4 / 32] + [1 / 32] * 31, False),
        # None starves, and yet half of them have more than twice what the others have.
        ([0.6 / 32] * 16 + [1.4 / 32] * 16, False),
    ],
)
def test_e_all_transfers_have_their_share_half_way(shares: Sequence[float], ok: bool) -> None:
    wan = FakeWan(paths.good_links())
    wan.shares = shares
    case = decide("e", wan)
    assert case.ok is ok
    mean = sum(shares) / len(shares)
    assert case.figures["least_share_at_half"] == pytest.approx(min(shares) / mean, rel=0.02)
    assert case.figures["jain_at_half"] == pytest.approx(paths.jain(shares), rel=0.02)
    assert case.figures["first_s"] <= case.compared_s <= case.figures["last_s"] == case.seconds


def test_e_is_missed_where_it_is_over_before_anybody_looked() -> None:
    class Fast(FakeWan):
        """A network on which everything has arrived at the first look."""

        def obey(self, box: str, order: orders.Order) -> orders.OrderReply:
            if isinstance(order, orders.Watch):
                self.sleep(60.0)
            return super().obey(box, order)

    case = decide("e", Fast(paths.good_links()))
    assert case.figures["jain_at_half"] == pytest.approx(1.0)
    assert not case.ok


def test_a_case_is_as_many_times_faster_as_it_fits_into_what_it_is_compared_with() -> None:
    case = decide("c")
    assert msgspec.structs.replace(case, seconds=2.0, compared_s=5.0).times_faster == 2.5


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([3.0] * 7, 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([1.0, 1.0, 0.0, 0.0], 0.5), ([0.0, 0.0], 0.0), ([5.0], 1.0)],
)
def test_jains_index(shares: list[float], expected: float) -> None:
    assert paths.jain(shares) == pytest.approx(expected)
