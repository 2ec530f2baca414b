"""What gateways and replicas say to each other takes half a round trip: added up by hand, and while boxes are lost."""

from math import inf

import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.cluster import ClusterError
from p2pserve.sims.results.outcomes import SimResult
from p2pserve.sims.scenario import BoxJoined, BoxLost, Change, PlanChange, SimSettings, WorldError

from .test_world import BUSY, QUICK, SPLIT, TWO_MIXED, busy_trace, cluster_of, go, plan_of, trace_of

RTT_S = 0.5
ONE = trace_of((0.0, 20, 4))
TWO_DECODES = plan_of(
    {"p": Phase.PREFILL, "d": Phase.DECODE, "e": Phase.DECODE}, {("p", "d"): 0.999, ("p", "e"): 0.001}
)


def with_gateways(gateways: str, *, detect_s: float = 1.0) -> SimSettings:
    return SimSettings(layerwise=False, gateways=tuple(gateways), detect_s=detect_s)


def times_of(result: SimResult) -> list[float]:
    """TTFT and end to end."""
    outcomes = result.services[0].outcomes
    return [float(outcomes.ttft_s[0]), float(outcomes.e2e_s[0])]


def test_a_split_request_waits_for_both_replicas_and_for_its_tokens_to_come_back() -> None:
    # There and back to the decode replica, there to the prefill replica, 1 s of prefill, and back: 0.5 + 0.25 + 1 +
    # 0.25. The KV leaves at 1.75, when the prompt is read: a second for each token, half a second until both know;
    # then three more tokens, and back.
    found = go(SPLIT, ONE, cluster_of("pdg", rtt_s=RTT_S), settings=with_gateways("g"))
    assert times_of(found) == pytest.approx([2.0, 1.75 + 20.0 + 0.5 + 3.0 + 0.25])


def test_what_is_said_inside_a_box_takes_no_time() -> None:
    # Only the prefill replica is elsewhere.
    found = go(SPLIT, ONE, cluster_of("pd", rtt_s=RTT_S), settings=with_gateways("d"))
    assert times_of(found) == pytest.approx([1.5, 1.25 + 20.0 + 0.5 + 3.0])
    alone = go(TWO_MIXED, ONE, cluster_of("ab", rtt_s=RTT_S), settings=with_gateways("ab"))
    chosen = "ab"[alone.services[0].decode[0]]
    there = go(TWO_MIXED, ONE, cluster_of("ab", rtt_s=RTT_S), settings=with_gateways(chosen))
    assert times_of(there) == pytest.approx([1.0, 4.0])


def test_the_processes_at_the_ends_of_a_message_take_their_time_also_inside_a_box() -> None:
    settings = SimSettings(layerwise=False, gateways=("g",), message_s=0.1)
    found = go(SPLIT, ONE, cluster_of("pdg", rtt_s=RTT_S), settings=settings)
    # Four messages to the first token; the KV leaves after three, and one says that all is decoded.
    assert times_of(found) == pytest.approx([2.4, 1.75 + 0.3 + 20.0 + 0.5 + 3.0 + 0.25 + 0.1])
    plan = plan_of({"a": Phase.MIXED}, {("a", "a"): 1.0})
    inside = SimSettings(gateways=("a",), message_s=0.1)
    assert times_of(go(plan, ONE, cluster_of("a", rtt_s=RTT_S), settings=inside)) == pytest.approx([1.2, 4.2])


def test_a_message_takes_no_less_than_no_time() -> None:
    with pytest.raises(WorldError, match="message_s is -1"):
        SimSettings(message_s=-1.0)


def test_gateways_take_requests_in_turn_and_none_of_a_box_that_is_not_there() -> None:
    plan = plan_of({"a": Phase.MIXED}, {("a", "a"): 1.0})
    trace = trace_of((0.0, 20, 1), (10.0, 20, 1), (20.0, 20, 1), (30.0, 20, 1))
    here = go(plan, trace, cluster_of("ag", rtt_s=RTT_S), settings=with_gateways("ag"))
    assert here.services[0].outcomes.ttft_s.tolist() == pytest.approx([1.0, 1.5, 1.0, 1.5])
    lost = go(plan, trace, cluster_of("ag", rtt_s=RTT_S), settings=with_gateways("ag"), changes=[BoxLost(15.0, "g")])
    assert lost.services[0].outcomes.ttft_s.tolist() == pytest.approx([1.0, 1.5, 1.0, 1.0])


@pytest.mark.parametrize(
    ("lost_at", "detect_s", "again_at"),
    [
        (0.1, 1.0, 1.1),  # under way to it: known when the loss is noticed
        (0.1, 0.05, 0.25),  # noticed before it gets there
        (0.3, 1.0, 1.3),  # it has opened, and prefill has not been asked
        (0.6, 1.0, 1.6),  # prefill is being asked
        (0.6, 0.05, 0.75),
        (1.0, 1.0, 2.0),  # the prompt is being read
    ],
)
def test_a_decode_box_that_is_lost_while_messages_are_under_way_costs_the_round_trips_anew(
    lost_at: float, detect_s: float, again_at: float
) -> None:
    # The replica d is the first choice. From when the other one is asked, all is as from the start.
    found = go(
        TWO_DECODES, ONE, cluster_of("pdeg", rtt_s=RTT_S), settings=with_gateways("g", detect_s=detect_s),
        changes=[BoxLost(lost_at, "d")],
    )  # fmt: skip
    outcome = found.services[0]
    assert outcome.decode.tolist() == [2]
    assert outcome.replays.tolist() == [1]
    assert outcome.outcomes.ttft_s[0] == pytest.approx(again_at + 2.0)


@pytest.mark.parametrize("lost_at", [0.1, 0.6, 0.9, 1.9])
def test_a_prefill_box_that_is_lost_leaves_the_prompt_to_the_decode_box(lost_at: float) -> None:
    found = go(SPLIT, ONE, cluster_of("pdg", rtt_s=RTT_S), settings=with_gateways("g"), changes=[BoxLost(lost_at, "p")])
    outcome = found.services[0]
    assert outcome.outcomes.completed.all()
    assert outcome.prefill.tolist() == outcome.decode.tolist() == [1]


@pytest.mark.parametrize(("wait_limit", "e2e_s"), [(1.5, 4.5), (18.0, 4.5), (20.0, 24.0)])
def test_kv_that_would_take_too_long_is_given_up_and_computed(wait_limit: float, e2e_s: float) -> None:
    # 20 s on the link from 1.0 on, or, half a second after that, a second for the prompt and one for each token left.
    found = go(SPLIT, ONE, cluster_of("pd"), settings=SimSettings(layerwise=False, kv_wait_limit=wait_limit))
    assert times_of(found) == pytest.approx([1.0, e2e_s])
    assert found.services[0].prefill.tolist() == ([0] if e2e_s > 20.0 else [1])


def test_a_wait_limit_is_above_0() -> None:
    with pytest.raises(WorldError, match="kv_wait_limit is 0"):
        SimSettings(kv_wait_limit=0.0)


@pytest.mark.parametrize(("wait_limit", "bits_s"), [(inf, 2e8), (1.5, 2e8), (1.5, 2e6), (1e-3, 2e7)])
@pytest.mark.parametrize("rtt_s", [0.02, 0.7])
@pytest.mark.parametrize("kv_tokens", [800, 20_000])
def test_everything_ends_once_and_everything_is_given_back(
    kv_tokens: int, rtt_s: float, wait_limit: float, bits_s: float
) -> None:
    trace = busy_trace(400)
    changes: list[Change] = [
        BoxLost(2.0, "q"), BoxLost(2.1, "d"), BoxLost(3.0, "m"), BoxJoined(3.1, "d"), BoxJoined(5.0, "q"),
        BoxLost(5.3, "d"), BoxJoined(6.5, "d"),
    ]  # fmt: skip
    result = go(
        BUSY, trace, cluster_of("pqdem", bits_s=bits_s, rtt_s=rtt_s), times=QUICK, kv_tokens=kv_tokens,
        settings=SimSettings(detect_s=0.3, gateways=tuple("pqdem"), kv_wait_limit=wait_limit), changes=changes,
    )  # fmt: skip
    outcome = result.services[0]
    assert outcome.outcomes.completed.all()
    assert (outcome.replays > 0).any()
    assert (outcome.outcomes.ttft_s <= outcome.outcomes.e2e_s).all()


def test_a_gateway_is_one_of_the_boxes() -> None:
    with pytest.raises(ClusterError, match="atlantis"):
        go(SPLIT, ONE, cluster_of("pd"), settings=SimSettings(gateways=("atlantis",)))


def test_a_plan_that_changes_while_messages_are_under_way_loses_none() -> None:
    later = plan_of({"a": Phase.MIXED}, {("a", "a"): 1.0}, version=2)
    cluster = cluster_of("pdag", rtt_s=RTT_S)
    for at in (0.1, 0.3, 0.6, 0.9, 1.8):
        change = PlanChange(at=at, service=0, plan=later)
        found = go(SPLIT, ONE, cluster, settings=with_gateways("g"), changes=[change])
        assert found.services[0].outcomes.completed.all()
        assert found.services[0].decode.tolist() == [2]
