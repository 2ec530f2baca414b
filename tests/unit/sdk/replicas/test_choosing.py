"""Among how many nodes a box is divided where its owner leaves it open."""

from __future__ import annotations

from typing import Any

import pytest

from p2pserve.coordinator.costs.gpus import GpuError, Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.node.box.errors import NodeError
from p2pserve.node.box.hardware import Gpu
from p2pserve.node.models import ModelError
from p2pserve.sdk.replicas.choosing import FittingCut, choose_among, choose_replicas, find_card

from ..commands.parsing import parse

A40 = gpu_table().find("A40-48GB")
SMALL = model_shape("llama-7b")


def gpu(name: str, memory_gib: float) -> Gpu:
    return Gpu(name=name, memory_gib=memory_gib, uuid="GPU-x")


def options(*given: str) -> dict[str, Any]:
    return vars(parse(["join", "--bootstrap", "p2p_worker_x", *given]))


def cuts(*replicas: int, gpus: int = 8, longest: int = 32768) -> list[FittingCut]:
    return [FittingCut(each, gpus // each, longest) for each in replicas]


def test_many_cards_for_a_small_model_are_several_nodes() -> None:
    found = choose_among(A40, 8, SMALL, cuts(1, 2, 4, 8))
    assert 1 < found.replicas <= 8
    assert found.why.startswith(f"replicas: {found.replicas} of {8 // found.replicas} x A40-48GB, expected to answer ")
    assert "(1: " in found.why


def test_the_network_may_choose_later_among_cuts_that_take_the_longest_requests() -> None:
    found = choose_among(A40, 8, SMALL, [*cuts(1, 2), *cuts(4, 8, longest=4096)])
    assert [(offer.replicas, offer.tp, offer.longest) for offer in found.offers] == [(1, 8, 32768), (2, 4, 32768)]
    assert choose_among(A40, 8, SMALL, []).offers == ()


def test_a_cut_in_which_only_shorter_requests_fit_is_left_out() -> None:
    found = choose_among(A40, 8, SMALL, [*cuts(1), *cuts(2, 4, 8, longest=4096)])
    assert found.replicas == 1
    assert "2, 4, 8: no room for requests of 32,768 tokens" in found.why


def test_a_model_that_no_part_holds_stays_whole() -> None:
    assert choose_among(A40, 8, SMALL, []).replicas == 1
    assert choose_among(A40, 8, model_shape("llama2-70b"), cuts(1, 8)).replicas == 1


def test_a_model_too_large_to_have_deadlines_takes_the_fewest_that_hold_it() -> None:
    found = choose_among(gpu_table().find("B200"), 16, model_shape("bloom-176b"), cuts(1, 2, gpus=16))
    assert found.replicas >= 1
    assert found.why.startswith(f"replicas: {found.replicas}")


def test_the_card_counts_with_the_memory_that_it_has_here() -> None:
    found = find_card([gpu("A40-48GB", 45.0), gpu("A40-48GB", 44.0)], Specs.DENSE)
    assert found.memory_gib == 44.0


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ([gpu("A40-48GB", 45.0), gpu("L4-24GB", 22.0)], "several kinds"),
        ([gpu("Imagined 9000", 45.0)], "not in the table"),
    ],
)
def test_cards_of_which_nothing_is_known_are_not_guessed_at(gpus: list[Gpu], why: str) -> None:
    with pytest.raises(GpuError, match=why):
        find_card(gpus, Specs.DENSE)


def test_a_box_of_modelled_gpus_is_looked_at_in_all_its_cuts() -> None:
    found = choose_replicas(options("--emulate", "4xA40", "--model", "llama-7b"))
    assert found.replicas in (2, 4)
    assert choose_replicas(options("--emulate", "1xA40", "--model", "llama-7b")).why.endswith("this box has one GPU")


def test_what_the_whole_box_cannot_serve_is_refused_as_by_a_single_node() -> None:
    with pytest.raises(NodeError, match="have no room for KV beside the 138 GB of llama2-70b"):
        choose_replicas(options("--emulate", "2xL4", "--model", "llama2-70b"))
    with pytest.raises(ModelError, match="is not known"):
        choose_replicas(options("--emulate", "2xL4", "--model", "nonesuch"))
