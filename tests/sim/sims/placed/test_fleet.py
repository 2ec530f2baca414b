"""Engines of several services that come and go, and placements judged by replays beside engines simulated in full."""

from collections.abc import Sequence
from math import inf

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.placement.replay import PeriodReplay
from p2pserve.coordinator.placement.search import search_placement
from p2pserve.coordinator.placement.values import GpuGroup, Groups, PlacementBox, PlacementProblem, PlacementService
from p2pserve.sims.placement import routing
from p2pserve.sims.placement.engines import FleetRequest, FleetState
from p2pserve.sims.placement.fleet import Fleet, host_group, period_of, serve_groups
from p2pserve.sims.placement.replacing import Replacing, ReplacingSettings
from p2pserve.sims.placement.routing import AsRouted, FewestRequests, FleetRouting, GatewayRouting
from p2pserve.sims.records import Outcomes, Trace

MODELS = ("llama2-13b", "llama2-7b", "opt-6.7b")
MEANS = ((1000, 150), (150, 250), (200, 40))


def _traces(rates: list[float], seconds: float, seed: int = 0, start_s: float = 0.0) -> dict[int, Trace]:
    traces = {}
    for number, rate in enumerate(rates):
        rng = np.random.default_rng([seed, number])
        size = max(1, int(rng.poisson(rate * seconds)))
        prompt, output = MEANS[number]
        traces[number] = Trace(
            ids=np.arange(size),
            arrival_s=start_s + np.sort(rng.uniform(0.0, seconds, size)),
            prompt=rng.integers(prompt // 2, 2 * prompt, size),
            output=rng.integers(output // 2, 2 * output, size),
            lengths="",
            arrivals="",
        )
    return traces


def _problem(traces: dict[int, Trace], cards: tuple[str, ...] = ("A100-SXM4-80GB",) * 2) -> PlacementProblem:
    return PlacementProblem(
        boxes=[
            PlacementBox(id=f"box-{number}", gpu=gpu_table().find(card, Specs.MEASURED), gpus=4, link_gbps=2400.0,
                         on_disk=frozenset(range(len(MODELS))))
            for number, card in enumerate(cards)
        ],
        services=[PlacementService(name=model, model=model_shape(model)) for model in MODELS],
        period=period_of(traces),
    )  # fmt: skip


def _normalized(problem: PlacementProblem, served: dict[int, Outcomes]) -> float:
    every = [outcomes.e2e_s / problem.usual_s[number] for number, outcomes in served.items()]
    return float(np.concatenate(every).mean())


@pytest.mark.parametrize(
    "groups",
    [
        (GpuGroup(0, 4, (0,)), GpuGroup(1, 2, (1,)), GpuGroup(1, 2, (2,))),
        (GpuGroup(0, 2, (0, 1)), GpuGroup(0, 2, (0, 2)), GpuGroup(1, 4, (1, 2))),
        (GpuGroup(0, 1, (1,)), GpuGroup(0, 1, (1, 2)), GpuGroup(1, 4, (0, 1))),
    ],
)
def test_a_replay_comes_to_what_engines_do_step_by_step(groups: Groups) -> None:
    traces = _traces([1.0, 3.0, 4.0], 60.0)
    problem = _problem(traces)
    judged = PeriodReplay(problem).judge(groups)
    served = serve_groups(problem, groups, "db", traces)
    assert judged.normalized == pytest.approx(_normalized(problem, served), rel=0.12)
    for number, outcomes in served.items():
        mean = float(outcomes.e2e_s.mean()) / problem.usual_s[number]
        assert judged.normalized_sum[number] / judged.requests[number] == pytest.approx(mean, rel=0.3)


@pytest.mark.parametrize("seed", range(3))
def test_the_default_placement_is_never_worse_than_the_others_in_full_simulation(seed: int) -> None:
    """Dedicated GPUs, SeaLLM's placement and sharing by pairs, on unequal boxes."""
    rng = np.random.default_rng(seed)
    traces = _traces([float(each) for each in rng.gamma(1.0, 4.0, 3) + 0.3], 30.0, seed)
    problem = _problem(traces, ("A100-SXM4-80GB", "RTX A6000"))

    def trial(groups: Groups) -> float:
        return _normalized(problem, serve_groups(problem, groups, "db", traces))

    found = search_placement(PeriodReplay(problem), rng=rng, trial=trial, rounds=40)
    assert {"dedicated", "seallm", "shared"} <= found.tried.keys()
    assert found.cost == min(found.tried.values()) == trial(found.groups)


@pytest.mark.parametrize("routing", [FewestRequests, GatewayRouting])
def test_requests_of_an_engine_that_goes_are_answered_by_another(routing: type[FleetRouting]) -> None:
    traces = _traces([1.0, 3.0, 3.0], 20.0)
    problem = _problem(traces)

    class Leaves:
        wake_at = 5.0

        def wake(self, fleet: Fleet, now: float) -> None:
            fleet.remove([0], now)
            Leaves.wake_at = inf

    fleet = Fleet(traces, routing())
    for number, group in enumerate([GpuGroup(0, 1, (1, 2)), GpuGroup(0, 1, (1, 2)), GpuGroup(1, 2, (0,))]):
        fleet.add(number, host_group(problem, group, "db"))
    served = fleet.run(Leaves())
    assert fleet.replayed > 0
    assert fleet.waited == 0
    for outcomes in served.values():
        assert outcomes.completed.all()
        assert (outcomes.ttft_s <= outcomes.e2e_s).all()
    for engine in fleet.engines.values():
        assert engine.engine.wake_at == inf


def test_requests_wait_for_an_engine_of_their_service() -> None:
    traces = _traces([1.0], 10.0)
    problem = _problem(traces)

    class Comes:
        wake_at = 15.0

        def wake(self, fleet: Fleet, now: float) -> None:
            fleet.add(7, host_group(problem, GpuGroup(0, 2, (0,)), "db"), now)
            Comes.wake_at = inf

    fleet = Fleet(traces)
    served = fleet.run(Comes())
    assert served[0].completed.all()
    assert fleet.waited == len(traces[0])
    assert (traces[0].arrival_s + served[0].ttft_s > 15.0).all()
    assert not Fleet(traces).run()[0].completed.any()


def test_services_follow_popularity_and_no_request_is_lost() -> None:
    """The first part asks for one service, the second for another: services move, and latency is lower by that."""
    before, after = _traces([3.0, 30.0, 0.5], 60.0), _traces([12.0, 1.0, 0.5], 140.0, 1, start_s=60.0)
    traces = {number: _join(before[number], after[number]) for number in before}
    problem = _problem(_traces([3.0, 30.0, 0.5], 60.0, 2), ("A100-SXM4-80GB",))
    first = search_placement(PeriodReplay(problem), rng=np.random.default_rng(0)).groups

    def run(until_s: float) -> tuple[Replacing, Fleet, dict[int, Outcomes]]:
        changes = Replacing(
            problem, first, "db", traces, settings=ReplacingSettings(interval_s=40.0, until_s=until_s),
            place=lambda replay, running: search_placement(
                replay, rng=np.random.default_rng(0), before=running, rounds=20
            ).groups,
        )  # fmt: skip
        fleet = Fleet(traces)
        changes.begin(fleet)
        return changes, fleet, fleet.run(changes)

    changes, fleet, served = run(200.0)
    _, _, fixed = run(0.0)
    assert 1 <= changes.counts.moves < changes.counts.intervals
    for number, outcomes in served.items():
        assert outcomes.completed.all(), number
    assert _normalized(problem, served) < 0.9 * _normalized(problem, fixed)
    for engine in fleet.engines.values():
        assert engine.engine.wake_at == inf


def _join(one: Trace, two: Trace) -> Trace:
    return Trace(
        ids=np.arange(len(one) + len(two)),
        arrival_s=np.concatenate([one.arrival_s, two.arrival_s]),
        prompt=np.concatenate([one.prompt, two.prompt]),
        output=np.concatenate([one.output, two.output]),
        lengths="",
        arrivals="",
    )


def test_gateways_that_hear_of_other_services_answer_sooner_than_deaf_ones_or_the_fewest_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same requests on the same engines, sent by the network's own code."""
    traces = _traces([1.0, 6.0, 6.0], 60.0)
    problem = _problem(traces)
    groups = [GpuGroup(box, 1, pair) for box in (0, 1) for pair in ((0, 1), (0, 2), (1, 2))]

    def serve(way: FleetRouting) -> float:
        fleet = Fleet(traces, way)
        for number, group in enumerate(groups):
            fleet.add(number, host_group(problem, group, "db"))
        served = fleet.run()
        assert all(outcomes.completed.all() for outcomes in served.values())
        return _normalized(problem, served)

    fewest, hearing = serve(FewestRequests()), serve(GatewayRouting())
    monkeypatch.setattr(routing, "HEARD_S", inf)
    deaf = serve(GatewayRouting(first_s=inf))
    assert hearing < 0.8 * fewest
    assert hearing < 0.8 * deaf


def test_a_request_to_a_box_that_was_quiet_is_known_to_other_services_at_once() -> None:
    """Of two boxes with the same two services: what comes to the one keeps the other service's away from it, though
    nobody reports for a long time."""
    traces = {
        number: Trace(
            ids=np.arange(1), arrival_s=np.array([at]), prompt=np.array([900]), output=np.array([20]), lengths="",
            arrivals="",
        )
        for number, at in enumerate((0.0, 0.1))
    }  # fmt: skip
    problem = _problem(traces)
    for seed in range(4):
        fleet = Fleet(traces, GatewayRouting(report_s=60.0, first_s=60.0, seed=seed))
        for box in range(2):
            fleet.add(box, host_group(problem, GpuGroup(box, 1, (0, 1)), "db"))
        fleet.run()
        assert all(engine.engine.counts.steps for engine in fleet.engines.values())


def test_requests_go_where_they_went_before_while_that_engine_is_there() -> None:
    traces = _traces([1.0], 20.0)
    problem = _problem(traces)
    fleet = Fleet(traces, AsRouted({(0, row): 1 for row in range(len(traces[0]))}))
    for number in range(2):
        fleet.add(number, host_group(problem, GpuGroup(number, 1, (0,)), "db"))
    fleet.run()
    busy = [engine.engine.counts.steps for engine in fleet.engines.values()]
    assert busy[0] == 0 < busy[1]


def test_services_do_not_all_prefer_the_same_of_boxes_that_are_alike() -> None:
    traces = _traces([0.02, 0.02, 0.02], 60.0)
    problem = _problem(traces, ("A100-SXM4-80GB",) * 6)
    groups = [GpuGroup(number, 4, (0, 1, 2)) for number in range(6)]

    class Watched(FewestRequests):
        """As gateways choose, and where that was."""

        def __init__(self, seed: int) -> None:
            self.gateways, self.first = GatewayRouting(seed=seed), dict[int, int]()

        def choose(self, fleet: FleetState, request: FleetRequest, hosts: Sequence[int], now: float) -> int:
            found = self.gateways.choose(fleet, request, hosts, now)
            self.first.setdefault(request.service, found)
            return found

        def end(self, request: FleetRequest) -> None:
            self.gateways.end(request)

    def first_of(seed: int) -> tuple[int, ...]:
        watched = Watched(seed)
        fleet = Fleet(traces, watched)
        for number, group in enumerate(groups):
            fleet.add(number, host_group(problem, group, "db"))
        fleet.run()
        return tuple(watched.first[service] for service in range(3))

    found = [first_of(seed) for seed in range(4)]
    assert first_of(0) == found[0]
    assert len(set(found)) > 1
    assert any(len(set(each)) > 1 for each in found)
