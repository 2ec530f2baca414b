"""Admission in simulations: what is refused beyond capacity, by which class, at one gateway and at several."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Deadlines, Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.coordinator.requests.admission import DEFAULT_RULES, AdmissionSettings, PriorityClass
from p2pserve.sims.admission import draw_classes
from p2pserve.sims.records import Trace
from p2pserve.sims.results.outcomes import ServiceOutcome
from p2pserve.sims.scenario import BoxLost, SimAdmission, SimSettings, WorldError
from p2pserve.sims.scenario import ServiceRun as Run
from p2pserve.sims.world import simulate

MODEL = model_shape("llama-13b")
BOXES = ("a", "b")
PROMPT, OUTPUT = 1000, 40
TTFT_S = 2.0
STRICT = AdmissionSettings(
    rules={
        kind: replace(rules, lateness=20.0 if kind is PriorityClass.BATCH else 1.0, least_s=0.0)
        for kind, rules in DEFAULT_RULES.items()
    }
)
CAPACITY = 9.0  # requests/s, about


@cache
def cluster(rtt_s: float = 0.002) -> Cluster:
    size = len(BOXES)
    return Cluster(
        boxes=tuple(Box(id=name, gpu=gpu_table().find("A40-48GB"), gpus=1) for name in BOXES),
        gbps=np.full((size, size), 10.0), rtt_s=np.full((size, size), rtt_s) * (1 - np.eye(size)),
        usd_per_gb=np.zeros((size, size)),
    )  # fmt: skip


def run_at(
    load: float,
    admission: SimAdmission | None,
    *,
    seconds: float = 60.0,
    gateways: Sequence[str] = (),
    replicas: Sequence[str] = BOXES,
    rtt_s: float = 0.002,
    arrival_s: NDArray[np.float64] | None = None,
    **more: object,
) -> ServiceOutcome:
    """Equal requests, so many times as often as they can be served."""
    arrival_s = np.linspace(0.0, seconds, int(load * CAPACITY * seconds)) if arrival_s is None else arrival_s
    count = len(arrival_s)
    trace = Trace(
        ids=np.arange(count), arrival_s=arrival_s, prompt=np.full(count, PROMPT),
        output=np.full(count, OUTPUT), lengths="equal", arrivals="evenly",
    )  # fmt: skip
    workload = Workload(name="equal", prompts=np.array([PROMPT]), outputs=np.array([OUTPUT]), rate=load * CAPACITY)
    service = Service(name="s", model=MODEL, workload=workload, slo=Slo(ttft_s=TTFT_S, tpot_s=inf, e2e_s=inf))
    stages = {name: (Stage(peer=name, tp=1, first_layer=0, last_layer=MODEL.layers),) for name in replicas}
    plan = Plan(
        epoch=1, version=1, service="s", codec="raw", why=(), deadlines=Deadlines(ttft_s=TTFT_S),
        replicas=tuple(Replica(id=name, phase=Phase.MIXED, stages=stages[name]) for name in replicas),
        pairings=tuple(Pairing(prefill=name, decode=name, weight=1.0 / len(replicas)) for name in replicas),
    )  # fmt: skip
    settings = SimSettings(admission=admission, gateways=tuple(gateways), report_s=1.0 if len(gateways) > 1 else 0.0)
    run = Run(service=service, plan=plan, trace=trace)
    return simulate(cluster(rtt_s), [run], settings=settings, **more).services[0]  # type: ignore[arg-type]


def in_time(found: ServiceOutcome) -> float:
    """Requests per second that met the deadline."""
    return float(found.met().sum()) / float(found.outcomes.trace.arrival_s[-1])


def test_below_capacity_nobody_is_refused() -> None:
    found = run_at(0.6, SimAdmission(rules=STRICT))
    assert not found.not_admitted.any()
    assert found.outcomes.completed.all()
    assert in_time(found) == in_time(run_at(0.6, None))


@pytest.mark.parametrize("gateways", [(), BOXES], ids=["one gateway", "two that hear each other late"])
def test_beyond_capacity_what_is_admitted_is_in_time_and_goodput_stays(gateways: Sequence[str]) -> None:
    without, found = run_at(2.0, None, gateways=gateways), run_at(2.0, SimAdmission(rules=STRICT), gateways=gateways)
    assert found.not_admitted.any()
    assert (found.outcomes.completed != found.not_admitted).all()  # each is either refused at once, or answered
    assert in_time(found) > 3 * in_time(without)
    admitted = found.outcomes.ttft_s[~found.not_admitted]
    assert np.quantile(admitted, 0.9) < 3 * TTFT_S
    assert np.nanquantile(without.outcomes.ttft_s, 0.9) > 10 * TTFT_S


def test_urgent_requests_are_in_time_and_batch_requests_wait_and_none_starves() -> None:
    admission = SimAdmission(rules=STRICT, urgent=0.2, batch=0.2)
    found = run_at(2.0, admission, seconds=120.0)
    kinds = np.array(draw_classes(len(found.outcomes.trace), admission, 0))
    served = {kind: found.outcomes.completed[kinds == kind] for kind in PriorityClass}
    ttft_s = {kind: np.nanmedian(found.outcomes.ttft_s[kinds == kind]) for kind in PriorityClass}
    assert served[PriorityClass.URGENT].mean() > served[PriorityClass.NORMAL].mean()
    assert ttft_s[PriorityClass.URGENT] < ttft_s[PriorityClass.BATCH]
    # In each part of the run some of each class are served: a class has its weight's part of the turns.
    for kind in PriorityClass:
        assert all(part.any() for part in np.array_split(served[kind], 8)), kind


def test_a_box_that_is_lost_meanwhile_costs_nobody_who_was_admitted_an_answer() -> None:
    found = run_at(1.5, SimAdmission(rules=STRICT), changes=[BoxLost(20.0, "b")])
    assert (found.outcomes.completed != found.not_admitted).all()
    assert found.replays.any()


def test_what_others_have_at_engines_is_told_also_while_nothing_is_admitted() -> None:
    """A burst fills the engines, everybody is refused meanwhile, and then again nobody."""
    burst, seconds = 3 * 40, 60.0
    arrival_s = np.concatenate([np.linspace(0.0, 0.9, burst), np.linspace(1.0, seconds, int(0.5 * CAPACITY * seconds))])
    found = run_at(0.5, SimAdmission(rules=STRICT, queued_s=4.0), gateways=BOXES, arrival_s=arrival_s)
    late = found.outcomes.trace.arrival_s > seconds / 2.0
    assert found.not_admitted[~late].any()
    assert not found.not_admitted[late].any()


def test_who_waits_at_a_gateway_is_at_an_engine_before_that_is_idle() -> None:
    """Two prompts at once for one engine that is a fifth of a second away: the second one is sent on its way when a
    tenth of a second of the first should be left, though no message says so."""
    near, far = (
        run_at(
            0.5, SimAdmission(queued_s=0.1), gateways=("a",), replicas=("b",), rtt_s=rtt_s, arrival_s=np.zeros(2)
        ).outcomes.ttft_s
        for rtt_s in (0.0, 0.2)
    )
    prefill_s = near[0]
    assert far[0] == pytest.approx(prefill_s + 0.2)
    assert far[1] - far[0] == pytest.approx(prefill_s, rel=0.1)


def test_the_same_run_twice_is_the_same() -> None:
    one, other = (run_at(1.5, SimAdmission(rules=STRICT, batch=0.5)) for _ in range(2))
    assert np.array_equal(one.outcomes.ttft_s, other.outcomes.ttft_s, equal_nan=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"urgent": -0.1}, {"batch": 1.1}, {"urgent": 0.6, "batch": 0.6}, {"urgent": float("nan")},
        {"queue_requests": 0}, {"queued_s": 0.0}, {"share": -1.0}, {"deadline_s": 0.0},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(WorldError, match=next(iter(wrong))):
        SimAdmission(**wrong)  # type: ignore[arg-type]
