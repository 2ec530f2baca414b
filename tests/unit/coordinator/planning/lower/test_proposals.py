"""What a finished plan tells people: its replicas by name and GPU, what is expected of it, and what holds it back."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.costs.rounds import TOKEN_BUDGETS
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.cluster_file import packaged_cluster
from p2pserve.coordinator.planning.model.problem import Group, Problem, Proposal, Slice, Solution
from p2pserve.coordinator.planning.model.slo import parse_slo
from p2pserve.coordinator.planning.model.workload import Service, Workload

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
A6000, A5000, A40, TI = range(4)


def propose(solution: Solution, rate: float = 6.0, usd_per_gb: float = 0.0, gbps: float = 10.0) -> Proposal:
    """For four boxes of four GPUs."""
    cluster = packaged_cluster("thunderserve-cloud-16", Specs.MEASURED)
    same = np.full_like(cluster.usd_per_gb, 1.0)
    cluster = replace(cluster, usd_per_gb=usd_per_gb * same, gbps=gbps * same)
    rng = np.random.default_rng(0)
    prompts, outputs = (1 + rng.geometric(1.0 / mean, 400) for mean in (1000, 100))
    workload, model = Workload(name="w", prompts=prompts, outputs=outputs, rate=rate), model_shape("llama-13b")
    service = Service(name="s", model=model, workload=workload, slo=parse_slo("5x", model, workload))
    problem = Problem(cluster=cluster, services=(service,), pinned={})
    (proposal,) = LowerLevel(problem).propose(solution, epoch=1, version=2)
    return proposal


def whole(box: int, phase: Phase) -> Group:
    return Group((Slice(box, 4),), phase)


ALL = (whole(A6000, P), whole(A5000, D), whole(A40, M), whole(TI, P))
HALVES = (Group((Slice(A6000, 2),), P), Group((Slice(A6000, 2),), D), Group((Slice(A5000, 4), Slice(TI, 4)), M))


def test_why_names_cards_widths_and_what_holds_a_replica_back() -> None:
    fours = "TP 1 x 10 layers, TP 1 x 10 layers, TP 1 x 10 layers, TP 1 x 10 layers"
    expected, limit, *replicas = propose(ALL).plan.why
    assert expected == "79.6% of 6 requests/s are expected to be in time; up to 0 requests/s 90% would be"
    carried = "prefill replicas carry 19.1 requests/s in time, decode replicas 9.63, mixed replicas 2.14"
    assert limit == f"limit: the links ({carried}, the links between them 5.24)"
    assert [why.split("; ") for why in replicas] == [
        [
            f"a6000: prefill on 4 x RTX-A6000-48GB ({fours})",
            "could prefill 14.9 requests/s or decode 14.2 requests/s",
            "prefill of a prompt takes 0.237 s",
        ],
        [
            "a5000: decode on 4 x RTX-A5000-24GB (TP 4 x 40 layers)",
            "could prefill 10.8 requests/s or decode 10.2 requests/s",
            "memory for 48 requests at once",
        ],
        [
            f"a40: mixed on 4 x A40-48GB ({fours})",
            "could prefill 14 requests/s or decode 12.1 requests/s",
            "prefill of a prompt takes 0.0728 s",
            "memory for 128 requests at once",
        ],
        [
            f"3090ti: prefill on 4 x RTX-3090TI-24GB ({fours})",
            "could prefill 8.94 requests/s or decode 11.4 requests/s",
            "prefill of a prompt takes 0.386 s",
        ],
    ]


@pytest.mark.parametrize(
    ("solution", "gbps", "limit"),
    [
        ((whole(A6000, P), whole(A5000, D)), 10.0, "the links ("),
        ((whole(A6000, M), whole(A5000, M)), 10.0, "the replicas, all of them mixed ("),
        ((whole(A5000, P), whole(A6000, D), whole(A40, D), whole(TI, D)), 1000.0, "prefill ("),
        ((whole(A6000, P), whole(A40, P), whole(TI, P), whole(A5000, D)), 1000.0, "decode ("),
    ],
)
def test_the_limit_is_what_is_full_first(solution: Solution, gbps: float, limit: str) -> None:
    assert propose(solution, gbps=gbps).limits.startswith(f"limit: {limit}")


def test_replicas_of_one_box_are_told_apart_by_their_first_gpu_and_stages_follow_each_other() -> None:
    plan = propose(HALVES, rate=1.0).plan
    names = {replica.id: replica.phase for replica in plan.replicas}
    assert {"a6000/0": P, "a6000/2": D}.items() <= names.items()
    gpus = Counter(gpu for replica in plan.replicas for gpu in replica.gpus)
    assert gpus == Counter((box, number) for box in ("a6000", "a5000", "3090ti") for number in range(4))
    for replica in plan.replicas:
        bounds = [(stage.first_layer, stage.last_layer) for stage in replica.stages]
        assert [0, *(last for _, last in bounds)] == [*(first for first, _ in bounds), 40]


def test_only_who_decodes_has_a_deadline_for_its_steps() -> None:
    steps = {replica.phase: replica.step_tokens for replica in propose(ALL).plan.replicas}
    assert steps[P] == TOKEN_BUDGETS[0]
    assert steps[M] == steps[D] == 384


def test_boxes_cost_by_the_hour_and_traffic_by_the_gigabyte() -> None:
    every, some = propose(ALL), propose(HALVES, rate=1.0)
    assert every.usd_per_hour == pytest.approx(1.932 + 0.892 + 1.612 + 1.228)
    assert some.usd_per_hour == pytest.approx(1.932 + 0.892 + 1.228)
    assert every.usd_per_million_tokens == pytest.approx(every.usd_per_hour / (every.tokens_s * 3600) * 1e6)
    assert every.tokens_s == pytest.approx(6.0 * 96.345)
    pair = (whole(A6000, P), whole(A5000, D))
    free, dear = propose(pair, rate=1.0), propose(pair, rate=1.0, usd_per_gb=0.5)
    # every second a prompt of about a thousand tokens crosses the link: 0.8 GB, coded in five bits for sixteen
    assert dear.usd_per_hour - free.usd_per_hour == pytest.approx(0.5 * 3600 * 0.26, rel=0.01)


def test_the_estimate_of_a_replica_counts_what_goes_through_it() -> None:
    solution = (whole(A6000, M), whole(A40, P), whole(A5000, D))
    proposal = propose(solution, rate=2.0)
    for estimate in proposal.replicas:
        through = sum(p.weight for p in proposal.plan.pairings if estimate.id in (p.prefill, p.decode))
        assert estimate.requests_s == pytest.approx(2.0 * through, rel=1e-3)


def test_the_estimates_of_replicas_add_up_to_what_comes() -> None:
    found = {estimate.id: estimate for estimate in propose((whole(A6000, P), whole(A5000, D)), rate=1.0).replicas}
    assert found["a6000"].requests_s == pytest.approx(1.0)
    assert found["a5000"].requests_s == pytest.approx(1.0)
    assert found["a6000"].utilisation == pytest.approx(1.0 / 14.9, rel=0.01)
    assert found["a5000"].utilisation == pytest.approx(1.0 / 10.2, rel=0.01)
    assert found["a6000"].batch == pytest.approx(found["a6000"].utilisation)


def test_times_are_those_that_so_many_of_a_hundred_keep() -> None:
    proposal = propose((whole(A6000, P), whole(A5000, D)), rate=1.0)
    for times in (proposal.ttft_s, proposal.tpot_s, proposal.e2e_s):
        assert 0.0 < times.p50 < times.p90 < times.p99 < 100.0
    # a prompt of a thousand tokens takes 0.237 s; hardly any has to wait at so low a load
    assert 0.1 < proposal.ttft_s.p50 < 0.5
