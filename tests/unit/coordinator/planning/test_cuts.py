"""Among how many replicas one box is divided, by the planner's cost model."""

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.planning.cuts import BoxCut, RatedCut, choose_cut, rate_cuts
from p2pserve.coordinator.planning.model.cluster import Box
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload

CUTS = (BoxCut(1, 4), BoxCut(2, 2), BoxCut(4, 1))


def service(model: str, slo: Slo, rate: float = 1.0) -> Service:
    lengths = np.full(64, 600), np.full(64, 200)
    return Service(
        name=model, model=model_shape(model), slo=slo,
        workload=Workload(name="even", prompts=lengths[0], outputs=lengths[1], rate=rate),
    )  # fmt: skip


def box(card: str, link_gbps: float) -> Box:
    return Box(id="box", gpu=gpu_table().find(card), gpus=4, gpu_link_gbps=link_gbps)


def rates(card: str, link_gbps: float, of: Service) -> list[float]:
    return [each.rate for each in rate_cuts(box(card, link_gbps), of, CUTS)]


LOOSE = Slo(ttft_s=4.0, tpot_s=0.2)


def test_slow_links_between_cards_speak_for_more_replicas() -> None:
    slow, fast = (
        rates("A40-48GB", 20.0, service("llama-7b", LOOSE)),
        rates("A40-48GB", 900.0, service("llama-7b", LOOSE)),
    )
    assert slow[1] > 2.0 * slow[0]
    assert fast[1] / fast[0] < slow[1] / slow[0]


def test_deadlines_that_one_card_does_not_meet_speak_for_fewer() -> None:
    tight = rates("A40-48GB", 900.0, service("llama-7b", Slo(ttft_s=4.0, tpot_s=0.012)))
    assert tight[0] > 0.0
    assert tight[2] == 0.0


def test_a_replica_that_does_not_hold_the_model_carries_nothing() -> None:
    found = rates("A40-48GB", 150.0, service("llama-30b", LOOSE))
    assert found[0] > 0.0
    assert found[2] == 0.0


def test_the_rate_that_is_asked_for_does_not_matter() -> None:
    one, many = (rates("A40-48GB", 150.0, service("llama-7b", LOOSE, rate=rate)) for rate in (0.1, 50.0))
    assert one == pytest.approx(many, rel=0.02)


@pytest.mark.parametrize(
    ("rated", "replicas"),
    [
        ([10.0, 20.0, 30.0], 4),
        ([10.0, 29.0, 30.0], 2),  # nearly as much, with fewer processes
        ([30.0, 20.0, 10.0], 1),
        ([0.0, 0.0, 0.0], 1),
    ],
)
def test_the_fewest_that_carry_nearly_as_much_are_chosen(rated: list[float], replicas: int) -> None:
    found = choose_cut([RatedCut(cut, rate) for cut, rate in zip(CUTS, rated, strict=True)])
    assert found.cut.replicas == replicas
