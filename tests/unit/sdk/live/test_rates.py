"""How the rate of a live run is chosen: by its deadlines, or by less where no rate keeps them."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator import Pairing, Phase, Plan
from p2pserve.coordinator.capacity import KvCodec
from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import MODELS
from p2pserve.coordinator.network_plan import plan_network
from p2pserve.coordinator.planning.model.workload import Slo, Workload
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.messages import Advert, EngineAdvert, NodeStatus, Status
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.view import NetworkView
from p2pserve.sdk.errors import DemoFailed, UsageError
from p2pserve.sdk.live import comparison, expected
from p2pserve.sdk.live.comparison import LiveTraffic, choose_rate
from p2pserve.sdk.live.expected import Capacity, expect_plan, find_capacity
from p2pserve.sims.workloads import Lengths

SHORT, LONG = 64, 4096
"""Tokens of prompts: of a lone one's first token, the first is in time, the other is not."""
DEADLINES = Slo(ttft_s=0.2)


def two_boxes() -> Status:
    """A network of two A100 that hold llama3-8b, and follow a plan."""
    shape = MODELS["llama3-8b"]
    weights = WeightSizes(layers=(1,) * shape.layers, embeddings=1, head=1)
    gpu = Gpu(name="A100-SXM4-80GB", memory_gib=80, uuid="u")
    advert = Advert(
        hardware=Hardware(cores=8, memory_gib=31.2, processor="x", gpus=(gpu,), emulated_as=Specs.DENSE),
        draining=False, model=ModelInfo(service="s", shape=shape, max_model_len=8192, weights=weights), fits=32,
        engine=EngineAdvert(state="ready", tflops=150.0, memory_gbps=1500.0, kv_tokens=300_000),
    )  # fmt: skip
    nodes = tuple(
        NodeStatus(peer=peer, role="worker", state="alive", address="1.2.3.4:5", rtt_s=0.01, advert=advert)
        for peer in ("12D3one", "12D3two")
    )
    told = Status(answered_by=nodes[0].peer, coordinator=nodes[0].peer, epoch=3, nodes=nodes, plan=None)
    view = NetworkView.of_status(told)
    plan = plan_network(
        view.boxes("s"), view.links(), [], service="s", epoch=3, version=7, previous=None, codec=KvCodec("kv4", 4.5)
    )
    return msgspec.structs.replace(told, plan=plan)


def split_plan(status: Status) -> Plan:
    """The first box prefills, the second decodes."""
    assert status.plan is not None
    first, second = status.plan.replicas
    halves = (Phase.PREFILL, Phase.DECODE)
    split = tuple(
        msgspec.structs.replace(each, phase=phase) for each, phase in zip((first, second), halves, strict=True)
    )
    pairing = Pairing(prefill=first.id, decode=second.id, weight=1.0)
    return msgspec.structs.replace(status.plan, replicas=split, pairings=(pairing,))


def traffic(short: int, *, rate: float | None = None, load: float | None = None) -> LiveTraffic:
    """Of a hundred requests so many are short."""
    prompts = np.array([SHORT] * short + [LONG] * (100 - short))
    lengths = Lengths(prompts, np.full(100, 50), "made up")
    return LiveTraffic(lengths=lengths, requests=10, seed=0, rate=rate, load=load)


def workload(short: int) -> Workload:
    return traffic(short).workload(1.0)


@pytest.mark.parametrize(
    ("short", "target", "share"), [(97, 0.9, 0.9), (97, 0.95, 0.9), (93, 0.9, 0.8), (75, 0.9, 0.5), (75, 0.6, 0.5)]
)
def test_the_share_in_time_falls_only_as_far_as_it_has_to(short: int, target: float, share: float) -> None:
    """Long prompts are never in time, and short ones that wait for them are not."""
    status = two_boxes()
    found = find_capacity(status, workload(short), replace(DEADLINES, target=target))
    assert found.share == share
    assert found.rate > 0.0
    assert find_capacity(status, workload(short), replace(DEADLINES, target=share)) == found


def test_where_not_half_are_in_time_it_is_what_fills_the_running_plan() -> None:
    """Not what another plan would carry without deadlines: the network would not follow that one."""
    status = two_boxes()
    found = find_capacity(status, workload(30), DEADLINES)
    assert found == (find_capacity(status, workload(30), Slo()).rate, None), "both boxes do both, which carries most"
    slower = find_capacity(msgspec.structs.replace(status, plan=split_plan(status)), workload(30), DEADLINES)
    assert slower.share is None
    assert 0.0 < slower.rate < 0.9 * found.rate


@pytest.mark.parametrize(
    ("short", "rule"),
    [
        (97, "70% of what is carried with 90% in time"),
        (75, "70% of what is carried with 50% in time, since 90% are expected to be in time at no rate"),
        (30, "70% of what fills the running plan, since 90% are expected to be in time at no rate"),
    ],
)
def test_the_load_is_of_what_can_be_carried_and_the_rule_says_of_what(short: int, rule: str) -> None:
    status = two_boxes()
    rate, said = choose_rate(traffic(short, load=0.7), status, DEADLINES)
    assert rate == 0.7 * find_capacity(status, workload(short), DEADLINES).rate
    assert said == rule


def test_a_plan_is_expected_over_the_links_that_it_is_simulated_over() -> None:
    """Nodes have measured none here: a hundredth of the rate is seen in answers, which wait for KV."""
    status = two_boxes()
    found = [
        expect_plan(status, split_plan(status), workload(97), Slo(tpot_s=0.05), gbps, 0.001) for gbps in (40.0, 0.4)
    ]
    fast, slow = (each for each in found if each is not None)
    assert fast.estimated.attainment > slow.estimated.attainment
    assert fast.estimated.tpot_s.p99 < 0.5 * slow.estimated.tpot_s.p99
    assert fast.expected.e2e_s.p50 < slow.expected.e2e_s.p50
    assert [each.expected.simulated_requests for each in found if each is not None] == [
        pytest.approx(1000, rel=0.1)
    ] * 2


def test_a_rate_that_is_given_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "find_capacity", None)
    assert choose_rate(traffic(97, rate=0.3), two_boxes(), DEADLINES) == (0.3, "as given")
    assert choose_rate(traffic(97), two_boxes(), DEADLINES) == (1.0, "the default")


def test_a_plan_that_can_serve_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "expect_running", lambda *told: None)
    assert find_capacity(two_boxes(), workload(30), DEADLINES) == Capacity(0.0, None)
    with pytest.raises(UsageError, match="load: no plan can serve such requests"):
        choose_rate(traffic(30, load=0.7), two_boxes(), DEADLINES)


def test_a_network_without_a_plan_is_an_error() -> None:
    with pytest.raises(DemoFailed, match="lost its plan"):
        find_capacity(msgspec.structs.replace(two_boxes(), plan=None), workload(97), DEADLINES)
