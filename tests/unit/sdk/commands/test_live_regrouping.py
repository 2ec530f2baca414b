"""Other groups of boxes, as `p2pserve plan --live` proposes and applies them and `status` shows them."""

import json
from typing import Any, Self

import msgspec
import pytest

from p2pserve.coordinator import Demand, Plan
from p2pserve.coordinator.capacity import KvCodec
from p2pserve.coordinator.costs.model_shape import MODELS
from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.network_plan import plan_network
from p2pserve.coordinator.plan import BoxRecut, RefusedPart, Regrouping, RegroupingStep
from p2pserve.coordinator.regrouping.divisions import BoxDivision, CutOffer
from p2pserve.coordinator.regrouping.steps import make_recutting, make_regrouping
from p2pserve.kvtransport.probing.figures import LinkFigures
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.messages import Advert, EngineAdvert, LinkTable, NodeStatus, Status
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.planning.messages import RegroupBegun, RegroupOrder
from p2pserve.node.view import NetworkView
from p2pserve.sdk.actions import network as network_commands
from p2pserve.sdk.actions.status_view import plan_lines
from p2pserve.sdk.cli import main
from p2pserve.sdk.errors import RequestFailed

TOKEN = ["--bootstrap", "p2p_admin_x"]
PEERS = ("12D3a", "12D3b", "12D3c", "12D3d")
SHAPE = MODELS["llama3-8b"]
INFO = ModelInfo(
    service="llama", shape=SHAPE, max_model_len=8192,
    weights=WeightSizes(layers=(1,) * SHAPE.layers, embeddings=1, head=1),
)  # fmt: skip
LINK = LinkFigures(rtt_s=1e-4, one_stream_gbps=10.0, capacity_gbps=100.0)
ASKED = Demand(requests_s=5.0, arrival_cv=1.0, lengths=((1500, 300),))


def node(peer: str, kv_tokens: int = 4000, **changes: Any) -> NodeStatus:
    """A box with a card that has room for the model and so much KV, one millisecond from the others."""
    advert = Advert(
        hardware=Hardware(cores=8, memory_gib=31.2, processor="x", gpus=(Gpu(name="L4", memory_gib=24, uuid="u"),)),
        draining=False, model=INFO, fits=32, demand=ASKED,
        engine=EngineAdvert(state="ready", tflops=100.0, memory_gbps=1000.0, kv_tokens=kv_tokens),
    )  # fmt: skip
    return NodeStatus(
        peer=peer, role="worker", state="alive", address="1.2.3.4:5", rtt_s=0.001,
        advert=msgspec.structs.replace(advert, **changes),
        links=LinkTable(site="here", links={other: LINK for other in PEERS if other != peer}),
    )  # fmt: skip


def status(*nodes: NodeStatus, plan: Plan | None = None) -> Status:
    return Status(answered_by=PEERS[0], coordinator=PEERS[0], epoch=3, nodes=nodes, plan=plan)


def running(*nodes: NodeStatus) -> Status:
    """A network with the plan that it would make."""
    view = NetworkView.of_status(status(*nodes))
    plan = plan_network(
        view.boxes("llama"), view.links(), view.demands("llama").values(), service="llama", epoch=3, version=7,
        previous=None, codec=KvCodec("kv4", 4.5),
    )  # fmt: skip
    assert plan is not None
    return status(*nodes, plan=plan)


class Network:
    """What the network answers, and what it has been told."""

    def __init__(self) -> None:
        self.status = running(*(node(peer) for peer in PEERS))
        self.orders: list[tuple[RegroupOrder, str]] = []
        self.refusal = ""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """Stands in for the client of every command."""
    world = Network()

    class Told:
        def __init__(self, bootstrap: str, *, token: str | None, timeout_s: float) -> None:
            assert bootstrap == TOKEN[1]

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is open."""

        def status(self) -> Status:
            return world.status

        def regroup(self, order: RegroupOrder, coordinator: str) -> RegroupBegun:
            if world.refusal:
                raise RequestFailed(world.refusal)
            world.orders.append((order, coordinator))
            return RegroupBegun(steps=2, boxes=4)

    monkeypatch.setattr(network_commands, "Client", Told)
    monkeypatch.delenv("P2PSERVE_TOKEN", raising=False)
    return world


def test_what_would_change_per_box_and_what_that_gives_and_costs(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--live", *TOKEN, "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = answer["regrouping"]
    assert found["after"] > found["before"] > max(found["meanwhile"])
    assert (found["pays"], answer["applied"]) == (True, False)
    assert main(["plan", "--live", *TOKEN]) == 0
    text = capsys.readouterr().out
    assert "other groups of boxes would serve more" in text
    for peer in PEERS:
        assert f"{name_of(peer)}: alone -> layers " in text
    assert "begins with it" in text
    assert network.orders == []


def test_what_was_found_is_applied_by_the_coordinator(network: Network, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--live", "--apply", *TOKEN]) == 0
    assert "the coordinator has begun with it" in capsys.readouterr().out
    ((order, coordinator),) = network.orders
    assert coordinator == PEERS[0]
    assert sorted(len(group) for group in order.groups) == [2, 2]
    assert order.after > order.before


def test_nothing_is_applied_where_nothing_better_is_found(network: Network, capsys: pytest.CaptureFixture[str]) -> None:
    network.status = running(*(node(peer, kv_tokens=300_000) for peer in PEERS[:2]))
    assert main(["plan", "--live", "--apply", *TOKEN]) == 0
    assert "nothing is applied" in capsys.readouterr().out
    assert network.orders == []


def test_a_refusal_is_one_line(network: Network, capsys: pytest.CaptureFixture[str]) -> None:
    network.refusal = "node amber-otter: clients may not call 'plan.regroup'; it is for those with a token for admins"
    assert main(["plan", "--live", "--apply", *TOKEN]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "a token for admins" in line


def test_a_described_cluster_cannot_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--apply", "--cluster", "thunderserve-cloud-32", "--model", "llama-30b"]) == 2
    assert "apply: only the running network can be changed" in capsys.readouterr().err


def test_status_says_how_far_each_box_is(network: Network, capsys: pytest.CaptureFixture[str]) -> None:
    plan = network.status.plan
    assert plan is not None
    boxes = NetworkView.of_status(network.status).boxes("llama")
    halves = {
        peers: tuple(
            msgspec.structs.replace(replica.stages[0], first_layer=16 * number, last_layer=16 * number + 16)
            for number, peer in enumerate(peers)
            for replica in plan.replicas
            if replica.id == peer
        )
        for peers in (PEERS[:2], PEERS[2:])
    }
    way = make_regrouping(plan, tuple(halves.values()), boxes, before=1.0, after=7.5, reload_s=30.0)
    first = halves[PEERS[:2]]
    told = EngineAdvert(
        state="loading", detail="weights 3/8", tflops=100.0, memory_gbps=1000.0, kv_tokens=4000, stages=first
    )
    nodes = [node(PEERS[0], engine=told), *(node(peer) for peer in PEERS[1:])]
    network.status = status(*nodes, plan=msgspec.structs.replace(plan, regrouping=way))
    lines = "\n".join(plan_lines(network.status))
    assert "regrouping, step 1 of 2, some 30 s each: expected 1 -> 7.5 requests/s in time" in lines
    assert f"{name_of(PEERS[0])}: loading: weights 3/8" in lines
    assert f"{name_of(PEERS[1])}: finishes its requests" in lines
    assert f"{name_of(PEERS[2])}: waits for its turn" in lines
    assert main(["plan", "--live", *TOKEN]) == 0
    assert "regrouping, step 1 of 2" in capsys.readouterr().out
    assert main(["plan", "--live", "--apply", *TOKEN]) == 3
    assert "on their way to other groups already" in capsys.readouterr().err
    assert network.orders == []


def test_status_says_why_a_step_is_undone() -> None:
    before = running(*(node(peer) for peer in PEERS))
    assert before.plan is not None
    alone = tuple(replica.stages for replica in before.plan.replicas)
    back = Regrouping(steps=(RegroupingStep(form=alone[:2]),), undoes="amber-otter cannot take its part: no memory")
    lines = plan_lines(status(*before.nodes, plan=msgspec.structs.replace(before.plan, regrouping=back)))
    assert any("regrouping is undone: amber-otter cannot take its part: no memory" in line for line in lines)


def test_a_box_that_refused_is_told_of_and_proposed_around(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = network.status.plan
    assert plan is not None
    refused = RefusedPart(peer=PEERS[0], reason="no memory for 16 layers", for_s=7200.0)
    network.status = msgspec.structs.replace(network.status, plan=msgspec.structs.replace(plan, refused=(refused,)))
    line = f"{name_of(PEERS[0])} keeps its part for 2.0 h from this plan on: it could not take another (no memory"
    assert any(line in each for each in plan_lines(network.status))
    assert main(["plan", "--live", *TOKEN, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["peer"] for each in found["plan"]["refused"]] == [PEERS[0]]
    formed = [group for step in found["regrouping"]["steps"] for group in step["form"]]
    assert formed
    assert PEERS[0] not in {stage["peer"] for group in formed for stage in group}
    assert main(["plan", "--live", *TOKEN]) == 0
    assert line in " ".join(capsys.readouterr().out.split())


CUTS = tuple(CutOffer(replicas=number, tp=4 // number, longest=8192) for number in (1, 2, 4))
WHOLE = BoxDivision(head=PEERS[0], nodes=(PEERS[0],), offers=CUTS)


def divisible(peer: str, **changes: Any) -> NodeStatus:
    """A node with four cards, whose owner lets the network divide them."""
    found = node(peer, **{"tp": 4, "division": WHOLE, **changes})
    assert found.advert is not None
    assert found.advert.engine is not None
    engine = msgspec.structs.replace(found.advert.engine, tflops=400.0, memory_gbps=4000.0, kv_tokens=300_000)
    hardware = msgspec.structs.replace(found.advert.hardware, gpus=found.advert.hardware.gpus * 4)
    return msgspec.structs.replace(
        found, advert=msgspec.structs.replace(found.advert, engine=engine, hardware=hardware)
    )  # fmt: skip


def test_a_box_that_would_serve_more_when_divided_anew_is_proposed_and_applied(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    network.status = running(divisible(PEERS[0]), divisible(PEERS[1], division=None))
    assert main(["plan", "--live", *TOKEN]) == 0
    text = capsys.readouterr().out
    assert "boxes divided anew would serve more" in text
    assert f"step 1: the box of {name_of(PEERS[0])}: 1 -> " in text
    assert main(["plan", "--live", "--apply", *TOKEN, "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (recut,) = answer["regrouping"]["recuts"]
    assert (recut["head"], recut["was"], answer["applied"]) == (PEERS[0], 1, True)
    ((order, _),) = network.orders
    assert (order.groups, len(order.recuts)) == ((), 1)
    assert order.after > order.before


def test_status_says_how_far_a_box_is_that_is_divided_anew(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    before = running(divisible(PEERS[0]), divisible(PEERS[1], division=None))
    assert before.plan is not None
    view = NetworkView.of_status(before)
    recut = BoxRecut(head=PEERS[0], replicas=2, was=1)
    way = make_recutting(
        before.plan, (recut,), {PEERS[0]: WHOLE}, view.boxes("llama"), before=1.0, after=7.5, reload_s=30.0
    )
    plan = msgspec.structs.replace(before.plan, regrouping=way)
    two = msgspec.structs.replace(WHOLE, nodes=(PEERS[0], "12D3z"))
    nodes = (divisible(PEERS[0], division=two), *before.nodes[1:])
    network.status = status(*nodes, plan=plan)
    assert main(["plan", "--live", *TOKEN]) == 0
    text = capsys.readouterr().out
    assert "regrouping, step 1 of 1, some 30 s each: expected 1 -> 7.5 requests/s in time" in text
    assert f"{name_of(PEERS[0])}: its box is divided anew, 1 -> 2 nodes: 1 ready" in text
