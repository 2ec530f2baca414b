"""The comparison of a live run with simulator and planner: what it computes from the runs, without a network."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from p2pserve.coordinator import Phase
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Deadlines
from p2pserve.kvtransport.probing.figures import Source
from p2pserve.node.messages import Status
from p2pserve.sdk.live import comparison
from p2pserve.sdk.live.comparison import (
    LiveTraffic,
    _steady_figures,
    compare,
    estimate_percentile,
    figures_of,
    plan_for_most,
    run_comparison,
)
from p2pserve.sdk.live.comparison_command import main, show
from p2pserve.sdk.live.network import Happened, LiveRun, LoneRequest
from p2pserve.sdk.live.nodes import LiveSettings
from p2pserve.sdk.live.schedule import LiveFaultKind, ScheduledFault
from p2pserve.sdk.live.simulated import LOOPBACK_GBPS, cluster_of, kv_bits, service_of, with_deadlines_in_seconds
from p2pserve.sims.records import Outcomes, Trace
from p2pserve.sims.workloads import Lengths, workload_of

from .runs import NUMBERS, SETTINGS, TRACE, link, live, mixed_plan, network_of, plan, status

NONE = Deadlines()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command switches the log off for its process."""
    yield
    logging.disable(logging.NOTSET)


def outcomes(ttft: float, tpot: float) -> Outcomes:
    first = np.full(4, ttft)
    return Outcomes(trace=TRACE, ttft_s=first, e2e_s=first + tpot * (TRACE.output - 1))


def test_figures_of_a_run() -> None:
    found = figures_of(outcomes(0.5, 0.1), NONE)
    assert found["ttft_p50_s"] == found["ttft_p90_s"] == found["ttft_p99_s"] == 0.5
    assert found["tpot_mean_s"] == pytest.approx(0.1)  # the request of one token has none
    assert found["throughput_tokens_s"] == pytest.approx(38 / (4.0 + 0.5 + 2.0 - 1.0))
    assert (found["attainment"], found["goodput_requests_s"]) == (1.0, 1.0)


def test_percentiles_of_runs_that_differ_in_one_request_are_near() -> None:
    """Of 200 requests 21 or 20 are on the slow one of two boxes."""
    one, other = (np.repeat([0.2, 0.3], [200 - slow, slow]) for slow in (21, 20))
    assert np.percentile(one, 90) / np.percentile(other, 90) > 1.05
    assert estimate_percentile(one, 90) == pytest.approx(estimate_percentile(other, 90), rel=0.05)


def test_percentiles_of_many_requests_are_those_of_their_distribution_and_of_few_what_there_is() -> None:
    many = np.random.default_rng(0).permutation(np.linspace(0.0, 1.0, 3001))
    assert [estimate_percentile(many, share) for share in (50, 90, 99)] == pytest.approx([0.5, 0.9, 0.99], abs=1e-3)
    assert estimate_percentile(np.array([3.0]), 90) == 3.0
    assert np.isnan(estimate_percentile(np.array([]), 90))


@pytest.mark.parametrize(
    ("deadlines", "share"),
    [(NONE, 0.75), (Deadlines(ttft_s=1.0), 0.5), (Deadlines(tpot_s=0.05), 0.25), (Deadlines(e2e_s=1.0), 0.25)],
)
def test_attainment_is_of_all_requests_also_of_those_that_failed(deadlines: Deadlines, share: float) -> None:
    late = Outcomes(trace=TRACE, ttft_s=np.array([0.5, 0.5, 2.0, np.nan]), e2e_s=np.array([1.5, 0.5, 4.0, np.nan]))
    found = figures_of(late, deadlines)
    assert found["attainment"] == share
    assert found["goodput_requests_s"] == share * 4 / 4.0  # in four seconds of arrivals
    assert found["ttft_mean_s"] == pytest.approx(1.0)  # of those that were answered


def test_where_something_goes_wrong_goodput_alone_counts() -> None:
    figures = compare(figures_of(outcomes(0.9, 0.1), NONE), [figures_of(outcomes(0.5, 0.1), NONE)], has_faults=True)
    assert [figure.name for figure in figures if figure.counts] == ["goodput_requests_s"]


def test_differences_are_of_the_simulated_and_of_the_expected_figure() -> None:
    seen, modelled = figures_of(outcomes(0.55, 0.1), NONE), figures_of(outcomes(0.5, 0.1), NONE)
    expected = {"ttft_p50_s": 0.4, "attainment": 1.0}
    figures = {figure.name: figure for figure in compare(seen, [modelled, modelled], expected, modelled)}
    assert figures["ttft_mean_s"].difference == pytest.approx(0.1)
    assert figures["tpot_p90_s"].difference == pytest.approx(0.0)
    assert figures["throughput_tokens_s"].difference < 0
    shown = [name for name, figure in figures.items() if not figure.counts]
    e2e = ["e2e_mean_s", "e2e_p50_s", "e2e_p90_s", "e2e_p99_s"]
    assert shown == ["ttft_p99_s", "tpot_p99_s", *e2e, "throughput_tokens_s"]
    assert figures["ttft_p50_s"].estimate_error == pytest.approx(0.25)
    assert [name for name, figure in figures.items() if figure.is_estimated] == ["ttft_p50_s", "attainment"]
    assert figures["tpot_p50_s"].estimate_error is None


def test_of_several_simulated_runs_the_mean_counts() -> None:
    runs = [figures_of(outcomes(ttft, 0.1), NONE) for ttft in (0.4, 0.6)]
    figures = {figure.name: figure for figure in compare(figures_of(outcomes(0.5, 0.1), NONE), runs)}
    assert figures["ttft_mean_s"].simulated == pytest.approx(0.5)
    assert figures["ttft_mean_s"].difference == pytest.approx(0.0)
    assert figures["ttft_mean_s"].spread == pytest.approx(0.2)
    assert figures["tpot_mean_s"].spread == pytest.approx(0.0)


@pytest.mark.parametrize("is_silent", [True, False])
def test_the_simulator_loses_the_nodes_that_the_network_lost(is_silent: bool) -> None:
    network, plans = network_of(5.0, is_silent=is_silent), [(0.0, mixed_plan())]
    whole = network.run(TRACE, plans)
    delays = []
    for number, peer in NUMBERS.items():
        fault = ScheduledFault(4.3, LiveFaultKind.LOSE, (number,))
        found = network.run(TRACE, plans, [Happened(fault, 4.3, 4.3, (peer,))])
        delays.append((found.e2e_s - whole.e2e_s).max())
    assert max(delays) > (1.5 if is_silent else 0.05)  # one of the two had a request then
    assert (max(delays) < 1.5) is not is_silent


def test_the_simulator_starts_nodes_again_that_the_network_started() -> None:
    """All requests wait until one node has joined: 3 s after it was started."""
    lost = [Happened(ScheduledFault(0.5, LiveFaultKind.LOSE, (n,)), 0.5, 0.5, (peer,)) for n, peer in NUMBERS.items()]
    joined = Happened(ScheduledFault(6.0, LiveFaultKind.JOIN, (2,)), 6.0, 9.0, ("q",))
    found = network_of(5.0).run(TRACE, [(0.0, mixed_plan())], [*lost, joined])
    assert found.completed.all()
    assert (TRACE.arrival_s + found.ttft_s).min() > 9.0


def test_the_simulator_degrades_the_links_that_the_network_degraded() -> None:
    network, plans = network_of(5.0), [(0.0, plan())]
    fault = ScheduledFault(3.0, LiveFaultKind.DEGRADE, (1, 2), 0.001)
    before, after = network.run(TRACE, plans), network.run(TRACE, plans, [Happened(fault, 3.0, 3.0, ("p", "q"))])
    assert after.e2e_s[0] == before.e2e_s[0]
    assert after.e2e_s[2] > before.e2e_s[2] + 0.4  # then the prompt is computed where it decodes


def test_the_simulator_changes_the_plan_when_the_network_did() -> None:
    network = network_of(0.01)  # KV is given up as too slow there
    before, after = (network.run(TRACE, plans) for plans in ([(0.0, plan())], [(0.0, plan()), (3.0, mixed_plan())]))
    assert after.e2e_s[0] == before.e2e_s[0]
    assert after.e2e_s[2] < before.e2e_s[2] - 0.4


def test_the_plan_that_counts_is_the_one_that_was_in_force_for_longest() -> None:
    first, second = plan(), mixed_plan()
    assert plan_for_most(((0.0, first),), 0.0, 9.0) is first
    assert plan_for_most(((0.0, first), (6.0, second)), 0.0, 9.0) is first
    assert plan_for_most(((0.0, first), (6.0, second)), 5.0, 9.0) is second


def test_links_count_for_the_median_of_what_was_measured() -> None:
    told = status(
        link(2.0),
        link(9.0, 0.003),
        link(4.0, 0.002),
        link(0.1, capacity_is_floor=True),
        link(77.0, 1.0, source=Source.PRIOR),
    )
    cluster = cluster_of(told, NUMBERS, SETTINGS)
    assert [box.id for box in cluster.boxes] == list(NUMBERS.values())
    assert cluster.gbps[0, 1] == cluster.gbps[1, 0] == 4.0
    assert cluster.rtt_s[0, 1] == pytest.approx(0.0015)
    assert cluster_of(status(), NUMBERS, SETTINGS).gbps[0, 1] == LOOPBACK_GBPS


def test_nodes_take_their_cards_in_turn() -> None:
    settings = replace(SETTINGS, cards=["2xL4/2", "1xA40"])
    first, second = cluster_of(status(), NUMBERS, settings).boxes
    assert (first.gpu.name, first.gpus, second.gpu.name, second.gpus) == ("L4-24GB/2", 2, "A40-48GB", 1)


def test_deadlines_are_multiples_of_a_lone_request_on_the_fastest_node() -> None:
    workload = workload_of(TRACE)
    slow, both = (replace(SETTINGS, cards=cards, slo="4x") for cards in (["1xL4"], ["1xL4", "1xA40"]))
    one, other = (service_of(settings, workload, "s").slo for settings in (slow, both))
    assert other.tpot_s < one.tpot_s / 2
    fixed = with_deadlines_in_seconds(both, workload)
    assert fixed.slo.startswith(f"ttft={other.ttft_s:.6g},tpot={other.tpot_s:.6g}")
    assert service_of(fixed, workload, "s").slo.e2e_s == pytest.approx(other.e2e_s, rel=1e-5)


def test_bits_on_the_wire() -> None:
    model = model_shape("qwen2-7b")
    assert kv_bits("raw", model) == 16.0
    assert 4.3 < kv_bits("kv4", model) < 4.6


@pytest.mark.parametrize("has_gateway", [True, False])
def test_what_messages_take_is_what_lone_requests_took_beside_steps_and_links(has_gateway: bool) -> None:
    """A lone request is simulated with messages that take 20 ms, and those are found again in what it took."""
    network = replace(network_of(5.0), client_s=0.003, gateways=("p",) if has_gateway else ())
    trace = replace(
        TRACE, ids=TRACE.ids[:1], arrival_s=TRACE.arrival_s[:1], prompt=TRACE.prompt[1:2], output=TRACE.output[:1]
    )
    for plans in (plan(), mixed_plan()):
        ttft_s = float(replace(network, message_s=0.02).run(trace, [(0.0, plans)]).ttft_s[0])
        ends = ("p", "q") if plans.replicas[0].phase is Phase.PREFILL else (None, "p")
        lone = LoneRequest(int(trace.prompt[0]), ttft_s, *ends)
        # In turn, so the gateway may be on the way or not: half a millisecond of the links is not known then.
        found = network.calibrated([lone])
        assert found.message_s == pytest.approx(0.02, abs=1e-6 if has_gateway else 1e-3)
        assert found.cluster.rtt_s[0, 1] == network.cluster.rtt_s[0, 1]
    assert network.calibrated([]).message_s == 0.0
    assert network.calibrated([LoneRequest(100, 0.0, None, "p")]).client_s == 0.0, "it took less than its step"


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_links_that_lone_requests_are_faster_over_are_shorter(share: float) -> None:
    network = replace(network_of(5.0), client_s=0.02, gateways=("p",))
    rtt_s = np.full((2, 2), 0.02)
    slow = replace(network, cluster=replace(network.cluster, rtt_s=rtt_s))
    fast = replace(network, client_s=0.02 * share, cluster=replace(network.cluster, rtt_s=rtt_s * share))
    trace = replace(
        TRACE, ids=TRACE.ids[:1], arrival_s=TRACE.arrival_s[:1], prompt=TRACE.prompt[1:2], output=TRACE.output[:1]
    )
    ttft_s = float(fast.run(trace, [(0.0, plan())]).ttft_s[0])
    found = slow.calibrated([LoneRequest(int(trace.prompt[0]), ttft_s, "p", "q")])
    assert found.message_s == 0.0
    assert found.client_s == pytest.approx(0.02 * share, rel=1e-3)
    assert found.cluster.rtt_s == pytest.approx(rtt_s * share, rel=1e-3)


def test_what_the_client_sees_is_later_by_its_own_link_and_messages() -> None:
    network = network_of(5.0)
    here, there = (each.run(TRACE, [(0.0, plan())]) for each in (network, replace(network, client_s=0.501)))
    assert there.ttft_s - here.ttft_s == pytest.approx(np.full(4, 0.5))
    assert there.e2e_s - here.e2e_s == pytest.approx(np.full(4, 0.5))


TRAFFIC = LiveTraffic(lengths=Lengths(TRACE.prompt, TRACE.output, "made up"), requests=4, seed=0)


def run_with(monkeypatch: pytest.MonkeyPatch, run: LiveRun) -> None:
    """The command runs this instead of a network."""

    async def run_live(settings: LiveSettings, make_trace: Callable[[Status], Trace], say: object) -> LiveRun:
        make_trace(run.before)
        return run

    monkeypatch.setattr(comparison, "run_live", run_live)
    monkeypatch.setattr(comparison, "expect_plan", lambda *told: None)
    monkeypatch.setattr(comparison, "STEADY_REQUESTS", 4)


@pytest.mark.parametrize(("factor", "code"), [(1.02, 0), (1.1, 1), (0.9, 1)])
def test_the_exit_code_says_whether_they_agree(
    factor: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(monkeypatch, replace(live(factor), late=3))
    options = ["--cards", "1xL4", "--specs", "dense", "--model", "qwen2-7b", "--nodes", "2", "--format", "json"]
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


def test_a_run_with_faults_is_simulated_with_plans_of_its_own_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = ScheduledFault(4.3, LiveFaultKind.LOSE, (2,))
    network, happened = network_of(5.0), (Happened(fault, 4.3, 4.3, ("q",)),)
    plans = ((0.0, mixed_plan()),)
    seen = network.run(TRACE, plans, happened)
    run_with(monkeypatch, replace(live(1.0), plans=plans, outcomes=seen, happened=happened))
    found = run_comparison(replace(SETTINGS, schedule=(fault,)), TRAFFIC, 0.05, lambda line: None)
    assert found.ok
    assert (
        found.own_plans_goodput_s
        == figures_of(network.predict(TRACE, mixed_plan(), happened), mixed_plan().deadlines)["goodput_requests_s"]
    )
    assert [figure.steady for figure in found.figures] == [None] * len(found.figures)
    show(found)
    assert "where the simulated coordinator makes the plans" in capsys.readouterr().out


def test_requests_beyond_what_a_plan_carries_count_as_missed_in_the_long_run_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in what is expected; else the queue, and so the share in time, would be that of any number of requests."""
    network, rate, carried = network_of(5.0), 160.0, 0.2  # some 50 a second are
    found = {}
    for requests in (800, 1600):
        monkeypatch.setattr(comparison, "STEADY_REQUESTS", requests)
        for share in (1.0, carried, 0.0):
            found[requests, share] = _steady_figures(network, TRAFFIC, rate, plan(), share * rate)
    assert found[1600, 1.0]["attainment"] < 0.7 * found[800, 1.0]["attainment"]
    for requests in (800, 1600):
        kept = found[requests, carried]
        assert kept["attainment"] == pytest.approx(carried, rel=0.05)
        assert kept["goodput_requests_s"] == pytest.approx(carried * rate, rel=0.1)
        assert kept["ttft_p90_s"] < 2.0
        assert found[requests, 0.0] == found[requests, 1.0], "nothing is known of what is carried"


def test_the_first_requests_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = live(1.0)
    late = replace(run.outcomes, ttft_s=run.outcomes.ttft_s + np.array([9.0, 0.0, 0.0, 0.0]))
    run_with(monkeypatch, replace(run, outcomes=late))
    every, rest = (
        run_comparison(SETTINGS, replace(TRAFFIC, lead=lead), 0.05, lambda line: None).figures[0] for lead in (0, 1)
    )
    assert every.difference > 0.5
    assert rest.difference == pytest.approx(0.0, abs=0.05)  # the mean of runs at slightly other moments


def test_a_request_is_simulated_on_the_nodes_that_served_it_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself the simulator sends none of the requests from one node to the other: it has two that do both."""
    network, plans = network_of(0.01), ((0.0, mixed_plan()),)
    apart = dict.fromkeys(range(len(TRACE)), ("p", "q"))
    own = network.run(TRACE, plans)
    there = network.run(TRACE, plans, as_routed=apart)
    assert (there.e2e_s > own.e2e_s + 0.1)[TRACE.output > 1].all(), "KV goes over a slow link"
    elsewhere = network.run(TRACE, plans, as_routed=dict.fromkeys(apart, ("p", "r")))
    assert (elsewhere.e2e_s == own.e2e_s).all(), "the plan has no r"
    run_with(monkeypatch, replace(live(1.0), plans=plans, outcomes=there, served=apart))
    monkeypatch.setattr(comparison, "simulated_network", lambda *told: network)
    found = {each.name: each for each in run_comparison(SETTINGS, TRAFFIC, 0.05, lambda line: None).figures}
    e2e = found["e2e_mean_s"]
    assert e2e.as_routed == pytest.approx(e2e.live)
    assert e2e.difference > 0.05


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cards", "1xA41"], "not in the table"),
        (["--cards", "1xL4"], "has no L4"),
        (["--cards", "A40", "A40/0"], "'0' is no number above 1"),
        (["--model", "llama-8"], "is not known"),
        (["--rate", "nan"], "rate is nan"),
        (["--rate", "1", "--load", "0.5"], "load: give it or --rate"),
        (["--load", "nan"], "load: nan is not a share"),
        (["--requests", "0"], "requests is 0"),
        (["--lead", "79"], "lead: 79 of 80 requests"),
        (["--nodes", "17"], "nodes: 17"),
        (["--slo", "soon"], "slo: 'soon' is neither"),
        (["--max-num-batched-tokens", "64"], "max-num-batched-tokens: 64"),
        (["--lose", "9@20"], "there is no node 9"),
        (["--schedule", "nowhere"], "schedule: nowhere cannot be read"),
    ],
)
def test_wrong_input_is_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
