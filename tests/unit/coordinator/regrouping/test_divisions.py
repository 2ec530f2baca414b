"""Whose nodes share a machine, as far as all of them say the same."""

import msgspec
import pytest

from p2pserve.coordinator.bounds import MAX_CUTS
from p2pserve.coordinator.regrouping.divisions import BoxDivision, CutOffer, find_divided

OFFERS = tuple(CutOffer(replicas=number, tp=4 // number, longest=8192) for number in (1, 2, 4))
HEAD = BoxDivision(head="a", nodes=("a", "b"), offers=OFFERS)
OTHER = BoxDivision(head="a")


def test_a_machine_counts_while_all_its_nodes_are_here_and_agree() -> None:
    assert find_divided({"a": HEAD, "b": OTHER, "c": BoxDivision(head="x")}) == {"a": HEAD}
    assert find_divided({"a": HEAD, "b": HEAD}) == {"a": HEAD}  # saying more is no harm
    assert find_divided({}) == {}


@pytest.mark.parametrize(
    "told",
    [
        {"a": HEAD},  # a node is away
        {"a": HEAD, "b": BoxDivision(head="c")},  # it is another machine's
        {"a": msgspec.structs.replace(HEAD, nodes=("b",)), "b": OTHER},  # the head is none of its own nodes
        {"a": msgspec.structs.replace(HEAD, nodes=("a", "b", "b")), "b": OTHER},
        {"a": msgspec.structs.replace(HEAD, offers=()), "b": OTHER},  # its owner has fixed the cut
        {"b": HEAD, "a": OTHER},  # somebody tells in the head's place
    ],
)
def test_who_names_nodes_that_do_not_name_it_divides_nobody(told: dict[str, BoxDivision]) -> None:
    assert find_divided(told) == {}


def test_an_offer_is_found_by_its_number_of_nodes() -> None:
    assert HEAD.offer(2) == OFFERS[1]
    assert HEAD.offer(3) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"head": ""},
        {"head": "a", "nodes": ["a"] * 65},
        {"head": "a", "refused": -1},
        {"head": "a", "offers": [{"replicas": 0, "tp": 1, "longest": 1}]},
        {"head": "a", "offers": [{"replicas": 1, "tp": 1, "longest": 1}] * (MAX_CUTS + 1)},
    ],
)
def test_what_a_node_says_is_bounded(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, BoxDivision)
