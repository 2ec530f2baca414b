"""When the coordinator has plans tried, and what bounds that."""

import time
from collections.abc import Sequence

import msgspec
import pytest

from p2pserve.coordinator import Demand
from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.planning.model.problem import Proposal
from p2pserve.coordinator.planning.upper.trials import TrialOutcome, TrialsOver
from p2pserve.coordinator.services.replacing import BoxToPlace, ServiceToPlace, SharingTask
from p2pserve.node.planning.coordination import TRY_S, PlanningTask
from p2pserve.node.planning.services import Coordinator
from p2pserve.node.planning.trying import LimitedTrial, trials_within
from p2pserve.node.planning.worker import PlannerTask, answer
from p2pserve.node.view import NetworkView
from p2pserve.sims.records import TraceError

from .test_coordination import OWN, view_of
from .test_repair import changed, started

LEADER = (OWN, 1)
QUIET_S = 15.0


def asked(view: NetworkView, requests_s: float, output: int = 20) -> None:
    demand = Demand(requests_s=requests_s, arrival_cv=1.0, lengths=((100, output),) * 32)
    view.adverts[OWN] = msgspec.structs.replace(view.adverts[OWN], demand=demand)


def move_a_little(view: NetworkView) -> None:
    """A figure that every plan is made with, and none is urgent for."""
    engine = view.adverts[OWN].engine
    assert engine is not None
    view.adverts[OWN] = changed(view.adverts[OWN], tflops=engine.tflops * 1.01)


def next_task(coordinator: Coordinator, view: NetworkView, now: float) -> PlanningTask:
    move_a_little(view)
    task = coordinator.next(view, LEADER, now)
    assert task is not None
    return task


def test_plans_are_tried_once_for_the_boxes_and_the_traffic_there_are_and_again_after_a_while() -> None:
    coordinator, view = started(*"xxx")
    soon = next_task(coordinator, view, TRY_S - 1.0)  # the first plan, of 0 s, has been tried
    assert (soon.tries, soon.keeps_phases) == (False, True)
    late = next_task(coordinator, view, TRY_S + QUIET_S)
    assert (late.tries, late.keeps_phases) == (True, False)


def test_other_traffic_is_planned_with_at_once_and_in_trials() -> None:
    coordinator, view = started(*"xxx")
    next_task(coordinator, view, 100.0)
    asked(view, 20.0)
    task = coordinator.next(view, LEADER, 103.0)
    assert task is not None
    assert task.news.startswith("requests/s: 20")
    assert (task.is_urgent, task.tries) == (False, True)


def test_what_breaks_is_planned_with_by_formulas_and_then_in_trials() -> None:
    coordinator, view = started(*"xxx")
    next_task(coordinator, view, 100.0)
    view.adverts[OWN] = changed(view.adverts[OWN], tflops=0.01)
    broken = coordinator.next(view, LEADER, 103.0)
    assert broken is not None
    assert (broken.is_urgent, broken.tries, broken.keeps_phases) == (True, False, False)
    assert next_task(coordinator, view, 110.0).tries


def test_traffic_that_is_only_assumed_is_not_tried_with() -> None:
    coordinator = Coordinator(OWN, "raw")
    task = coordinator.next(view_of(*"xxx"), LEADER, 0.0)
    assert task is not None
    assert (task.tries, task.keeps_phases) == (False, False)


def test_a_task_that_tries_asks_the_simulator() -> None:
    """A network whose boxes differ: what the plan says it has tried, and its phases, are of simulated requests."""
    view = view_of(*"xxxx")
    for number, peer in enumerate(view.adverts):
        figures = {"tflops": 300.0 if number % 2 else 1.0, "memory_gbps": 5.0 if number % 2 else 1000.0}
        engine = view.adverts[peer].engine
        assert engine is not None
        view.adverts[peer] = msgspec.structs.replace(
            view.adverts[peer], engine=msgspec.structs.replace(engine, **figures)
        )
    asked(view, 5.0)
    task = Coordinator(OWN, "raw").next(view, LEADER, 0.0)
    assert task is not None
    assert task.tries
    tried = task.run(lambda: False, trials_within(60.0))
    assert tried is not None
    (line,) = (line for line in tried.why if line.startswith("phases "))
    assert "tried by simulated requests" in line
    late = task.run(lambda: False, trials_within(0.0))
    assert late is not None
    assert "phases stay: there was no time to try them and others" in late.why


class Endless:
    """A trial that would never end, or refuses its figures."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
        if self._error is not None:
            raise self._error
        while True:
            pass

    def carries(self, proposals: Sequence[Proposal], factor: float) -> bool:
        return bool(self(proposals))


def test_a_trial_without_end_is_ended() -> None:
    trial = LimitedTrial(Endless(), 0.05)
    began = time.process_time()
    with pytest.raises(TrialsOver):
        trial(())
    with pytest.raises(TrialsOver):
        trial.carries((), 1.0)
    assert time.process_time() - began >= 0.05


def test_figures_that_the_simulator_refuses_end_the_trials() -> None:
    for error in (TraceError("requests of no tokens"), MemoryError()):
        with pytest.raises(TrialsOver):
            LimitedTrial(Endless(error), 1.0)(())
    with pytest.raises(ZeroDivisionError):
        LimitedTrial(Endless(ZeroDivisionError()), 1.0)(())


def test_placements_are_tried_in_the_time_there_is_and_else_replayed() -> None:
    boxes = tuple(
        BoxToPlace(id=name, card=gpu_table().find("A40"), most=2, able=("chat", "code"), hosts=("chat", "code"))
        for name in "abcd"
    )
    services = tuple(
        ServiceToPlace(
            name=name, shape=model_shape("llama-7b"),
            demands=(Demand(requests_s=8.0, arrival_cv=1.0, lengths=((900, 60),)),),
        )
        for name in ("chat", "code")
    )  # fmt: skip
    task = SharingTask(boxes=boxes, services=services, period_s=30.0)
    tried = answer(PlannerTask(sharing=task, search_s=30.0, trials_s=60.0), lambda: False).sharing
    replayed = answer(PlannerTask(sharing=task, search_s=30.0), lambda: False).sharing
    hasty = answer(PlannerTask(sharing=task, search_s=30.0, trials_s=1e-3), lambda: False).sharing
    assert tried is not None
    assert replayed is not None
    assert replayed == task.run(lambda: False)
    assert hasty == msgspec.structs.replace(replayed, untried="there was no time")
    assert tried.untried == ""
    assert tried.running_cost != replayed.running_cost
    assert tried.expected <= tried.running
    assert tried.running == pytest.approx(replayed.running, rel=0.5)
