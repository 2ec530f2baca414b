"""Scenarios: what is refused, what is chosen, and reading them back."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.sims.wan import Outage, Scenario, ScenarioError, WanBox, WanPair, link_classes, measured_link
from p2pserve.sims.wan.scenario import LINKS, changed

TWO = {"paris": WanBox(), "nyc": WanBox(up_gbps=2, down_gbps=2)}
BETWEEN = {("paris", "nyc"): WanPair(rtt_ms=90)}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: WanBox(up_gbps=0), "up_gbps"),
        (lambda: WanBox(down_gbps=-1), "down_gbps"),
        (lambda: WanBox(up_gbps=float("nan")), "up_gbps"),
        (lambda: WanBox(up_gbps=float("inf")), "up_gbps"),
        (lambda: WanPair(rtt_ms=-1), "rtt_ms"),
        (lambda: WanPair(loss=1.1), "loss"),
        (lambda: WanPair(rtt_ms=10, jitter_ms=11), "jitter_ms: 11 is not no more than rtt_ms"),
        (lambda: WanPair(gbps=0), "gbps"),
        (lambda: Scenario(boxes={}), "boxes"),
        (lambda: Scenario(boxes={"Paris!": WanBox()}), "'Paris!'"),
        (lambda: Scenario(boxes=TWO), "none for paris and nyc"),
        (lambda: Scenario(boxes=TWO, pairs={("paris", "rome"): WanPair()}), "no box 'rome'; boxes: paris, nyc"),
        (lambda: Scenario(boxes=TWO, pairs={("paris", "paris"): WanPair()}), "'paris' twice"),
        (lambda: Scenario(boxes=TWO, pairs=BETWEEN, mtu=100), "mtu"),
        (lambda: Scenario(boxes=TWO, pairs=BETWEEN, congestion="; reboot"), "congestion"),
        (
            lambda: Scenario(boxes=TWO, pairs=BETWEEN, outages=(Outage(a="paris", b="x", start_s=0, seconds=1),)),
            "outages: there is no box 'x'",
        ),
        (lambda: Outage(a="paris", b="nyc", start_s=-1, seconds=1), "start_s"),
        (lambda: Scenario.from_classes({("a", "b"): "warp"}), "no class of links 'warp'; classes: thunderserve-high"),
        (lambda: changed(WanPair(), {"rtt": 5}), "WanPair has no field 'rtt'; fields: rtt_ms"),
        (lambda: changed(WanBox(), {"behind_nat": 1.0}), "'behind_nat' stays as it was"),
        (lambda: measured_link("azure:eastus", "atlantis"), "no row with all figures between 'azure:eastus' and 'atla"),
        (lambda: measured_link("lambda:us-west-2", "lambda:us-east-1"), "with all figures"),
        (lambda: changed(WanBox(), {"up_gbps": -1}), "up_gbps"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        make()
    assert field in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ('{"boxes": {"a": {"up_mbps": 5}}}', "up_mbps"),
        ('{"boxes": {"a": {"up_gbps": -5}}}', "up_gbps"),
        ('{"boxes": {"a": {}}, "pears": []}', "pears"),
        ('{"boxes": {"a": {}, "b": {}}, "pairs": [{"a": "a", "b": "b"}, {"a": "a", "b": "b"}]}', "twice"),
        ('{"boxes": {"a": {}, "b": {}}, "pairs": [{"a": "a", "rtt_ms": 5}]}', "`b`"),
    ],
)
def test_a_file_that_is_not_right_is_refused(text: str, says: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        Scenario.from_json(text)
    assert says in str(raised.value)


NAMES = st.lists(st.from_regex(r"[a-z0-9][a-z0-9_-]{0,31}", fullmatch=True), min_size=2, max_size=5, unique=True)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_scenario_reads_back_as_it_was_written(data: st.DataObject) -> None:
    names = data.draw(NAMES)
    gbps, rtt = st.floats(0.001, 400), st.floats(0, 1000)
    boxes = {name: WanBox(up_gbps=data.draw(gbps), down_gbps=data.draw(gbps)) for name in names}
    pairs = {
        (names[0], name): WanPair(rtt_ms=data.draw(rtt), loss=data.draw(st.floats(0, 1)), gbps=data.draw(gbps))
        for name in names[1:]
    }
    outages = (Outage(a=names[0], b=names[1], start_s=data.draw(rtt), seconds=3),)
    scenario = Scenario(
        boxes=boxes, pairs=pairs, default=WanPair(), outages=outages, mtu=1400, seed=data.draw(st.integers())
    )
    assert Scenario.from_json(scenario.to_json()) == scenario


def test_a_pair_counts_both_ways_unless_the_reverse_is_given() -> None:
    there, back = WanPair(rtt_ms=90), WanPair(rtt_ms=30)
    one = Scenario(boxes=TWO, pairs={("paris", "nyc"): there})
    assert one.pair("paris", "nyc") == one.pair("nyc", "paris") == there
    two = Scenario(boxes=TWO, pairs={("paris", "nyc"): there, ("nyc", "paris"): back})
    assert (two.pair("paris", "nyc"), two.pair("nyc", "paris")) == (there, back)
    rest = Scenario(boxes={**TWO, "rome": WanBox()}, pairs={("paris", "nyc"): there}, default=back)
    assert rest.pair("rome", "nyc") == back
    assert len(list(rest.directions())) == 6


def test_a_queue_is_one_bandwidth_delay_product() -> None:
    assert Scenario.queue_bytes(1.0, 100) == pytest.approx(12.5e6)
    assert Scenario.queue_bytes(1.0, 1) == pytest.approx(2.5e6), "20 ms at least"
    assert Scenario.queue_bytes(0.001, 1) == 128 * 1024, "room for what a stream sends at a time"


def test_classes_are_the_rows_of_the_table() -> None:
    table = link_classes()
    assert len(table) == sum(line.startswith("class:") for line in LINKS.read_text().splitlines())
    atlantic = table["transatlantic"]
    assert (atlantic.rtt_ms, atlantic.one_stream_gbps, atlantic.multi_stream_gbps) == (90, 0.23, 1.5)
    assert "home-1g:dc-10g" in table
    for name, row in table.items():
        scenario = Scenario.from_classes({("a", "b"): name})
        assert scenario.pair("b", "a").rtt_ms == row.rtt_ms
        assert scenario.fastest_gbps == row.multi_stream_gbps


def test_a_fast_link_does_not_make_a_slow_one_faster() -> None:
    links = {("paris", "nyc"): "transatlantic", ("paris", "tokyo"): "eu-asia", ("nyc", "tokyo"): "transpacific"}
    scenario = Scenario.from_classes(links)
    assert scenario.boxes["paris"].up_gbps == 1.5
    assert scenario.boxes["tokyo"].up_gbps == 1.0
    assert scenario.pair("tokyo", "paris").gbps == 0.7


def test_the_data_folder_says_where_each_file_is_from() -> None:
    folder = LINKS.parent
    text = (folder / "README.md").read_text()
    data = [path.name for path in Path(folder).iterdir() if path.suffix != ".md"]
    assert data
    assert all(f"`{name}`" in text for name in data)


def test_json_names_the_ends_of_a_pair() -> None:
    document = json.loads(Scenario(boxes=TWO, pairs=BETWEEN).to_json())
    assert document["pairs"] == [
        {"rtt_ms": 90.0, "loss": 0.0, "jitter_ms": 0.0, "gbps": None, "a": "paris", "b": "nyc"}
    ]


def test_a_measured_link_is_found_in_either_order() -> None:
    one, other = measured_link("azure:eastus", "aws:ap-south-1"), measured_link("aws:ap-south-1", "azure:eastus")
    assert (one.rtt_ms, one.multi_stream_gbps, one.source) == (other.rtt_ms, other.multi_stream_gbps, other.source)
    assert (one.rtt_ms, one.one_stream_gbps, one.multi_stream_gbps) == (199.6, 0.104, 0.58)


def test_what_a_pair_carries_is_bounded_by_both_boxes_and_the_path() -> None:
    boxes = {"paris": WanBox(up_gbps=3, down_gbps=1), "nyc": WanBox(up_gbps=2, down_gbps=5)}
    scenario = Scenario(boxes=boxes, pairs=BETWEEN)
    assert (scenario.carried_gbps("paris", "nyc"), scenario.carried_gbps("nyc", "paris")) == (3, 1)
    thin = Scenario(boxes=boxes, pairs={("paris", "nyc"): WanPair(gbps=0.5)})
    assert thin.carried_gbps("paris", "nyc") == thin.fastest_gbps == 0.5
