"""The comparison of a live run with the simulator: what it computes from two runs, without either network."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Deadlines
from p2pserve.kvtransport.probing.figures import LinkFigures, Source
from p2pserve.node import messages
from p2pserve.node.engine.emulated.model import parse_cards
from p2pserve.sdk.live import comparison as live_comparison
from p2pserve.sdk.live.comparison import cluster_of, compare, count_in_time, figures_of, kv_bits, main, simulated
from p2pserve.sdk.live.network import LiveRun, LiveSettings
from p2pserve.sims.records import Outcomes, Trace

PEERS = ("p", "q")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command switches the log off for its process."""
    yield
    logging.disable(logging.NOTSET)


TRACE = Trace(
    ids=np.arange(4),
    arrival_s=np.array([1.0, 2.0, 4.0, 5.0]),
    prompt=np.array([100, 800, 300, 50]),
    output=np.array([11, 1, 21, 5]),
    lengths="made up",
    arrivals="made up",
)


NONE = Deadlines()
SETTINGS = LiveSettings(nodes=2, cards="1xL4", specs="dense", model="qwen2-7b", codec="kv4", max_batched_tokens=2048)


def outcomes(ttft: float, tpot: float) -> Outcomes:
    first = np.full(4, ttft)
    return Outcomes(trace=TRACE, ttft_s=first, e2e_s=first + tpot * (TRACE.output - 1))


def plan() -> Plan:
    phases = {"p": Phase.PREFILL, "q": Phase.DECODE}
    replicas = tuple(
        Replica(id=peer, phase=phase, stages=(Stage(peer=peer, tp=1, first_layer=0, last_layer=28),))
        for peer, phase in phases.items()
    )
    pairing = Pairing(prefill="p", decode="q", weight=1.0)
    return Plan(epoch=1, version=1, service="s", replicas=replicas, pairings=(pairing,), codec="kv4", why=())


def status(*links: LinkFigures) -> messages.Status:
    """What `p` says of its links to as many others."""
    table = messages.LinkTable(links={f"n{number}": link for number, link in enumerate(links)})
    node = messages.NodeStatus(
        peer="p", role="worker", state="alive", address="127.0.0.1:1", rtt_s=None, advert=None, links=table
    )
    return messages.Status(answered_by="p", coordinator=None, epoch=0, nodes=(node,), plan=None)


def link(gbps: float, rtt_s: float = 0.001, **changes: object) -> LinkFigures:
    made = LinkFigures(rtt_s=rtt_s, one_stream_gbps=gbps, capacity_gbps=gbps)
    return msgspec.structs.replace(made, **changes)


def test_figures_of_a_run() -> None:
    found = figures_of(outcomes(0.5, 0.1), NONE)
    assert found["ttft_p50_s"] == found["ttft_p90_s"] == 0.5
    assert found["tpot_mean_s"] == pytest.approx(0.1)  # the request of one token has none
    assert found["throughput_tokens_s"] == pytest.approx(38 / (4.0 + 0.5 + 2.0 - 1.0))


def test_goodput_counts_requests_that_meet_all_deadlines() -> None:
    late = Outcomes(trace=TRACE, ttft_s=np.array([0.5, 0.5, 2.0, np.nan]), e2e_s=np.array([1.5, 0.5, 4.0, np.nan]))
    assert count_in_time(late, NONE) == 3
    assert count_in_time(late, Deadlines(ttft_s=1.0)) == 2
    assert count_in_time(late, Deadlines(tpot_s=0.05)) == 1  # that of one token
    assert count_in_time(late, Deadlines(e2e_s=1.0)) == 1
    found = figures_of(outcomes(0.5, 0.1), Deadlines(e2e_s=1.0))
    assert found["goodput_requests_s"] == pytest.approx(2 / 5.5, rel=0.01)


def test_where_nodes_are_lost_goodput_alone_counts() -> None:
    figures = compare(figures_of(outcomes(0.9, 0.1), NONE), figures_of(outcomes(0.5, 0.1), NONE), has_losses=True)
    assert [figure.name for figure in figures if figure.counts] == ["goodput_requests_s"]


@pytest.mark.parametrize("silent", [True, False])
def test_the_simulator_loses_the_nodes_that_the_network_lost(silent: bool) -> None:
    service = live_comparison.service_of(SETTINGS, TRACE, "s")
    cluster = cluster_of(status(link(5.0)), PEERS, parse_cards("1xL4"))
    mixed = tuple(msgspec.structs.replace(replica, phase=Phase.MIXED) for replica in plan().replicas)
    pairings = tuple(Pairing(prefill=peer, decode=peer, weight=0.5) for peer in PEERS)
    both = msgspec.structs.replace(plan(), replicas=mixed, pairings=pairings)
    plans = [(0.0, both)]
    whole = simulated(TRACE, plans, cluster, service, 2048)
    lost = simulated(TRACE, plans, cluster, service, 2048, [(4.3, "p")], silent=silent)
    other = simulated(TRACE, plans, cluster, service, 2048, [(4.3, "q")], silent=silent)
    delays = np.concatenate((lost.e2e_s - whole.e2e_s, other.e2e_s - whole.e2e_s))
    assert delays.max() > (1.5 if silent else 0.05)  # one of the two had a request then
    assert (delays.max() < 1.5) is not silent


def test_differences_are_of_the_simulated_figure() -> None:
    figures = {
        figure.name: figure
        for figure in compare(figures_of(outcomes(0.55, 0.1), NONE), figures_of(outcomes(0.5, 0.1), NONE))
    }
    assert figures["ttft_mean_s"].difference == pytest.approx(0.1)
    assert figures["tpot_p90_s"].difference == pytest.approx(0.0)
    assert figures["throughput_tokens_s"].difference < 0
    assert [name for name, figure in figures.items() if not figure.counts] == ["e2e_mean_s", "e2e_p50_s", "e2e_p90_s"]


def test_links_count_for_the_median_of_what_was_measured() -> None:
    cards = parse_cards("1xL4")
    told = status(
        link(2.0),
        link(9.0, 0.003),
        link(4.0, 0.002),
        link(0.1, capacity_is_floor=True),
        link(77.0, 1.0, source=Source.PRIOR),
    )
    cluster = cluster_of(told, PEERS, cards)
    assert [box.id for box in cluster.boxes] == list(PEERS)
    assert cluster.gbps[0, 1] == cluster.gbps[1, 0] == 4.0
    assert cluster.rtt_s[0, 1] == pytest.approx(0.0015)
    assert cluster_of(status(), PEERS, cards).gbps[0, 1] == live_comparison.LOOPBACK_GBPS


def test_bits_on_the_wire() -> None:
    model = model_shape("qwen2-7b")
    assert kv_bits("raw", model) == 16.0
    assert 4.3 < kv_bits("kv4", model) < 4.6


def live(ttft_factor: float) -> LiveRun:
    """A run that took as long as the simulator says, but for the first tokens."""
    settings = LiveSettings(
        nodes=2, cards="1xL4", specs="dense", model="qwen2-7b", codec="kv4", max_batched_tokens=2048
    )
    said = status(link(5.0))
    service = live_comparison.service_of(settings, TRACE, "s")
    cluster = cluster_of(said, PEERS, parse_cards("1xL4"))
    expected = simulated(TRACE, [(0.0, plan())], cluster, service, settings.max_batched_tokens)
    more = expected.ttft_s * (ttft_factor - 1.0)
    seen = Outcomes(trace=TRACE, ttft_s=expected.ttft_s + more, e2e_s=expected.e2e_s + more)
    return LiveRun(outcomes=seen, plans=((0.0, plan()),), status=said, recovered=0, late=0, cores=1.0, own_cores=0.5)


def test_the_simulator_changes_the_plan_when_the_network_did() -> None:
    service = live_comparison.service_of(
        LiveSettings(nodes=2, cards="1xL4", specs="dense", model="qwen2-7b", codec="kv4", max_batched_tokens=2048),
        TRACE,
        "s",
    )
    cluster = cluster_of(status(link(0.01)), PEERS, parse_cards("1xL4"))  # a KV transfer takes seconds there
    mixed = tuple(msgspec.structs.replace(replica, phase=Phase.MIXED) for replica in plan().replicas)
    pairings = tuple(Pairing(prefill=peer, decode=peer, weight=0.5) for peer in PEERS)
    other = msgspec.structs.replace(plan(), version=2, replicas=mixed, pairings=pairings)
    before, after = (
        simulated(TRACE, plans, cluster, service, 2048) for plans in ([(0.0, plan())], [(0.0, plan()), (3.0, other)])
    )
    assert after.e2e_s[0] == before.e2e_s[0]
    assert after.e2e_s[2] < before.e2e_s[2] - 1.0


@pytest.mark.parametrize(("factor", "code"), [(1.05, 0), (1.2, 1), (0.8, 1)])
def test_the_exit_code_says_whether_they_agree(
    factor: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run_live(settings: LiveSettings, trace: Trace, say: object) -> LiveRun:
        return replace(live(factor), late=3)

    monkeypatch.setattr(live_comparison, "run_live", run_live)
    monkeypatch.setattr(live_comparison, "draw", lambda lengths, **settings: TRACE)
    options = ["--cards", "1xL4", "--specs", "dense", "--model", "qwen2-7b", "--format", "json"]
    assert main(options) == code
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is (code == 0)
    assert found["median_request_ttft_difference"] == pytest.approx(abs(factor - 1.0))
    assert "emulated" in found["emulated"]
    assert any("3 times" in note for note in found["notes"])
    main(options[:-2])
    shown = capsys.readouterr().out
    assert "(emulated)" in shown
    assert ("do not agree" in shown) is (code == 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cards", "1xA41"], "not in the table"),
        (["--cards", "1xL4"], "has no L4"),
        (["--model", "llama-8"], "is not known"),
        (["--rate", "nan"], "rate is nan"),
        (["--requests", "0"], "requests is 0"),
        (["--nodes", "17"], "nodes: 17"),
        (["--max-num-batched-tokens", "64"], "max-num-batched-tokens: 64"),
        (["--lose", "9@20"], "there is no node 9"),
        (["--lose", "3"], "'3' is not like 3@20"),
        (["--lose", "3@-1"], "'3@-1' is not like 3@20"),
        (["--lose", "3@nan"], "'3@nan' is not like 3@20"),
        (["--lose", "3@1", "--lose", "3@2"], "can be lost once"),
        (["--nodes", "1", "--lose", "1@2"], "one node has to be left"),
    ],
)
def test_wrong_input_is_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
