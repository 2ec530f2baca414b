"""The policy `splitwise` in whole simulations: machines are borrowed in a burst, and not at other times."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.problem import Problem
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.sims.records import Trace
from p2pserve.sims.replanning import Replanner, ReplanPolicy, ReplanSettings
from p2pserve.sims.results.outcomes import ServiceOutcome
from p2pserve.sims.scenario import ServiceRun, SimSettings
from p2pserve.sims.world import simulate

PHASES = {"p": Phase.PREFILL, "q": Phase.PREFILL, "d": Phase.DECODE, "e": Phase.DECODE}
MODEL = model_shape("llama-7b")
PROMPT, OUTPUT = 1000, 40
BURST, QUIET = 60, 10


def a_cluster() -> Cluster:
    gpu = gpu_table().find("A100-SXM4-80GB", Specs.MEASURED)
    return Cluster(
        boxes=tuple(Box(id=name, gpu=gpu, gpus=1) for name in PHASES),
        gbps=np.full((4, 4), 100.0), rtt_s=np.full((4, 4), 1e-4), usd_per_gb=np.zeros((4, 4)),
    )  # fmt: skip


def a_run(arrivals: NDArray[np.float64], prompt: int = PROMPT, output: int = OUTPUT) -> ServiceRun:
    """Requests of the same lengths, served by two prompt and two token machines."""
    count = len(arrivals)
    trace = Trace(
        ids=np.arange(count),
        arrival_s=arrivals,
        prompt=np.full(count, prompt),
        output=np.full(count, output),
        lengths="test",
        arrivals="test",
    )
    service = Service(
        name="s", model=MODEL, workload=Workload(name="w", prompts=trace.prompt, outputs=trace.output, rate=1.0)
    )
    plan = Plan(
        epoch=0, version=1, service="s", codec="raw", why=(),
        replicas=tuple(
            Replica(id=name, phase=phase, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=MODEL.layers),))
            for name, phase in PHASES.items()
        ),
        pairings=tuple(Pairing(prefill=a, decode=b, weight=0.25) for a in "pq" for b in "de"),
    )  # fmt: skip
    return ServiceRun(service=service, plan=plan, trace=trace)


def serve(policy: str, *, known: bool = False, gateways: int = 0) -> ServiceOutcome:
    """A burst of prompts at once, and requests one by one long after it."""
    settings = SimSettings(
        routing=RoutingSettings(policy=policy), known_answers=known, gateways=tuple("pqde")[:gateways],
        report_s=1.0 if gateways else 0.0,
    )  # fmt: skip
    arrivals = np.concatenate((np.zeros(BURST), 200.0 + 10.0 * np.arange(QUIET)))
    return simulate(a_cluster(), [a_run(arrivals)], settings=settings).services[0]


@pytest.mark.parametrize("known", [False, True])
def test_a_burst_borrows_token_machines_and_they_go_home(known: bool) -> None:
    found = serve("splitwise", known=known)
    assert found.outcomes.completed.all()
    alone = found.prefill == found.decode
    assert 0 < alone[:BURST].sum() < BURST
    assert not alone[BURST:].any(), "at home again"
    same = serve("splitwise", known=known)
    np.testing.assert_array_equal(found.outcomes.e2e_s, same.outcomes.e2e_s)


def test_all_machines_compute_the_prompts_of_a_burst() -> None:
    """The plan's policy leaves them to the prompt machines: the last first token comes later."""
    borrowing, planned = serve("splitwise"), serve("plan")
    assert borrowing.outcomes.ttft_s.max() < 0.9 * planned.outcomes.ttft_s.max()


def test_four_gateways_borrow_in_the_first_second_of_a_burst_as_one_does() -> None:
    alone = [serve("splitwise", gateways=count) for count in (1, 4)]
    borrowed = [int((found.prefill == found.decode)[:BURST].sum()) for found in alone]
    assert borrowed[1] > 0
    assert borrowed[1] == pytest.approx(borrowed[0], abs=BURST / 4)
    assert alone[1].outcomes.ttft_s.max() < 1.3 * alone[0].outcomes.ttft_s.max()


def test_a_token_machine_that_stays_borrowed_becomes_a_prompt_machine_in_a_quiet_moment() -> None:
    """Twenty minutes of prompts that two machines do not carry, a minute of rest, and the same again."""
    busy = np.arange(0.0, 600.0, 1 / 4.5)
    arrivals = np.concatenate((busy, 600.0 + np.arange(5.0, 60.0, 10.0), 660.0 + busy))
    run, cluster = a_run(arrivals, prompt=8000, output=10), a_cluster()
    replanner = Replanner(
        Problem(cluster=cluster, services=(run.service,), pinned={}), ReplanSettings(policy=ReplanPolicy.LIGHT)
    )
    settings = SimSettings(routing=RoutingSettings(policy="splitwise", max_pending_tokens=8192), quiet_s=inf)
    found = simulate(cluster, [run], settings=settings, replan=replanner).services[0]
    alone = found.prefill == found.decode
    (record,) = replanner.records
    assert "is moved to prefill: " in record.why[-1]
    assert 600.0 < record.asked_s < 660.0, "in the minute of rest"
    assert record.replicas == "3P 1D 0M"
    first, second = arrivals < 600.0, arrivals > 660.0
    assert alone[first].mean() > 0.05
    assert alone[second].mean() < 0.2 * alone[first].mean(), "three machines carry them"
