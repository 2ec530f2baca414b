"""What the figures of adverts become for the planner, for gateways, and for whoever asks for the status."""

from typing import Any

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import BoxView, Demand
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.messages import Advert, EngineAdvert, LinkTable, NodeStatus, Status
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.view import NetworkView, Queue

A, B, C = PeerId("peer-a"), PeerId("peer-b"), PeerId("peer-c")
SHAPE = ModelShape(
    name="tiny", layers=4, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
)
MODEL = ModelInfo(
    service="tiny-1234", shape=SHAPE, max_model_len=512, weights=WeightSizes(layers=(1,) * 4, embeddings=1, head=1)
)


def advert(state: str | None = "ready", *gpus: str, engine: dict[str, Any] | None = None, **more: Any) -> Advert:
    """Of a box with these GPUs, all of whose layers fit, and whose engine has measured 1 TFLOP/s and 10 GB/s."""
    figures = {"tflops": 1.0, "memory_gbps": 10.0, "kv_tokens": 1000} | (engine or {})
    cards = tuple(Gpu(name=name, memory_gib=24.0, uuid=str(number)) for number, name in enumerate(gpus))
    hardware = Hardware(cores=4, memory_gib=8.0, processor="x", gpus=cards)
    said = Advert(hardware=hardware, draining=False, model=MODEL, fits=4)
    if state is not None:
        said = msgspec.structs.replace(said, engine=EngineAdvert(state=state, **figures))
    return msgspec.structs.replace(said, **more)


def box(said: Advert) -> BoxView | None:
    """As the planner sees it; None: not at all."""
    found = NetworkView(adverts={A: said}).boxes(MODEL.service)
    return found[0] if found else None


def of_service(service: str, said: Advert, requests_s: float = 0.0) -> Advert:
    demand = Demand(requests_s=requests_s, arrival_cv=1.0, lengths=((100, 10),)) if requests_s else None
    return msgspec.structs.replace(said, model=msgspec.structs.replace(MODEL, service=service), demand=demand)


def parts(**adverts: Advert) -> dict[str, tuple[float, int]]:
    """By box, which part of its GPU it counts for, and tokens of KV."""
    view = NetworkView(adverts={PeerId(name): said for name, said in adverts.items()})
    return {box.peer: (box.part, box.kv_tokens) for service in view.services() for box in view.boxes(service)}


def test_nodes_of_one_box_have_a_part_each_of_it_while_others_are_asked() -> None:
    shared = advert(beside=("a", "b"))
    chat, code = of_service("chat", shared, 2.0), of_service("code", shared, 1.0)
    assert parts(a=chat, b=code) == {"a": (0.5, 500), "b": (0.5, 500)}
    assert parts(a=chat, b=of_service("code", shared)) == {"a": (1.0, 1000), "b": (0.5, 500)}, "nobody asks b's"
    assert parts(a=chat) == {"a": (1.0, 1000)}, "the other one has left"
    alone = advert()
    assert parts(a=of_service("chat", alone, 2.0), b=of_service("code", alone, 1.0))["a"] == (1.0, 1000)


def test_who_calls_another_node_its_box_gains_and_harms_nothing() -> None:
    honest = of_service("chat", advert(), 2.0)
    for beside in (("a", "liar"), ("liar", "a"), ("liar", "liar"), ("liar",), ("a", "gone"), ("liar", "gone")):
        liar = of_service("code", advert(beside=beside), 1e6)
        assert parts(a=honest, liar=liar) == {"a": (1.0, 1000), "liar": (1.0, 1000)}
    pair = advert(beside=("a", "b"))
    two = {"a": of_service("chat", pair, 2.0), "b": of_service("code", pair, 1.0)}
    liar = of_service("big", advert(beside=("a", "b", "liar")), 1e6)
    assert parts(**two, liar=liar) == {"a": (0.5, 500), "b": (0.5, 500), "liar": (1.0, 1000)}


UNMEASURED: dict[str, Any] = {"tflops": 0.0, "memory_gbps": 0.0}


@pytest.mark.parametrize(
    ("said", "figures"),
    [
        (advert(), (1.0, 10.0, 8.0)),
        (advert("ready", "x", "x"), (1.0, 10.0, 48.0)),
        # not measured yet: a processor counts for half a TFLOP/s and 10 GB/s, each GPU in use for 100 and 1000
        (advert("waiting", engine=UNMEASURED, fits=3), (0.5, 10.0, 8.0)),
        (advert("waiting", "x", engine=UNMEASURED, fits=3), (100.0, 1000.0, 24.0)),
        (advert("waiting", "x", "x", "x", engine=UNMEASURED, fits=3, tp=2), (200.0, 2000.0, 72.0)),
        (advert("loading", engine={"tflops": 2.0}, fits=3), (2.0, 10.0, 8.0)),
        (advert("loading", engine={"tflops": 1e-6}, fits=3), (1e-6, 10.0, 8.0)),  # as little as counts
        (advert("loading", engine={"tflops": 0.9e-6}, fits=3), (0.5, 10.0, 8.0)),
    ],
)
def test_a_box_computes_and_copies_what_was_measured_or_is_guessed(
    said: Advert, figures: tuple[float, float, float]
) -> None:
    found = box(said)
    assert found is not None
    assert (found.compute_tflops, found.memory_gbps, found.memory_gib) == figures


@pytest.mark.parametrize(
    ("state", "fits", "measured", "ready"),
    [
        ("ready", 4, True, True),
        ("ready", 9, True, True),  # it has room for more than there is
        ("restarting", 4, True, False),
        ("ready", 4, False, None),  # it serves alone and has not started
        ("waiting", 3, False, True),
        ("failed", 3, True, False),
        (None, 4, True, None),
    ],
)
def test_a_whole_box_is_ready_with_its_engine_and_a_stage_until_it_fails(
    state: str | None, fits: int, measured: bool, ready: bool | None
) -> None:
    found = box(advert(state, engine={} if measured else UNMEASURED, fits=fits))
    assert (found.ready if found is not None else None) is ready
    if found is not None:
        assert found.fits == min(fits, 4)


@pytest.mark.parametrize(
    ("gpus", "card", "gbps"),
    [
        ((), "", 150.0),
        (("a card of next year",), "a card of next year", 150.0),
        (("NVIDIA A40",), "NVIDIA A40", 150.0),  # PCIe 4
        (("NVIDIA A100-SXM4-40GB",), "NVIDIA A100-SXM4-40GB", 600 * 8 * 0.4),  # of NVLink's 600 GB/s both ways
    ],
)
def test_gpus_of_a_box_are_linked_as_their_card_is(gpus: tuple[str, ...], card: str, gbps: float) -> None:
    found = box(advert("ready", *gpus))
    assert found is not None
    assert (found.card, found.card_link_gbps) == (card, gbps)


def test_links_are_billed_at_both_ends_unless_their_own_price_is_known() -> None:
    figures = LinkFigures(rtt_s=0.1, one_stream_gbps=0.2, capacity_gbps=8.0)
    dear = msgspec.structs.replace(figures, usd_per_gb=1.0)
    view = NetworkView(
        adverts={A: advert(), B: advert(), C: advert()},
        links_told={
            A: LinkTable(box=BoxFigures(up_usd_per_gb=0.25, down_usd_per_gb=8.0), links={B: figures, C: dear}),
            B: LinkTable(box=BoxFigures(up_usd_per_gb=16.0, down_usd_per_gb=0.5)),
        },
    )
    assert {link.target: link.usd_per_gb for link in view.links()} == {B: 0.75, C: 1.0}


def test_a_request_may_be_as_long_as_every_engine_takes() -> None:
    adverts = {A: advert(engine={"max_model_len": 400}), B: advert(engine={"max_model_len": 300}), C: advert()}
    assert NetworkView(adverts=adverts).max_model_len(MODEL) == 300  # that of C is not known yet
    del adverts[B]
    assert NetworkView(adverts=adverts).max_model_len(MODEL) == 400
    assert NetworkView(adverts={C: adverts[C]}).max_model_len(MODEL) == 512
    assert NetworkView().max_model_len(MODEL) == 512


def test_demands_are_those_of_the_services_own_gateways() -> None:
    demand = Demand(requests_s=5.0, arrival_cv=1.0, lengths=((100, 20),))
    other = msgspec.structs.replace(MODEL, service="other")
    view = NetworkView(adverts={A: advert(demand=demand), B: advert(), C: advert(demand=demand, model=other)})
    assert view.demands(MODEL.service) == {A: demand}


def test_only_nodes_with_an_engine_have_a_load() -> None:
    stats = EngineStats(running=3, waiting=1, kv_usage=0.5, kv_free_tokens=0)
    view = NetworkView(adverts={A: advert(None), B: advert(stats=stats), C: advert()})
    found = {load.replica: load for load in view.loads({C: Queue(2, 5)})}
    assert set(found) == {B, C}
    assert (found[B].outstanding, found[B].kv_free_tokens) == (0, 0)  # its report was not weighed yet
    assert (found[C].outstanding, found[C].prefill_tokens, found[C].kv_free_tokens) == (2, 5, 1000)
    view.weigh_reports({})
    assert {load.replica: load.outstanding for load in view.loads({})} == {B: 4, C: 0}
    view.adverts[B] = advert()  # its engine was lost with what it had
    assert {load.replica: load.outstanding for load in view.loads({})} == {B: 0, C: 0}


def test_a_view_of_an_answer_has_what_the_answering_node_knew() -> None:
    def node(peer: PeerId, said: Advert | None, links: LinkTable | None) -> NodeStatus:
        return NodeStatus(
            peer=peer, role="node", state="alive", address="", rtt_s=None, advert=said, links=links
        )  # fmt: skip

    table = LinkTable(site="here")
    nodes = (node(A, advert(), table), node(B, None, table), node(C, advert(), None))
    view = NetworkView.of_status(Status(answered_by=A, coordinator=None, epoch=1, nodes=nodes, plan=None))
    assert view.adverts == {A: advert(), C: advert()}
    assert view.links_told == {A: table, B: table}
    assert view.plan is None
    assert {found.peer: found.site for found in view.boxes(MODEL.service)} == {A: "here", C: ""}


def test_tables_of_links_are_followed_as_they_come_and_go() -> None:
    here, there = (msgspec.msgpack.encode(LinkTable(site=site)) for site in ("here", "there"))
    view = NetworkView()
    view.update_links({A: here, B: here, C: b"\xc1"})
    assert {peer: table.site for peer, table in view.links_told.items()} == {A: "here", B: "here"}
    before = view.links_told[A]
    view.update_links({A: here, B: there, C: here})
    assert {peer: table.site for peer, table in view.links_told.items()} == {A: "here", B: "there", C: "here"}
    assert view.links_told[A] is before
    view.update_links({B: b"\xc1", C: here})
    assert set(view.links_told) == {C}


def test_a_gateway_knows_how_many_times_its_own_requests_all_gateways_have() -> None:
    def asked(rate: float) -> Demand:
        return Demand(requests_s=rate, arrival_cv=1.0, lengths=((10, 10),))

    view = NetworkView(adverts={PeerId(name): advert() for name in "abcd"})
    assert view.gateways_like(None, MODEL.service) == 1.0
    for peer, rate in zip(view.adverts, (1.0, 1.0, 2.0, 0.0), strict=True):
        view.adverts[peer] = msgspec.structs.replace(view.adverts[peer], demand=asked(rate))
    found = [view.gateways_like(own, MODEL.service) for own in (asked(1.0), asked(2.0), asked(0.1), asked(0.0), None)]
    assert found == [3.0, 2.0, 3.0, 3.0, 3.0], "no more than there are with requests"
    assert view.gateways_like(asked(9.0), MODEL.service) == 1.0
