"""Who dials whom: everybody in a small network, few and far apart in a large one."""

import random

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.bootstrap.members.overlay import choose_neighbours

FULL = 16


def network(size: int, seed: int = 0) -> list[PeerId]:
    rng = random.Random(seed)
    return [PeerId(f"12D3KooW{rng.getrandbits(128):032x}") for _ in range(size)]


def sessions(members: list[PeerId]) -> dict[PeerId, set[PeerId]]:
    """Who is connected with whom when everybody has dialled."""
    graph: dict[PeerId, set[PeerId]] = {peer: set() for peer in members}
    for peer in members:
        for other in choose_neighbours(peer, members, full_mesh=FULL):
            graph[peer].add(other)
            graph[other].add(peer)
    return graph


def hops(graph: dict[PeerId, set[PeerId]], start: PeerId) -> dict[PeerId, int]:
    found, edge = {start: 0}, [start]
    for peer in edge:
        for other in graph[peer] - found.keys():
            found[other] = found[peer] + 1
            edge.append(other)
    return found


@pytest.mark.parametrize("size", [1, 2, 15, 16])
def test_a_small_network_is_a_full_mesh(size: int) -> None:
    members = network(size)
    for peer in members:
        assert choose_neighbours(peer, members, full_mesh=FULL) == set(members) - {peer}
    assert choose_neighbours(PeerId("new"), members[: FULL - 1], full_mesh=FULL) == set(members[: FULL - 1])


@pytest.mark.parametrize(("size", "dialled", "far"), [(17, 6, 2), (30, 7, 3), (200, 10, 4), (1000, 12, 5)])
def test_a_large_one_has_few_sessions_and_short_ways(size: int, dialled: int, far: int) -> None:
    members = network(size)
    graph = sessions(members)
    assert max(len(choose_neighbours(peer, members, full_mesh=FULL)) for peer in members) <= dialled
    for start in members[:5]:
        distances = hops(graph, start)
        assert len(distances) == size
        assert max(distances.values()) <= far


@pytest.mark.parametrize("size", [30, 300])
def test_it_holds_together_when_a_third_of_the_members_die_at_once(size: int) -> None:
    members = network(size)
    graph = sessions(members)
    for seed in range(20):
        living = set(random.Random(seed).sample(members, size * 2 // 3))
        left = {peer: graph[peer] & living for peer in living}
        assert len(hops(left, next(iter(living)))) == len(living)


def test_a_member_that_comes_changes_few_neighbours_of_others() -> None:
    members = network(300)
    before = {peer: choose_neighbours(peer, members, full_mesh=FULL) for peer in members}
    after = {peer: choose_neighbours(peer, [*members, PeerId("new")], full_mesh=FULL) for peer in members}
    assert sum(before[peer] != after[peer] for peer in members) <= 40
