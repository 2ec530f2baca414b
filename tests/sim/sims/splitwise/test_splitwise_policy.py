"""The policy `splitwise` in whole simulations: machines are borrowed in a burst, and not at other times."""

from __future__ import annotations

import numpy as np
import pytest

from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.sims.records import Trace
from p2pserve.sims.results.outcomes import ServiceOutcome
from p2pserve.sims.scenario import ServiceRun, SimSettings
from p2pserve.sims.world import simulate

PHASES = {"p": Phase.PREFILL, "q": Phase.PREFILL, "d": Phase.DECODE, "e": Phase.DECODE}
MODEL = model_shape("llama-7b")
PROMPT, OUTPUT = 1000, 40
BURST, QUIET = 60, 10


def serve(policy: str, *, known: bool = False) -> ServiceOutcome:
    """A burst of prompts at once, and requests one by one long after it."""
    gpu = gpu_table().find("A100-SXM4-80GB", Specs.MEASURED)
    links = np.full((4, 4), 100.0)
    cluster = Cluster(
        boxes=tuple(Box(id=name, gpu=gpu, gpus=1) for name in PHASES),
        gbps=links, rtt_s=np.full((4, 4), 1e-4), usd_per_gb=np.zeros((4, 4)),
    )  # fmt: skip
    count = BURST + QUIET
    trace = Trace(
        ids=np.arange(count),
        arrival_s=np.concatenate((np.zeros(BURST), 200.0 + 10.0 * np.arange(QUIET))),
        prompt=np.full(count, PROMPT),
        output=np.full(count, OUTPUT),
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
    settings = SimSettings(routing=RoutingSettings(policy=policy), known_answers=known)
    return simulate(cluster, [ServiceRun(service=service, plan=plan, trace=trace)], settings=settings).services[0]


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
