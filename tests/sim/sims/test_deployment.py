"""One service of a simulation: loads, routes around what is missing, and plans that change."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.planning.model.cluster import Box, Cluster, ClusterError
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.routing.interface import NoRoute, Route, RoutingSettings
from p2pserve.coordinator.routing.router import Router
from p2pserve.sims.deployment import Deployment, check_plans
from p2pserve.sims.engine.engine import Engine
from p2pserve.sims.engine.sequence import Sequence
from p2pserve.sims.engine.values import SimEngineError, SimEngineSettings
from p2pserve.sims.events import Scheduled
from p2pserve.sims.policies import ROUND_ROBIN
from p2pserve.sims.records import Trace
from p2pserve.sims.scenario import ServiceRun, SimSettings, WorldError
from p2pserve.sims.serving import ReplicaHost, SimRequest

from ...linear_times import LinearTimes

MODEL = ModelShape(name="toy", layers=4, hidden=16, heads=1, kv_heads=1, head_dim=16, intermediate=32, vocabulary=9)
P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED


def replica(name: str, phase: Phase, box: str = "", *, gpu: int = 0) -> Replica:
    stage = Stage(peer=box or name, tp=1, first_layer=0, last_layer=4, first_gpu=gpu)
    return Replica(id=name, phase=phase, stages=(stage,))


def plan(*replicas: Replica, pairs: dict[tuple[str, str], float] | None = None, service: str = "toy") -> Plan:
    weights = pairs or {(each.id, each.id): 1.0 / len(replicas) for each in replicas}
    pairings = tuple(Pairing(prefill=a, decode=b, weight=weight) for (a, b), weight in weights.items())
    return Plan(epoch=1, version=1, service=service, replicas=replicas, pairings=pairings, codec="raw", why=())


def cluster(*boxes: str, gbps: float = 1.0) -> Cluster:
    count = len(boxes)
    return Cluster(
        boxes=tuple(Box(id=name, gpu=gpu_table().find("A40"), gpus=2, gpu_link_gbps=160.0) for name in boxes),
        gbps=np.full((count, count), gbps),
        rtt_s=np.zeros((count, count)),
        usd_per_gb=np.zeros((count, count)),
    )


def start(each: Replica) -> ReplicaHost:
    def advance(host: ReplicaHost, now: float) -> list[Scheduled]:
        return [Scheduled(now + 1.0, host)]

    engine = Engine(LinearTimes(step=1.0), SimEngineSettings(), kv_tokens=1600)
    return ReplicaHost(0, 0, each, engine, advance)


def deployment(of: Plan, boxes: Cluster, policy: str = "", also: SimSettings | None = None) -> Deployment:
    one = np.ones(1, dtype=np.int64)
    trace = Trace(ids=one, arrival_s=np.zeros(1), prompt=one, output=one, lengths="made up", arrivals="at once")
    service = Service(name="toy", model=MODEL, workload=Workload(name="w", prompts=one, outputs=one, rate=1.0))
    settings = also or (SimSettings(routing=RoutingSettings(policy=policy)) if policy else SimSettings())
    found = Deployment(0, ServiceRun(service=service, plan=of, trace=trace), boxes, settings)
    for each in of.replicas:
        found.hosts[each.id] = start(each)
        found.note_load(found.hosts[each.id])
    return found


TWO = plan(replica("a", M), replica("b", M))


def test_the_router_hears_of_loads_before_it_routes() -> None:
    found = deployment(TWO, cluster("a", "b"))
    busy = found.hosts["a"]
    busy.outstanding, busy.prefill_tokens = 50, 100_000
    found.note_load(busy)
    assert {found.route(100, 0.0, {}).decode for _ in range(3)} == {"b"}
    busy.outstanding, busy.prefill_tokens = 0, 0
    found.hosts["b"].outstanding, found.hosts["b"].prefill_tokens = 50, 100_000
    found.note_load(busy)
    found.note_load(found.hosts["b"])
    assert found.route(100, 1.0, {}).decode == "a"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (SimSettings(), (None, None)),
        (SimSettings(told_limits=True), (None, 7)),
        (SimSettings(known_answers=True), (7, None)),
    ],
)
def test_of_answers_gateways_know_what_the_settings_say(
    settings: SimSettings, told: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, route = list[tuple[int | None, int | None]](), Router.route

    def listen(router: Router, tokens: int, exclude: frozenset[str] = frozenset(), **facts: Any) -> Route:
        heard.append((facts["output_tokens"], facts["max_output_tokens"]))
        return route(router, tokens, exclude, **facts)

    monkeypatch.setattr(Router, "route", listen)
    deployment(TWO, cluster("a", "b"), also=settings).route(100, 0.0, {}, SimRequest(0, 0, 100, 7))
    assert heard == [told]


def test_missing_boxes_get_no_requests_until_they_are_back() -> None:
    found = deployment(TWO, cluster("a", "b"), ROUND_ROBIN)
    found.set_missing(frozenset({"a"}))
    assert {found.route(10, 0.0, {}).decode for _ in range(4)} == {"b"}
    found.set_missing(frozenset({"a", "b"}))
    with pytest.raises(NoRoute):
        found.route(10, 0.0, {})
    found.set_missing(frozenset())
    assert {found.route(10, 0.0, {}).decode for _ in range(10)} == {"a", "b"}


def test_replicas_of_the_same_gpus_go_on_under_another_plan() -> None:
    found = deployment(TWO, cluster("a", "b", "c"), ROUND_ROBIN)
    kept, gone = found.hosts["a"], found.hosts["b"]
    stopped, begun = found.follow_plan(
        plan(replica("first", P, "a"), replica("c", M), pairs={("first", "c"): 1.0}), start
    )
    assert (stopped, [host.replica.id for host in begun]) == ([gone], ["c"])
    assert found.hosts == {"first": kept, "c": begun[0]}
    assert (kept.replica.id, kept.replica.phase) == ("first", P)
    found.note_load(gone)  # not of this plan any more: the router is not told, and does not know the name
    found.mark_ready(begun)
    assert found.route(10, 0.0, {}).decode == "c"


def test_new_replicas_get_requests_when_they_are_ready() -> None:
    found = deployment(plan(replica("a", M)), cluster("a", "b"), ROUND_ROBIN)
    found.follow_plan(TWO, start)
    assert {found.route(10, 0.0, {}).decode for _ in range(4)} == {"a"}
    found.set_missing(frozenset({"a"}))
    with pytest.raises(NoRoute):
        found.route(10, 0.0, {})
    found.mark_ready([found.hosts["b"]])
    assert found.route(10, 0.0, {}).decode == "b"
    found.follow_plan(plan(replica("b", M)), start)  # ready replicas stay so
    assert found.route(10, 0.0, {}).decode == "b"


def test_a_replica_that_is_not_ready_stays_so_under_the_next_plan() -> None:
    found = deployment(plan(replica("a", M)), cluster("a", "b"), ROUND_ROBIN)
    found.follow_plan(TWO, start)
    found.follow_plan(TWO, start)
    assert {found.route(10, 0.0, {}).decode for _ in range(4)} == {"a"}


def test_pairs_with_requests_need_a_link() -> None:
    split = (replica("a", P), replica("b", D))
    with pytest.raises(WorldError, match="no link from box a to box b"):
        deployment(plan(*split, pairs={("a", "b"): 1.0}), cluster("a", "b", gbps=0.0))
    unused = plan(replica("a", M), replica("b", M), pairs={("a", "a"): 0.5, ("b", "b"): 0.5, ("a", "b"): 0.0})
    deployment(unused, cluster("a", "b", gbps=0.0))  # a pair without requests needs none
    found = deployment(plan(*split, pairs={("a", "b"): 1.0}), cluster("a", "b"))
    assert found.transfer_links(*split) is found.transfer_links(*split)


def test_plans_that_do_not_fit_the_cluster() -> None:
    check_plans(cluster("a"), [plan(replica("x", M, "a")), plan(replica("y", M, "a", gpu=1), service="other")])
    with pytest.raises(WorldError, match="replica x: box a has no GPU 2"):
        check_plans(cluster("a"), [plan(replica("x", M, "a", gpu=2))])
    with pytest.raises(WorldError, match="GPU 0 of box a is in the plans of toy and other"):
        check_plans(cluster("a"), [plan(replica("x", M, "a")), plan(replica("y", M, "a"), service="other")])
    with pytest.raises(ClusterError):
        check_plans(cluster("a"), [plan(replica("x", M, "z"))])


def test_a_replica_that_is_blamed_for_a_failure_is_left_out_of_this_route_only() -> None:
    found = deployment(TWO, cluster("a", "b"), ROUND_ROBIN)
    found.hosts["b"].number = 1
    assert {found.route(10, 0.0, {"box": 0}).decode for _ in range(4)} == {"b"}
    with pytest.raises(NoRoute):
        found.route(10, 0.0, {"box": 0, "other": 1})
    assert {found.route(10, 0.0, {}).decode for _ in range(10)} == {"a", "b"}


def test_an_alarm_that_has_moved_does_nothing() -> None:
    host = start(replica("a", M))
    host.engine.submit(Sequence(1, 4, 2), 3.0)
    host.alarm = 3.0
    assert host.happen(2.0) == ()
    assert host.alarm == 3.0
    assert host.happen(3.0) == [Scheduled(4.0, host)]
    assert host.alarm != 3.0
    assert host.engine.wake_at < inf


@pytest.mark.parametrize(("outstanding", "tokens"), [(1, 0), (0, 7)])
def test_requests_that_are_left_behind_are_noticed(outstanding: int, tokens: int) -> None:
    host = start(replica("a", M))
    host.outstanding, host.prefill_tokens = outstanding, tokens
    with pytest.raises(SimEngineError, match=f"a is left with {outstanding} requests, {tokens} tokens to prefill"):
        host.check_integrity()


def test_the_wire_size_of_a_token_follows_the_codec() -> None:
    found = deployment(TWO, cluster("a", "b"))
    assert found.token_bytes == MODEL.kv_bytes_per_token * found.service.kv_bits / 16.0
