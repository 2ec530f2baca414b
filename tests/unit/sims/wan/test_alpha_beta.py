"""The alpha-beta model beside transfers over boxes in memory, which keep to it exactly."""

from collections.abc import Sequence

import pytest

from p2pserve.kvtransport.probing.figures import LinkFigures
from p2pserve.sims.wan import Scenario, WanBox, WanPair
from p2pserve.sims.wan.kv import orders
from p2pserve.sims.wan.kv.alpha_beta import (
    FRAMES,
    LINKS,
    PROBES,
    REPEATS,
    SOURCE,
    TARGET,
    WARM_UP,
    AlphaBetaRow,
    estimate_s,
    make_page,
    measure_link,
)
from p2pserve.sims.wan.kv.kvbox import FRAME_BYTES

from .fakes import FakeWan, kv_network


def two(rtt_ms: float, gbps: float) -> FakeWan:
    box = WanBox(up_gbps=gbps, down_gbps=gbps)
    return FakeWan(Scenario(boxes={SOURCE: box, TARGET: box}, pairs={(SOURCE, TARGET): WanPair(rtt_ms=rtt_ms)}))


def rows_of(wan: FakeWan) -> list[AlphaBetaRow]:
    with kv_network(wan) as network:
        return list(measure_link(network))


@pytest.mark.parametrize(
    ("size", "rtt_s", "gbps", "seconds"),
    [(125_000_000, 0.1, 1.0, 1.1), (125_000_000, 0.0, 0.5, 2.0), (0, 0.2, 1.0, 0.2)],
)
def test_an_estimate_is_a_round_trip_and_the_bytes_at_the_rate_of_all_streams(
    size: int, rtt_s: float, gbps: float, seconds: float
) -> None:
    figures = LinkFigures(rtt_s=rtt_s, one_stream_gbps=gbps / 8, capacity_gbps=gbps)
    assert estimate_s(size, figures) == pytest.approx(seconds)


def test_a_link_is_probed_first_and_its_figures_count_for_all_sizes() -> None:
    wan = two(90.0, 1.0)
    rows = rows_of(wan)
    kinds = [type(order) for _, order in wan.orders]
    assert kinds.count(orders.SendBurst) == PROBES
    assert orders.SendBurst not in kinds[kinds.index(orders.Listen) :]
    assert [row.mib for row in rows] == list(FRAMES)
    assert {(row.emulated_by, row.rtt_ms, row.link_gbps) for row in rows} == {("proxy", 90.0, 1.0)}
    for row in rows:
        assert row.probed_rtt_ms == pytest.approx(90.0)
        assert row.probed_gbps == pytest.approx(1.0)
        assert row.estimated_s == pytest.approx(0.09 + 8e-9 * row.mib * FRAME_BYTES)
        # Bytes in memory need no way: what is measured is the bytes at the rate alone.
        assert row.seconds == pytest.approx(8e-9 * row.mib * FRAME_BYTES)
        assert row.over_estimate == pytest.approx(row.seconds / row.estimated_s)
    # 1,048,576 bytes of 449 KB each.
    assert [row.prompt_tokens for row in rows[:4]] == [2, 5, 9, 19]


def test_only_transfers_behind_the_warm_up_are_timed_and_all_over_the_streams_that_are_chosen() -> None:
    wan = two(90.0, 1.0)
    rows = rows_of(wan)
    connects = [order for _, order in wan.orders if isinstance(order, orders.Connect)]
    assert len(connects) == len(FRAMES) * REPEATS
    # One window of 2.7 MB over 90 ms is 0.24 Gb/s: five streams and more fill the link.
    streams = {path.streams for connect in connects for path in connect.paths}
    assert streams == {row.streams for row in rows}
    assert min(streams) >= 5
    sent = [[bulk.frames for bulk in order.transfers] for _, order in wan.orders if isinstance(order, orders.Send)]
    assert sent == [each for frames in FRAMES for each in [[WARM_UP], [frames]] * REPEATS]


def row(rtt_ms: float, mib: int, seconds: float) -> AlphaBetaRow:
    return AlphaBetaRow(
        emulated_by="tun", rtt_ms=rtt_ms, link_gbps=1.0, probed_rtt_ms=rtt_ms, probed_gbps=1.0, streams=1, mib=mib,
        prompt_tokens=1, seconds=seconds, estimated_s=1.0, over_estimate=seconds, spread="",
    )  # fmt: skip


def test_the_page_names_its_command_and_has_a_panel_for_each_link() -> None:
    rows: Sequence[AlphaBetaRow] = [row(rtt_ms, mib, 0.5 * mib) for rtt_ms in (1.0, 30.0, 90.0) for mib in (1, 2)]
    page = make_page(rows)
    assert "\n    python -m p2pserve.sims.wan alpha-beta\n" in page.markdown()
    (picture,) = page.pictures
    assert [len(panels) for panels in picture.panels] == [2, 1]
    for panels in picture.panels:
        for curves in panels:
            assert curves.lines == {"estimated": ([1, 2], [1.0, 1.0]), "measured": ([1, 2], [0.5, 1.0])}
            assert curves.log_x
            assert curves.log_y


def test_links_are_of_a_site_and_of_oceans() -> None:
    assert sorted(LINKS) == list(LINKS)
    assert LINKS[0][0] < 1.0 < 100.0 < LINKS[-1][0]
