"""Names of boxes: alike everywhere, told apart within a network, and typed back."""

import pytest

from p2pserve.coordinator.names import count_of, find_peers, full_name_of, name_of, naming, with_names
from p2pserve.coordinator.names.words import ANIMALS, QUALITIES

PEERS = [f"12D3KooWpeer{number:06}" for number in range(2000)]


def test_no_word_is_there_twice_or_holds_what_parts_names() -> None:
    for words in (QUALITIES, ANIMALS):
        assert len(set(words)) == len(words)
        assert all(word.isalpha() and word.islower() for word in words)


def test_what_a_network_calls_its_boxes_differs_and_means_one_box() -> None:
    name = naming(PEERS)
    names = [name(peer) for peer in PEERS]
    assert len(set(names)) == len(PEERS)
    assert any(each == full_name_of(peer) for each, peer in zip(names, PEERS, strict=True))  # two had the same
    assert all(find_peers(each, PEERS) == [peer] for each, peer in list(zip(names, PEERS, strict=True))[::100])


def test_ids_ends_of_ids_and_any_case_are_understood() -> None:
    peer = PEERS[7]
    for given in (peer, "..000007", "000007", full_name_of(peer), name_of(peer).upper()):
        assert find_peers(given, PEERS[:20]) == [peer]
    assert find_peers("", PEERS) == find_peers("..", PEERS) == find_peers("no-box", PEERS) == []
    assert find_peers(f"{name_of(peer)}-", PEERS[:20]) == []


def test_ids_in_a_text_become_names() -> None:
    assert with_names(f"{PEERS[0]} decodes", PEERS[:2]) == f"{name_of(PEERS[0])} decodes"


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [(1, "box", "1 box"), (0, "box", "0 boxes"), (2, "GPU", "2 GPUs"), (1, "replica", "1 replica")],
)
def test_one_thing_is_not_said_as_many(number: int, noun: str, said: str) -> None:
    assert count_of(number, noun) == said
