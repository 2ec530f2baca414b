"""The boxes of `demo --wan`, the links between them, and what is chosen of a plan."""

from __future__ import annotations

import pytest

from p2pserve.coordinator import Phase
from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.sdk.demo.ocean import (
    BOXES,
    CLIENT,
    DEGRADED_GBPS,
    MODEL,
    PLACES,
    PORT_GBPS,
    build_scenario,
    busiest_decode,
    heaviest_link,
    kv_links,
)
from p2pserve.sims.wan import measured_link


def test_there_are_six_boxes_at_three_sites_and_one_of_them_is_behind_nat() -> None:
    scenario = build_scenario()
    assert len(BOXES) == len({box.name for box in BOXES}) == 6
    assert {box.site for box in BOXES} == set(PLACES)
    assert [box.name for box in BOXES if scenario.boxes[box.name].behind_nat] == ["mumbai-home"]
    assert set(scenario.boxes) == {*(box.name for box in BOXES), CLIENT}
    assert not scenario.boxes[BOXES[0].name].behind_nat, "others join through it"


def test_every_card_is_known_and_holds_the_model() -> None:
    for box in BOXES:
        assert gpu_table().find(box.cards).memory_gib * 2**30 > model_shape(MODEL).weight_bytes


@pytest.mark.parametrize("other", ["frankfurt", "mumbai"])
def test_links_between_sites_are_the_tables(other: str) -> None:
    scenario, row = build_scenario(), measured_link(PLACES["virginia"], PLACES[other])
    pair = scenario.pair("virginia-1", f"{other}-1")
    assert (pair.rtt_ms, pair.gbps) == (row.rtt_ms, row.multi_stream_gbps)
    assert scenario.carried_gbps("virginia-1", f"{other}-1") == min(PORT_GBPS, row.multi_stream_gbps)


def test_the_box_at_home_has_the_thinnest_links_and_the_longest() -> None:
    scenario = build_scenario()
    for source in ("virginia-1", "frankfurt-1"):
        assert scenario.carried_gbps(source, "mumbai-home") < scenario.carried_gbps(source, "mumbai-1")
        assert scenario.pair(source, "mumbai-home").rtt_ms > scenario.pair(source, "mumbai-1").rtt_ms
        assert scenario.pair("mumbai-1", "mumbai-home").rtt_ms < scenario.pair(source, "mumbai-1").rtt_ms


def test_kv_goes_from_each_box_that_prefills_to_each_that_decodes() -> None:
    phases = {box.name: box.phase for box in BOXES}
    assert len(kv_links()) == len(set(kv_links())) == 2 * 4
    assert {(phases[source], phases[target]) for source, target in kv_links()} == {(Phase.PREFILL, Phase.DECODE)}
    rates = [build_scenario().carried_gbps(*link) for link in kv_links()]
    assert min(rates) > 2 * DEGRADED_GBPS, "a link that has degraded is to be one that was better"


def test_what_degrades_is_the_wide_link_that_the_plan_uses_most() -> None:
    scenario = build_scenario()
    shares = {
        ("virginia-1", "virginia-1"): 0.4,
        ("virginia-1", "mumbai-1"): 0.3,
        ("virginia-1", "virginia-2"): 0.2,
        ("frankfurt-1", "mumbai-1"): 0.1,
    }
    assert heaviest_link(shares, scenario) == ("virginia-1", "virginia-2")
    assert heaviest_link({("virginia-1", "mumbai-1"): 1.0}, scenario) == ("virginia-1", "mumbai-1"), "no other is used"
    assert heaviest_link({("virginia-1", "virginia-1"): 1.0}, scenario) is None


def test_what_is_lost_is_the_box_that_decodes_most() -> None:
    shares = {("a", "a"): 0.5, ("a", "b"): 0.2, ("c", "b"): 0.1, ("c", "d"): 0.25}
    assert busiest_decode(shares, set()) == "a"
    assert busiest_decode(shares, {"a"}) == "b", "0.2 and 0.1 together"
    assert busiest_decode({("a", "a"): 1.0}, {"a"}) is None
