"""`p2pserve plan --live`, from what a network says of itself."""

import json
from typing import Any, Self

import msgspec
import pytest

from p2pserve.coordinator import Demand, Phase, Plan
from p2pserve.coordinator.capacity import KvCodec
from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import MODELS
from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.network_plan import plan_network
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.messages import Advert, EngineAdvert, NodeStatus, Status
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.view import NetworkView
from p2pserve.sdk.actions import network as network_commands
from p2pserve.sdk.cli import main
from p2pserve.sdk.live import running_plan

TOKEN = ["--bootstrap", "p2p_client_x"]
FAST, SLOW = "12D3fast", "12D3slow"


def model(service: str) -> ModelInfo:
    shape = MODELS["llama3-8b"]
    weights = WeightSizes(layers=(1,) * shape.layers, embeddings=1, head=1)
    return ModelInfo(service=service, shape=shape, max_model_len=8192, weights=weights)


def node(peer: str, card: str, service: str = "llama", **changes: Any) -> NodeStatus:
    advert = Advert(
        hardware=Hardware(
            cores=8, memory_gib=31.2, processor="x", gpus=(Gpu(name=card, memory_gib=45, uuid="u"),),
            emulated_as=Specs.DENSE,
        ),
        draining=False, model=model(service), fits=32,
        engine=EngineAdvert(state="ready", tflops=100.0, memory_gbps=1000.0, kv_tokens=60_000),
    )  # fmt: skip
    return NodeStatus(
        peer=peer, role="worker", state="alive", address="1.2.3.4:5", rtt_s=0.01,
        advert=msgspec.structs.replace(advert, **changes),
    )  # fmt: skip


NODES = (node(FAST, "A100-SXM4-80GB"), node(SLOW, "A40-48GB"))


def status(*nodes: NodeStatus, plan: Plan | None = None) -> Status:
    return Status(answered_by=FAST, coordinator=FAST, epoch=3, nodes=nodes, plan=plan)


def plan_of(*nodes: NodeStatus) -> Plan:
    view = NetworkView.of_status(status(*nodes))
    plan = plan_network(
        view.boxes("llama"),
        view.links(),
        [],
        service="llama",
        epoch=3,
        version=7,
        previous=None,
        codec=KvCodec("kv4", 4.5),
    )
    assert plan is not None
    return plan


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[Status]:
    """What the network answers: put a status into the list."""
    answers: list[Status] = []

    class Answering:
        def __init__(self, bootstrap: str, *, token: str | None, timeout_s: float) -> None:
            assert (bootstrap, token, timeout_s) == (TOKEN[1], None, 10.0)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is open."""

        def status(self) -> Status:
            return answers[-1]

    monkeypatch.setattr(network_commands, "Client", Answering)
    monkeypatch.delenv("P2PSERVE_TOKEN", raising=False)
    return answers


def found(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", "--live", *TOKEN, "--format", "json", *options]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_plan_that_is_as_good_as_any_stays(network: list[Status], capsys: pytest.CaptureFixture[str]) -> None:
    network.append(status(*NODES, plan=plan_of(*NODES)))
    answer = found(capsys)
    assert answer["service"] == "llama"
    assert answer["changes"] == []
    assert answer["plan"]["version"] == 7
    running, planned = answer["running"]["plan"]["pairings"], answer["plan"]["pairings"]
    assert [{**pair, "weight": None} for pair in running] == [{**pair, "weight": None} for pair in planned]
    assert [pair["weight"] for pair in running] == pytest.approx([pair["weight"] for pair in planned])
    # Read off curves of two sets of shares, which differ in the last digit.
    assert answer["best"]["max_rate"] == pytest.approx(answer["running"]["max_rate"], rel=0.01)


def test_what_would_change_and_what_that_would_give(network: list[Status], capsys: pytest.CaptureFixture[str]) -> None:
    """Two boxes that were pinned to one phase each, the wrong one, and no longer are."""
    pinned = (
        node(FAST, "A100-SXM4-80GB", phase=Phase.DECODE),
        node(SLOW, "A40-48GB", phase=Phase.PREFILL),
    )
    network.append(status(*NODES, plan=plan_of(*pinned)))
    answer = found(capsys)
    assert FAST in {change["replica"] for change in answer["changes"]}
    assert answer["best"]["max_rate"] > answer["running"]["max_rate"]
    assert main(["plan", "--live", *TOKEN]) == 0
    text = capsys.readouterr().out
    for part in (
        "plan 3.7 is running",
        "best found",
        "would change: beige-eagle: decode -> ",
        "would give: attainment",
    ):
        assert part in text


@pytest.mark.parametrize("command", [["plan", "--live"], ["inspect", "plan"]])
def test_the_running_plan_is_explained(
    command: list[str], network: list[Status], capsys: pytest.CaptureFixture[str]
) -> None:
    network.append(status(*NODES, plan=plan_of(*NODES)))
    assert main([*command, *TOKEN, "--explain", "--format", "json"]) == 0
    explained = json.loads(capsys.readouterr().out)["explain"]
    assert {each["name"] for each in explained["replicas"]} == {name_of(FAST), name_of(SLOW)}
    assert main([*command, *TOKEN, "--explain"]) == 0
    text = capsys.readouterr().out
    for part in (f"\n{name_of(FAST)}\n", "weights where they are loaded", "Instead ", "Here: "):
        assert part in " ".join(text.split(" "))
    assert FAST not in text.partition("plan 3.7")[2]


def test_a_lone_box_has_no_alternative(network: list[Status], capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody else prefills, or decodes."""
    network.append(status(NODES[0], plan=plan_of(NODES[0])))
    assert main(["plan", "--live", *TOKEN, "--explain", "--format", "json"]) == 0
    (replica,) = json.loads(capsys.readouterr().out)["explain"]["replicas"]
    assert [each["attainment"] for each in replica["alternatives"]] == [0.0, 0.0]
    assert replica["kv_link"] is None


def test_a_client_alone_explains_what_the_plan_says(
    network: list[Status], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_plan, "find_spec", lambda _: None)
    network.append(status(*NODES, plan=plan_of(*NODES)))
    assert main(["inspect", "plan", *TOKEN, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "Here: 2 replicas on 2 GPUs" in text
    assert "p2pserve plan --live --explain" in text
    assert "Instead " not in text


def test_rate_and_deadlines_may_be_asked_for(network: list[Status], capsys: pytest.CaptureFixture[str]) -> None:
    demand = Demand(requests_s=0.25, arrival_cv=1.0, lengths=((500, 100),))
    network.append(status(node(FAST, "A100-SXM4-80GB", demand=demand)))
    assert found(capsys)["asked"] == 0.25
    answer = found(capsys, "--rate", "1.5", "--slo", "ttft=2,target=0.8")
    assert (answer["rate"], answer["slo"]["ttft_s"], answer["slo"]["target"]) == (1.5, 2.0, 0.8)
    assert answer["running"] is None
    scaled = found(capsys, "--slo", "10x")
    assert scaled["slo"]["e2e_s"] == pytest.approx(2 * found(capsys, "--slo", "5x")["slo"]["e2e_s"])


def test_a_plan_whose_replicas_are_gone(network: list[Status], capsys: pytest.CaptureFixture[str]) -> None:
    network.append(status(node("12D3new", "A40-48GB"), plan=plan_of(*NODES)))
    assert found(capsys)["changes"] == [{"replica": "12D3new", "was": None, "now": "mixed"}]
    assert main(["plan", "--live", *TOKEN]) == 0
    assert "those of its replicas that are there cannot serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("nodes", "options", "code", "line"),
    [
        ((), (), 3, "no box of the network serves a model"),
        ((node(FAST, "A40-48GB", draining=True),), (), 3, "no box of the network is ready to serve llama"),
        ((*NODES, node("x", "A40-48GB", "other")), (), 2, "choose one with --model: llama, other"),
        (NODES, ("--model", "gpt"), 2, "does not serve 'gpt', but llama"),
        (NODES, ("--cluster", "x.json"), 2, "cluster: --live plans the running network"),
        (NODES, ("--price-weight", "0.1"), 2, "price-weight: --live"),
        (NODES, ("--rate", "-1"), 2, "rate: -1.0 is not"),
        (NODES, ("--slo", "soon"), 2, "slo: 'soon'"),
    ],
)
def test_refusals(
    nodes: tuple[NodeStatus, ...], options: tuple[str, ...], code: int, line: str, network: list[Status],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    network.append(status(*nodes))
    assert main(["plan", "--live", *TOKEN, *options]) == code
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert line in errors[0]


def test_the_network_has_to_be_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("P2PSERVE_BOOTSTRAP", raising=False)
    assert main(["plan", "--live"]) == 2
    assert "--bootstrap" in capsys.readouterr().err
