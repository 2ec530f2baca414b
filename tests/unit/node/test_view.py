"""What a node makes of adverts and plans, and what the elected coordinator says about them."""

from typing import Any

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Demand, LinkView, Phase, Plan, Replica, Stage
from p2pserve.coordinator.capacity import SLOWEST_GBPS
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
from p2pserve.node.adverts import decode_adverts
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.messages import Advert, EngineAdvert, LinkTable
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.planning.services import Coordinator
from p2pserve.node.settings import WAN
from p2pserve.node.view import NetworkView, Queue, count_queues

A, B, C = PeerId("peer-a"), PeerId("peer-b"), PeerId("peer-c")
SERVICE = "tiny-1234"


def advert(
    state: str | None = "ready",
    *,
    service: str | None = SERVICE,
    draining: bool = False,
    stats: EngineStats | None = None,
    fits: int = 4,
    **engine: Any,
) -> Advert:
    figures = {"tflops": 1.0, "memory_gbps": 10.0, "kv_tokens": 1000, "starts": 1, **engine}
    return Advert(
        hardware=Hardware(cores=4, memory_gib=8.0, processor="x"),
        draining=draining,
        model=_model(service) if service is not None else None,
        engine=EngineAdvert(state=state, **figures) if state is not None else None,
        stats=stats,
        fits=fits,
    )


def link_of(rtt_s: float) -> LinkFigures:
    return LinkFigures(rtt_s=rtt_s, one_stream_gbps=0.2, capacity_gbps=8.0)


def alone(peer: PeerId) -> Replica:
    return Replica(id=peer, phase=Phase.MIXED, stages=(Stage(peer=peer, tp=1, first_layer=0, last_layer=4),))


def _model(service: str) -> ModelInfo:
    return ModelInfo(
        service=service,
        shape=ModelShape(
            name="tiny", layers=4, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
        ),
        max_model_len=512,
        weights=WeightSizes(layers=(1 << 20,) * 4, embeddings=1 << 20, head=256),
    )


def view_of(**adverts: Advert) -> NetworkView:
    return NetworkView(adverts={PeerId(f"peer-{name}"): each for name, each in adverts.items()})


def packed(plan: Plan) -> bytes:
    return msgspec.msgpack.encode(plan)


def decide(
    coordinator: Coordinator, view: NetworkView, leader: tuple[PeerId, int] | None, now: float = 0.0
) -> Plan | None:
    task = coordinator.next(view, leader, now)
    return coordinator.settle(task, task.run(lambda: False), view, leader, now) if task is not None else None


def plan_for(view: NetworkView, epoch: int = 1, own: PeerId = A) -> Plan:
    plan = decide(Coordinator(own, "raw"), view, (own, epoch))
    assert plan is not None
    return plan


# ---- adverts ----------------------------------------------------------------------------------------------


def test_adverts_survive_and_garbage_is_left_out() -> None:
    good = advert(stats=EngineStats(1, 2, 0.5, 100))
    entries = {A: msgspec.msgpack.encode(good), B: b"\xc1", C: msgspec.msgpack.encode({"version": 2})}
    assert decode_adverts(entries) == {A: good}


@pytest.mark.parametrize(
    "bad",
    [
        advert(stats=EngineStats(-1, 0, 0.0, 0)),
        advert(stats=EngineStats(0, 0, 0.0, -1)),
        advert(stats=EngineStats(0, 0, 0.0, 0, -1)),
        advert(stats=EngineStats(0, 0, float("nan"), 0)),
        advert(tflops=float("nan")),
        advert(tflops=float("inf")),
        advert(memory_gbps=-1.0),
        advert(kv_tokens=-1),
        advert(max_model_len=-1),
        advert(service=""),
        msgspec.structs.replace(advert(), hardware=Hardware(cores=1, memory_gib=0.0, processor="x")),
        msgspec.structs.replace(
            advert(),
            hardware=Hardware(cores=1, memory_gib=1.0, processor="x", gpus=(Gpu(name="g", memory_gib=-1, uuid="u"),)),
        ),
    ],
)
def test_figures_that_cannot_be_are_refused_before_anyone_computes_with_them(bad: Advert) -> None:
    """One node's nonsense must stop neither the coordinator nor a gateway."""
    assert decode_adverts({A: msgspec.msgpack.encode(bad)}) == {}


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [("shape", "hidden", 0), ("shape", "kv_heads", 3), ("shape", "layers", 5), ("weights", "layers", [])],
)
def test_a_model_that_cannot_be_is_refused_as_well(part: str, field: str, value: object) -> None:
    said = msgspec.to_builtins(advert())
    said["model"][part][field] = value
    assert decode_adverts({A: msgspec.msgpack.encode(said)}) == {}


@pytest.mark.parametrize("names", [(), ("A40", "L4"), ("GTX 9",)])
def test_emulated_gpus_that_are_none_are_refused_as_well(names: tuple[str, ...]) -> None:
    said = msgspec.to_builtins(advert())
    said["hardware"] |= {
        "gpus": [{"name": name, "memory_gib": 48.0, "uuid": "u"} for name in names], "emulated_as": "dense"
    }  # fmt: skip
    assert decode_adverts({A: msgspec.msgpack.encode(said)}) == {}


def test_whatever_is_accepted_can_be_planned_and_routed_with() -> None:
    extreme = [
        advert(tflops=1e12, memory_gbps=1e-6, kv_tokens=0),
        advert(tflops=1e-300, memory_gbps=1e12),
        advert(tflops=1e12, memory_gbps=1e-300),
        advert(tflops=0.0, memory_gbps=0.0),
        advert(memory_gbps=0.0),
        advert(tflops=1e-6, memory_gbps=1e12, stats=EngineStats(2**48, 2**48, 1e12, 2**48, 2**48)),
    ]
    entries = {
        PeerId(f"peer-{name}"): msgspec.msgpack.encode(each) for name, each in zip("abcdef", extreme, strict=True)
    }
    adverts = decode_adverts(entries)
    assert adverts.keys() == entries.keys()
    view = NetworkView(adverts=adverts)
    plan = plan_for(view)
    assert set(plan.peers) == {"peer-a", "peer-f"}
    assert len(view.loads({A: Queue(3, 900)})) == 6


def test_adverts_are_followed_as_they_come_and_go() -> None:
    first, second = msgspec.msgpack.encode(advert(starts=1)), msgspec.msgpack.encode(advert(starts=2))
    view = NetworkView()
    view.update({A: first, B: first, C: b"\xc1"})
    assert [view.starts(peer) for peer in (A, B, C)] == [1, 1, 0]
    before = view.adverts[A]
    view.update({A: first, B: second, C: first})
    assert [view.starts(peer) for peer in (A, B, C)] == [1, 2, 1]
    assert view.adverts[A] is before
    view.update({A: b"\xc1", C: first})
    assert set(view.adverts) == {C}  # what A says now is none, so what it said before no longer holds


@pytest.mark.parametrize("payload", [b"\xa1\xff", b"\x81" * 2000, b"\x91" * 100_000, b""])
def test_hostile_bytes_are_refused_like_any_others(payload: bytes) -> None:
    assert decode_adverts({A: payload}) == {}


# ---- plans ------------------------------------------------------------------------------------------------


def test_of_two_that_were_elected_for_one_epoch_the_one_that_leads_on_is_followed() -> None:
    view = view_of(a=advert(), b=advert())
    first = plan_for(view, epoch=3)
    other = msgspec.structs.replace(first, version=5)
    assert view.consider_plan(other, B)
    assert not view.consider_plan(first, B)
    assert not view.consider_plan(first)  # of whom, is not known
    assert not view.consider_plan(msgspec.structs.replace(first, epoch=2), A)
    assert view.consider_plan(first, A)
    assert not view.consider_plan(first, A)
    assert (view.plan, view.plan_authors) == (first, {first.service: A})


def test_a_plan_is_followed_when_it_is_newer() -> None:
    view = view_of(a=advert(), b=advert())
    plan = plan_for(view, epoch=3)
    later = msgspec.structs.replace(plan, version=plan.version + 1)
    assert view.consider_plan(plan)
    assert not view.consider_plan(plan)  # the same again is no news
    assert view.consider_plan(later)
    assert not view.consider_plan(plan)  # an older one of the same epoch
    assert view.plan == later


def test_a_new_epoch_wins_whatever_its_version() -> None:
    view = view_of(a=advert(), b=advert())
    old = msgspec.structs.replace(plan_for(view, epoch=3), version=9)
    new = msgspec.structs.replace(old, epoch=4, version=1)
    assert view.consider_plan(old)
    assert view.consider_plan(new)
    assert not view.consider_plan(msgspec.structs.replace(old, version=10))
    assert view.plan == new


# ---- who may be used ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("each", "serving", "hopeful"),
    [
        (advert(), True, False),
        (advert(draining=True), False, False),
        (advert("starting"), False, True),
        (advert("restarting"), False, True),
        (advert("restarting", draining=True), False, False),
        (advert("failed"), False, False),
        (advert(None), False, False),
        (advert(service="other"), False, False),
        (advert("starting", service="other"), False, False),
        (advert(service=None), False, False),
    ],
)
def test_new_requests_go_to_ready_engines_of_the_service(each: Advert, serving: bool, hopeful: bool) -> None:
    view = view_of(a=each)
    assert view.serving(alone(A), SERVICE) is serving
    assert view.hopeful(SERVICE) is hopeful
    assert not view.serving(alone(B), SERVICE)


TWO = (Stage(peer=A, tp=1, first_layer=0, last_layer=3), Stage(peer=B, tp=1, first_layer=3, last_layer=4))


@pytest.mark.parametrize(
    ("head", "other", "serving"),
    [
        (advert(stages=TWO, fits=3), advert(stages=TWO, fits=1), True),
        (advert(stages=TWO, fits=3), advert("loading", stages=TWO, fits=1), True),  # its head knows better
        (advert("loading", stages=TWO, fits=3), advert(stages=TWO, fits=1), False),
        (advert(stages=TWO, fits=3), advert(stages=TWO, fits=1, draining=True), False),
        (advert(stages=TWO, fits=3), advert(service="other"), False),
        (advert(stages=TWO, fits=3), None, False),
        (advert(stages=TWO[::-1], fits=3), advert(stages=TWO, fits=1), False),  # a plan that has passed
        (advert(), advert(), False),
    ],
)
def test_a_replica_that_spans_boxes_serves_when_its_head_is_ready_with_these_stages(
    head: Advert, other: Advert | None, serving: bool
) -> None:
    view = view_of(a=head, **({"b": other} if other is not None else {}))
    assert view.serving(Replica(id=A, phase=Phase.MIXED, stages=TWO), SERVICE) is serving


@pytest.mark.parametrize("state", ["waiting", "loading", "ready", "restarting"])
def test_boxes_that_wait_for_layers_are_planned_with_before_anything_runs_there(state: str) -> None:
    unmeasured: dict[str, Any] = {"tflops": 0.0, "memory_gbps": 0.0, "starts": 0}
    view = view_of(a=advert(state, fits=3, **unmeasured), b=advert("waiting", fits=1, **unmeasured))
    (replica,) = plan_for(view).replicas
    assert replica.stages == TWO
    view.adverts[B] = advert("failed", fits=1, **unmeasured)
    assert decide(Coordinator(A, "raw"), view, (A, 1)) is None


@pytest.mark.parametrize("out", [advert("failed"), advert("restarting"), advert(draining=True)])
def test_the_planner_leaves_out_who_cannot_serve(out: Advert) -> None:
    plan = plan_for(view_of(a=advert(), b=out))
    assert plan.peers == (A,)
    assert plan.replicas[0].phase is Phase.MIXED


def test_boxes_and_links_are_what_was_advertised() -> None:
    gpus = (Gpu(name="g", memory_gib=40.0, uuid="1"), Gpu(name="g", memory_gib=40.0, uuid="2"))
    hardware = Hardware(cores=1, memory_gib=9.0, processor="x", gpus=gpus)
    both = msgspec.structs.replace(advert(), hardware=hardware, tp=2)
    view = view_of(a=both, b=advert(), c=advert(service="other"))
    view.links_told = {B: LinkTable(links={A: link_of(0.25)})}
    boxes = {box.peer: box for box in view.boxes(SERVICE)}
    assert set(boxes) == {A, B}
    assert (boxes[A].memory_gib, boxes[B].memory_gib) == (80.0, 8.0)
    assert [(box.tp, box.fits, box.layers) for box in (boxes[A], boxes[B])] == [(2, 4, 4), (1, 4, 4)]
    assert view.links() == [LinkView(source=B, target=A, rtt_s=0.25, gbps=8.0)]
    assert view.services() == ("other", SERVICE)


def test_rates_and_prices_of_links_are_what_is_known_of_both_ends() -> None:
    view = view_of(a=advert(), b=advert(), c=advert())
    link = link_of(0.1)
    view.links_told = {
        A: LinkTable(
            box=BoxFigures(up_gbps=2.0, up_usd_per_gb=0.1),
            links={B: link, C: msgspec.structs.replace(link_of(0.2), usd_per_gb=0.01)},
        ),
        B: LinkTable(links={A: msgspec.structs.replace(link, reachable=False)}),
        C: LinkTable(box=BoxFigures(down_gbps=1.0, down_usd_per_gb=0.05)),
    }
    found = {(link.source, link.target): (link.rtt_s, link.gbps, link.usd_per_gb) for link in view.links()}
    assert found == {(A, B): (0.1, 2.0, 0.1), (A, C): (0.2, 1.0, 0.01), (B, A): (0.1, SLOWEST_GBPS, 0.0)}


def test_boxes_of_a_site_that_a_box_tells_nothing_of_are_linked_as_the_first_of_their_site() -> None:
    view = view_of(a=advert(), b=advert(), c=advert())
    view.links_told = {
        A: LinkTable(links={B: link_of(0.1)}),
        B: LinkTable(site="x", box=BoxFigures(down_gbps=2.0)),
        C: LinkTable(site="x", box=BoxFigures(down_gbps=4.0)),
    }
    assert {(link.source, link.target, link.gbps) for link in view.links()} == {(A, B, 2.0), (A, C, 4.0)}


def test_a_load_is_what_is_in_flight_and_what_others_had_there_at_the_latest_report() -> None:
    view = view_of(
        a=advert(stats=EngineStats(running=5, waiting=1, kv_usage=0.5, kv_free_tokens=500, pending_prefill_tokens=70)),
        b=advert(stats=EngineStats(running=1, waiting=0, kv_usage=0.1, kv_free_tokens=900)),
        c=advert(),
    )

    def loads(own: dict[PeerId, Queue]) -> list[tuple[int, int]]:
        found = {load.replica: load for load in view.loads(own)}
        assert [found[p].kv_free_tokens for p in (A, B, C)] == [500, 900, 1000]
        return [(found[p].outstanding, found[p].prefill_tokens) for p in (A, B, C)]

    view.weigh_reports({A: Queue(2, 30), B: Queue(4, 80)})
    assert loads({A: Queue(2, 30), B: Queue(4, 80)}) == [(6, 70), (4, 80), (0, 0)]
    view.weigh_reports({})  # the same reports: they speak of the time when they came
    assert loads({}) == [(4, 40), (0, 0), (0, 0)]
    assert loads({A: Queue(1), C: Queue(1, 9)}) == [(5, 40), (0, 0), (1, 9)]
    for _ in range(2):
        view.note_sent(A, 40)
    view.note_sent(C, 9)
    assert [load.sent_tokens for load in view.loads({})] == [80, 0, 9]
    view.adverts[A] = advert(stats=EngineStats(running=6, waiting=1, kv_usage=0.5, kv_free_tokens=500))
    assert [load.sent_tokens for load in view.loads({})] == [0, 0, 9], "A has reported since"


def test_starts_tell_a_restarted_engine() -> None:
    view = view_of(a=advert(starts=3), b=advert(None))
    assert [view.starts(peer) for peer in (A, B, C)] == [3, 0, 0]


# ---- the coordinator --------------------------------------------------------------------------------------


def publish(view: NetworkView, coordinator: Coordinator, epoch: int, own: PeerId = A, now: float = 0.0) -> Plan | None:
    """What the agent does with a decision: its own word counts without its echo."""
    plan = decide(coordinator, view, (own, epoch), now)
    if plan is not None:
        assert view.consider_plan(plan)
    return plan


@pytest.mark.parametrize("leader", [None, (B, 1)])
def test_who_is_not_elected_is_silent(leader: tuple[PeerId, int] | None) -> None:
    assert decide(Coordinator(A, "raw"), view_of(a=advert(), b=advert()), leader) is None


def test_nothing_to_plan_with_is_no_plan() -> None:
    coordinator = Coordinator(A, "raw")
    for view in (NetworkView(), view_of(a=advert(service=None)), view_of(a=advert("starting", tflops=0.0))):
        assert decide(coordinator, view, (A, 1)) is None


def test_what_led_to_no_plan_is_not_planned_with_again() -> None:
    coordinator, view = Coordinator(A, "raw"), view_of(a=advert(), b=advert())
    assert coordinator.next(view, (A, 1), 0.0) is not None
    assert coordinator.next(view, (A, 1), WAN.quiet_s) is None


def test_a_plan_is_made_once_and_again_only_for_a_change() -> None:
    coordinator, view = Coordinator(A, "raw"), view_of(a=advert(), b=advert())
    first = publish(view, coordinator, 1)
    assert first is not None
    assert first.number == (1, 1)
    assert [publish(view, coordinator, 1) for _ in range(20)] == [None] * 20
    view.adverts[C] = advert()
    second = publish(view, coordinator, 1)
    assert second is not None
    assert second.number == (1, 2)
    assert C in second.peers
    assert publish(view, coordinator, 1) is None


def test_load_and_small_moves_of_round_trips_are_no_reason_for_a_plan() -> None:
    coordinator, view = Coordinator(A, "raw"), view_of(a=advert(), b=advert(), c=advert())
    view.links_told = {B: LinkTable(links={A: link_of(0.010)})}
    assert publish(view, coordinator, 1) is not None
    view.links_told = {B: LinkTable(links={A: link_of(0.012)})}
    view.adverts[B] = advert(stats=EngineStats(9, 9, 0.9, 1))
    assert publish(view, coordinator, 1) is None


def test_figures_that_move_are_planned_with_now_and_then_and_a_box_that_comes_at_once() -> None:
    coordinator, view = Coordinator(A, "raw"), view_of(a=advert(), b=advert())
    assert publish(view, coordinator, 1) is not None
    view.adverts[B] = advert(tflops=2.0)
    assert coordinator.next(view, (A, 1), WAN.quiet_s - 0.1) is None
    assert coordinator.next(view, (A, 1), WAN.quiet_s) is not None
    assert coordinator.next(view, (A, 1), 3 * WAN.quiet_s) is None  # nothing new since
    view.adverts[C] = advert()
    assert coordinator.next(view, (A, 1), WAN.quiet_s) is not None


def test_a_plan_is_kept_while_nobody_asks_for_anything_but_boxes_that_come_are_planned_with() -> None:
    asked = Demand(requests_s=50.0, arrival_cv=1.0, lengths=((100, 20),))
    quiet = msgspec.structs.replace(asked, requests_s=0.0)

    def told(demand: Demand) -> Advert:
        return msgspec.structs.replace(advert(), demand=demand)

    coordinator, view = Coordinator(A, "raw"), view_of(a=told(asked), b=advert())
    assert publish(view, coordinator, 1) is not None
    view.adverts[A] = told(quiet)
    assert coordinator.next(view, (A, 1), WAN.quiet_s) is None
    view.adverts[A] = told(msgspec.structs.replace(asked, requests_s=5.0))
    assert coordinator.next(view, (A, 1), WAN.quiet_s) is not None
    view.adverts[A] = told(quiet)
    assert coordinator.next(view, (A, 1), 2 * WAN.quiet_s) is None
    view.adverts[C] = advert()
    assert coordinator.next(view, (A, 1), 2 * WAN.quiet_s) is not None


def test_a_task_that_was_overtaken_while_it_was_planned_is_planned_again() -> None:
    coordinator, view = Coordinator(A, "raw"), view_of(a=advert(), b=advert())
    task = coordinator.next(view, (A, 1), 0.0)
    assert task is not None
    plan = task.run(lambda: False)
    assert coordinator.settle(task, plan, view, (B, 2), 0.0) is None
    again = coordinator.next(view, (A, 3), 0.0)
    assert again is not None
    assert view.consider_plan(plan_for(view, epoch=3))
    assert coordinator.settle(again, again.run(lambda: False), view, (A, 3), 0.0) is None
    assert coordinator.next(view, (A, 3), 0.0) is not None


def test_a_plan_that_is_not_echoed_is_not_made_again_and_its_number_not_used_again() -> None:
    coordinator, view = Coordinator(A, "raw"), view_of(a=advert(), b=advert())
    numbers = [plan.number for _ in range(20) if (plan := decide(coordinator, view, (A, 1))) is not None]
    assert numbers == [(1, 1)]
    view.adverts[C] = advert()
    changed = decide(coordinator, view, (A, 1))
    assert changed is not None
    assert changed.number == (1, 2)


def test_a_new_leader_states_the_plan_under_its_own_epoch() -> None:
    view = view_of(a=advert(), b=advert())
    first = publish(view, Coordinator(A, "raw"), 4)
    assert first is not None
    heir = Coordinator(B, "raw")
    second = publish(view, heir, 5, own=B)
    assert second is not None
    assert second.number == (5, 1)
    assert second.replicas == first.replicas
    assert publish(view, heir, 5, own=B) is None


def test_a_leader_that_an_election_has_overtaken_is_silent() -> None:
    view = view_of(a=advert(), b=advert())
    publish(view, Coordinator(B, "raw"), 7, own=B)
    view.adverts[C] = advert()
    assert decide(Coordinator(A, "raw"), view, (A, 6)) is None


def test_a_leader_elected_again_goes_on_after_what_is_known_of_its_epoch() -> None:
    """A coordinator that restarts within its epoch has forgotten its versions; gossip has not."""
    view = view_of(a=advert(), b=advert())
    publish(view, Coordinator(A, "raw"), 4)
    view.adverts[C] = advert()
    again = publish(view, Coordinator(A, "raw"), 4)
    assert again is not None
    assert again.number == (4, 2)


def test_each_service_has_a_plan_over_the_boxes_that_offer_it() -> None:
    coordinator, view = Coordinator(A, "raw"), view_of(a=advert())
    first = publish(view, coordinator, 1)
    view.adverts.update({B: advert(service="other"), C: advert(service="other")})
    other = publish(view, coordinator, 1)
    assert first is not None
    assert other is not None
    assert (set(first.peers), set(other.peers)) == ({A}, {B, C})
    assert view.plans == {SERVICE: first, "other": other}
    assert publish(view, coordinator, 1) is None


def test_requests_and_their_unread_tokens_are_counted_by_the_node_they_lie_at() -> None:
    assert count_queues([(A, 5), (B, 1), (A, 0), (A, 7)]) == {A: Queue(3, 12), B: Queue(1, 1)}
