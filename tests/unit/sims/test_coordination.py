"""When the simulated coordinator plans: at once for boxes, now and then for figures."""

from collections.abc import Sequence
from math import inf

import numpy as np

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.sims.coordination import SimCoordinator
from p2pserve.sims.scenario import LinksChanged, PlanChange, Situation, degrade_links

CLUSTER = Cluster(
    boxes=tuple(Box(id=name, gpu=gpu_table().find("A40"), gpus=1) for name in "abc"),
    gbps=np.full((3, 3), 10.0),
    rtt_s=np.zeros((3, 3)),
    usd_per_gb=np.zeros((3, 3)),
)


class Asked:
    """Remembers what it was asked, and answers with nothing."""

    def __init__(self) -> None:
        self.situations: list[Situation] = []

    def __call__(self, situation: Situation) -> Sequence[PlanChange]:
        self.situations.append(situation)
        return ()


def coordinator_of(asked: Asked, missing: str = "") -> SimCoordinator:
    return SimCoordinator(asked, CLUSTER, ["s"], quiet_s=15.0, missing=frozenset(missing))


def ask_often(coordinator: SimCoordinator, start: float, gap: float, count: int, output: int = 50) -> float:
    """So many requests, each answered before the next; the moment of the last."""
    for number in range(count):
        now = start + number * gap
        coordinator.record_start(0, 100, now)
        coordinator.record_end(0, 100, output + number % 3, now)
    return start + (count - 1) * gap


def test_boxes_that_go_and_come_are_planned_with_at_once() -> None:
    asked = Asked()
    coordinator = coordinator_of(asked, missing="c")
    assert coordinator.wake_at == inf
    coordinator.on_lost("a", 3.0)
    assert coordinator.wake_at == 3.0
    coordinator.plan((), 3.0)
    assert coordinator.wake_at == inf
    coordinator.on_joined("c", 4.0)
    coordinator.on_joined("a", 4.0)
    assert coordinator.wake_at == 4.0
    coordinator.plan((), 4.0)
    coordinator.on_lost("c", 5.0)
    coordinator.plan((), 5.0)
    found = [(each.missing, each.joined, each.why) for each in asked.situations]
    assert found == [
        (frozenset("ac"), frozenset(), ("a is lost",)),
        (frozenset(), frozenset("ac"), ("c has joined", "a has joined")),
        (frozenset("c"), frozenset("a"), ("c is lost",)),
    ]
    assert coordinator.round == 3


def test_figures_wait_until_the_last_plan_is_old_enough() -> None:
    asked = Asked()
    coordinator = coordinator_of(asked)
    slow = degrade_links(CLUSTER, LinksChanged(0.0, (("a", "b"),), 0.5))
    coordinator.on_links(slow, "slow", 4.0)
    assert coordinator.wake_at == 15.0
    coordinator.plan((), 15.0)
    coordinator.on_links(CLUSTER, "as before", 40.0)
    assert coordinator.wake_at == 40.0
    coordinator.plan((), 40.0)
    coordinator.on_links(slow, "slow again", 41.0)
    coordinator.on_lost("c", 43.0)
    assert coordinator.wake_at == 43.0, "a box does not wait, and takes the other news with it"
    coordinator.plan((), 43.0)
    assert coordinator.wake_at == inf
    assert [each.cluster is slow for each in asked.situations] == [True, False, True]
    assert asked.situations[-1].why == ("slow again", "c is lost")


def test_traffic_is_news_when_gateways_would_tell_of_it() -> None:
    asked = Asked()
    coordinator = coordinator_of(asked)
    last = ask_often(coordinator, 20.0, 0.5, 31)
    assert coordinator.wake_at == inf, "so few say nothing"
    last = ask_often(coordinator, last + 0.5, 0.5, 200)
    assert 20.0 < coordinator.wake_at <= last
    coordinator.plan((), last)
    (first,) = asked.situations
    (told,) = first.demands
    assert told is not None
    assert abs(told.requests_s - 2.0) < 0.1
    assert "2 requests/s, 100 tokens in and 51 out" in first.why[0]
    last = ask_often(coordinator, last + 0.5, 0.5, 200)
    assert coordinator.wake_at == inf, "as before"
    last = ask_often(coordinator, last + 0.5, 0.5, 200, output=400)
    assert coordinator.wake_at < inf
    coordinator.plan((), last)
    (shifted,) = asked.situations[-1].demands
    assert shifted is not None
    assert min(output for _, output in shifted.lengths) >= 400
