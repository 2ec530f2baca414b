"""How fast a replica is and where its KV goes, by the cluster it stands in."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Phase, Replica, Stage
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.kvtransport.probing.figures import WINDOW_BYTES
from p2pserve.sims.kv_transfers import links_between
from p2pserve.sims.network import FluidError, FluidNetwork, link_capacities
from p2pserve.sims.scenario import SimSettings, WorldError, roofline_model

GB = 1e9 / 8


def cluster_of(**more: Any) -> Cluster:
    """Three boxes of two A100; the first has no link to the third."""
    gpu = gpu_table().find("A100-SXM4-80GB")
    gbps = np.array([[0, 10, 0], [10, 0, 20], [10, 20, 0]], np.float64)
    rtt = np.array([[0, 0.01, 0.03], [0.01, 0, 0.1], [0.03, 0.1, 0]])
    boxes = tuple(Box(id=name, gpu=gpu, gpus=2, gpu_link_gbps=1000.0) for name in "abc")
    return replace(Cluster(boxes=boxes, gbps=gbps, rtt_s=rtt, usd_per_gb=np.zeros((3, 3))), **more)


def replica(*stages: tuple[str, int, int], phase: Phase = Phase.PREFILL, tp: int = 2) -> Replica:
    return Replica(
        id="".join(box for box, _, _ in stages),
        phase=phase,
        stages=tuple(Stage(peer=box, tp=tp, first_layer=first, last_layer=last) for box, first, last in stages),
    )


def service(name: str = "llama-7b") -> Service:
    ones = np.ones(4, np.int64)
    workload = Workload(name="w", prompts=ones, outputs=ones, rate=1.0)
    return Service(name="s", model=model_shape(name), workload=workload, slo=Slo(ttft_s=1.0, tpot_s=0.05))


def test_kv_goes_to_every_stage_that_holds_its_layers_by_how_many_it_holds() -> None:
    links = links_between(cluster_of(), replica(("b", 0, 20), ("c", 20, 32)), replica(("c", 0, 16), ("a", 16, 32)))
    found = {(share.source, share.target): share.fraction for share in links.shares}
    assert found == {(1, 2): 16 / 32, (1, 0): 4 / 32, (2, 0): 12 / 32}
    assert links.rtt_s == 0.1, "the longest of them"


def test_kv_inside_a_box_needs_no_link_and_takes_no_round_trip() -> None:
    links = links_between(cluster_of(), replica(("c", 0, 32)), replica(("c", 0, 32)))
    assert [(share.source, share.target, share.fraction) for share in links.shares] == [(2, 2, 1.0)]
    assert links.rtt_s == 0.0


def test_layers_of_one_pair_of_boxes_are_one_share() -> None:
    halves = tuple(Stage(peer="b", tp=1, first_layer=16 * n, last_layer=16 * n + 16, first_gpu=n) for n in (0, 1))
    links = links_between(
        cluster_of(), Replica(id="b", phase=Phase.PREFILL, stages=halves), replica(("c", 0, 32), phase=Phase.DECODE)
    )
    assert [(share.source, share.target, share.fraction) for share in links.shares] == [(1, 2, 1.0)]


def test_a_pairing_without_a_link_is_named() -> None:
    with pytest.raises(WorldError, match="pairing a -> c: there is no link from box a to box c"):
        links_between(cluster_of(), replica(("a", 0, 32)), replica(("c", 0, 32)))
    assert links_between(cluster_of(), replica(("c", 0, 32)), replica(("a", 0, 32))).shares, "the way back has one"


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (replica(("a", 0, 32), tp=3), "replica a: GPU 2 of box a, which has 2"),
        (replica(("a", 0, 16), ("c", 16, 32)), "replica ac: there is no link from box a to box c"),
        (replica(("c", 0, 16), ("a", 16, 32)), "replica ca: there is no link from box a to box c"),
    ],
)
def test_a_replica_that_the_cluster_cannot_hold_is_refused(made: Replica, says: str) -> None:
    with pytest.raises(WorldError, match=f"^{says}$"):
        roofline_model(cluster_of(), service(), made)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(WorldError, match="replica b: bloom-176b does not fit its 1 GPU"):
        roofline_model(cluster_of(), service("bloom-176b"), replica(("b", 0, 70), tp=1))


def test_only_replicas_that_decode_have_their_steps_cut_by_the_deadline() -> None:
    strict = replace(service(), slo=Slo(ttft_s=1.0, tpot_s=0.012))
    prefill, mixed = (
        roofline_model(cluster_of(), strict, replica(("b", 0, 32), phase=phase, tp=1))
        for phase in (Phase.PREFILL, Phase.MIXED)
    )
    assert mixed.max_batched_tokens < prefill.max_batched_tokens
    assert mixed.kv_tokens == prefill.kv_tokens > 0


def test_a_pipeline_has_more_room_and_longer_steps_over_slower_links() -> None:
    one = roofline_model(cluster_of(), service(), replica(("b", 0, 32)))
    two = roofline_model(cluster_of(), service(), replica(("b", 0, 16), ("c", 16, 32)))
    slow = roofline_model(cluster_of(rtt_s=np.full((3, 3), 0.5)), service(), replica(("b", 0, 16), ("c", 16, 32)))
    assert two.kv_tokens > 1.9 * one.kv_tokens
    assert slow.times.prefill_s(512, 0.0) > two.times.prefill_s(512, 0.0) + 0.2


@pytest.mark.parametrize(
    ("change", "says"),
    [({"streams": 0}, "streams is 0"), ({"detect_s": -0.1}, "detect_s is -0.1"), ({"detect_s": np.nan}, "detect_s")],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(WorldError, match=says):
        SimSettings(**change)
    assert SimSettings(streams=1, detect_s=0.0).streams == 1


def test_a_stream_carries_a_window_per_round_trip_and_never_more_than_its_link() -> None:
    one, many = link_capacities(cluster_of(), 1), link_capacities(cluster_of(), 1000)
    assert one[1, 2] == pytest.approx(WINDOW_BYTES / 0.1)
    assert link_capacities(cluster_of(), 3)[1, 2] == pytest.approx(3 * one[1, 2])
    assert many[1, 2] == 20 * GB
    assert one[0, 0] == 1000 * GB, "inside a box"
    assert many[0, 2] == 0.0
    assert (link_capacities(cluster_of()) >= many).all()


def test_a_box_sends_no_faster_than_its_best_link() -> None:
    network = FluidNetwork(link_capacities(cluster_of()))
    flows = [network.start(1, target, 1e9, 0.0) for target in (0, 2)]
    assert [flow.rate for flow in flows] == pytest.approx([10 * GB, 10 * GB]), "20 Gb/s for both"
    network.check_integrity()
    ends = network.wake_at
    assert ends == pytest.approx(1e9 / (10 * GB))
    assert network.advance(ends * 0.999) == []
    ended = network.advance(ends)
    while len(network):
        ended += network.advance(network.wake_at)
    assert [flow.key for flow in ended] == [flow.key for flow in flows]
    assert all(flow.done for flow in flows)
    assert network.wake_at == np.inf


def test_a_flow_that_is_stopped_leaves_its_share_and_stops_once() -> None:
    network = FluidNetwork(link_capacities(cluster_of()))
    one, other = (network.start(1, 2, 1e9, 0.0) for _ in range(2))
    assert one.rate == pytest.approx(10 * GB)
    network.stop(other, 0.1)
    network.stop(other, 0.2)
    assert one.rate == pytest.approx(20 * GB)
    assert len(network) == 1
    assert one.ends_at == pytest.approx(0.1 + (1e9 - 0.1 * 10 * GB) / (20 * GB))


@pytest.mark.parametrize(
    ("ends", "size", "limit", "says"),
    [
        ((0, 2), 1.0, 1.0, "no link from box 0 to box 2"),
        ((0, 1), 0.0, 1.0, "a flow of 0.0 bytes"),
        ((0, 1), 1.0, 0.0, "no more than 0.0"),
        ((0, 1), np.nan, 1.0, "a flow of nan bytes"),
    ],
)
def test_a_flow_that_cannot_be_is_refused(ends: tuple[int, int], size: float, limit: float, says: str) -> None:
    network = FluidNetwork(link_capacities(cluster_of()))
    with pytest.raises(FluidError, match=says):
        network.start(*ends, size, 0.0, limit=limit)
    assert len(network) == 0
