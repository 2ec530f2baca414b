"""How long weights take to load, added up by hand."""

from typing import Any

import pytest

from p2pserve.coordinator.costs.loading import LoadRates, LoadRatesError, load_seconds
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.plan import Phase, Replica, Stage

MODEL = ModelShape(
    name="toy", layers=10, hidden=1000, heads=10, kv_heads=10, head_dim=100, intermediate=4000, vocabulary=50_000
)
LAYER, ENDS = MODEL.layer_weight_bytes, MODEL.embedding_parameters * MODEL.dtype_bytes
RATES = LoadRates(disk_gb_s=0.1, download_gbps=0.4, start_s=3.0)
ALL = frozenset(range(10))


def replica(name: str, *stages: tuple[str, int, int]) -> Replica:
    made = tuple(Stage(peer=box, tp=1, first_layer=first, last_layer=last) for box, first, last in stages)
    return Replica(id=name, phase=Phase.MIXED, stages=made)


def test_weights_come_from_the_disk_where_the_box_has_had_them_and_over_the_network_else() -> None:
    whole = 10 * LAYER + 2 * ENDS
    assert load_seconds(MODEL, [replica("r", ("a", 0, 10))], {"a": ALL}, RATES) == {
        "r": pytest.approx(3.0 + whole / 0.1e9)
    }
    assert load_seconds(MODEL, [replica("r", ("a", 0, 10))], {}, RATES) == {"r": pytest.approx(3.0 + whole * 8 / 0.4e9)}
    some = load_seconds(MODEL, [replica("r", ("a", 0, 10))], {"a": frozenset(range(4))}, RATES)
    read, fetched = 4 * LAYER + ENDS, 6 * LAYER + ENDS
    assert some == {"r": pytest.approx(3.0 + read / 0.1e9 + fetched * 8 / 0.4e9)}


def test_a_box_reads_a_layer_once_for_all_of_its_replicas() -> None:
    one, other = replica("one", ("a", 0, 10)), replica("other", ("a", 0, 10))
    both = load_seconds(MODEL, [one, other], {"a": ALL}, RATES)
    assert both["one"] == both["other"] == load_seconds(MODEL, [one], {"a": ALL}, RATES)["one"]


def test_a_replica_is_ready_when_its_slowest_box_is() -> None:
    pair = replica("pair", ("a", 0, 3), ("b", 3, 10))
    found = load_seconds(MODEL, [pair], {"a": ALL, "b": ALL}, RATES)
    assert found == {"pair": pytest.approx(3.0 + (7 * LAYER + ENDS) / 0.1e9)}
    three = [replica("front", ("a", 0, 3), ("c", 3, 10)), replica("back", ("b", 0, 5), ("a", 5, 10))]
    found = load_seconds(MODEL, three, {"a": ALL, "b": ALL, "c": ALL}, RATES)
    assert found == dict.fromkeys(("front", "back"), pytest.approx(3.0 + (8 * LAYER + 2 * ENDS) / 0.1e9))
    assert load_seconds(MODEL, [], {}, RATES) == {}


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"disk_gb_s": 0.0}, "disk_gb_s is 0.0; it must be above 0"),
        ({"download_gbps": float("inf")}, "download_gbps is inf"),
        ({"start_s": -1.0}, "start_s is -1.0; it must not be negative"),
    ],
)
def test_rates_that_cannot_be_are_refused(wrong: dict[str, Any], line: str) -> None:
    with pytest.raises(LoadRatesError, match=line):
        LoadRates(**wrong)
