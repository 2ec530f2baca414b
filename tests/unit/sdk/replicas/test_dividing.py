"""Which GPUs, ports and options each of several nodes of a box gets, and what is refused before any has started."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2pserve.bootstrap import Address, Role
from p2pserve.bootstrap.errors import AddressError
from p2pserve.bootstrap.trust.tokens import Grant
from p2pserve.coordinator.costs.gpus import GpuError
from p2pserve.coordinator.regrouping.divisions import CutOffer
from p2pserve.node.box.hardware import VISIBLE
from p2pserve.sdk.errors import UsageError
from p2pserve.sdk.replicas.dividing import (
    check_places,
    choose_offers,
    describe_unmapped,
    divide_box,
    list_cuts,
    share_box,
)

from ..commands.parsing import parse

GPUS = ("0", "1", "2", "3")


def options(*given: str) -> dict[str, Any]:
    """What `join` is given, with the defaults of its other options."""
    arguments: SimpleNamespace = parse(["join", "--bootstrap", "p2p_worker_x", *given])
    return vars(arguments)


def test_each_node_has_its_gpus_and_a_folder_of_its_own() -> None:
    parts = divide_box(options(), 2, GPUS)
    assert [part.folder for part in parts] == ["node", "node-2"]
    assert [part.variables for part in parts] == [{VISIBLE: "0,1"}, {VISIBLE: "2,3"}]


def test_gpus_keep_the_names_and_the_order_that_the_owner_gave_them() -> None:
    parts = divide_box(options(), 2, ("3", "MIG-b"))
    assert [part.variables[VISIBLE] for part in parts] == ["3", "MIG-b"]


def test_modelled_gpus_are_divided_and_the_box_keeps_its_own() -> None:
    parts = divide_box(options("--emulate", "4xA40"), 4, ())
    assert [part.options["emulate"] for part in parts] == ["1xA40-48GB"] * 4
    assert all(not part.variables for part in parts)


@pytest.mark.parametrize(
    ("given", "ports"),
    [
        ((), [4002, 4003]),
        (("--port", "7000"), [7000, 7001]),
        (("--listen", "127.0.0.1:0"), [0, 0]),
        (("--port", "65534"), [65534, 65535]),
    ],
)
def test_ports_follow_each_other(given: tuple[str, ...], ports: list[int]) -> None:
    parts = divide_box(options(*given), 2, GPUS)
    assert [part.listen.port for part in parts] == ports
    assert [part.options["listen"] for part in parts] == [str(part.listen) for part in parts]
    assert all(part.options["port"] is None for part in parts)


def test_announced_ports_follow_each_other_too() -> None:
    parts = divide_box(options("--announce", "203.0.113.7:41000"), 2, GPUS)
    assert [part.options["announce"] for part in parts] == ["203.0.113.7:41000", "203.0.113.7:41001"]


def test_one_node_serves_http() -> None:
    parts = divide_box(options("--http", "0.0.0.0:8000"), 2, GPUS)
    assert ["http" in part.options for part in parts] == [False, True]
    assert parts[1].options["http"] is None


def test_what_the_whole_box_has_is_divided_and_what_an_engine_is_told_is_not() -> None:
    given = ("--usd-per-hour", "1.2", "--relay-gbps", "0.5", "--memory-gib", "64", "--kv-cache-mib", "512")
    for part in divide_box(options(*given), 2, GPUS):
        assert (part.options["usd_per_hour"], part.options["relay_gbps"], part.options["memory_gib"]) == (0.6, 0.25, 32)
        assert "up_gbps" not in part.options  # nothing is said of it
        assert "kv_cache_mib" not in part.options


@pytest.mark.parametrize(
    ("given", "replicas", "gpus", "why"),
    [
        ((), 3, GPUS, "replicas: 3 nodes cannot share 4 GPUs evenly; take 1, 2 or 4"),
        ((), 2, ("0",), "replicas: 2 nodes cannot share 1 GPU evenly; take 1"),
        ((), 8, GPUS, "take 1, 2 or 4"),
        ((), 2, (), "replicas: this box has no GPUs to divide"),
        (("--tp", "4"), 2, GPUS, "tp: 4 GPUs are to share each layer, and each of 2 nodes has 2"),
        (("--port", "65535"), 2, GPUS, "listen: 2 nodes need the ports 65535 to 65536, and the last is 65535"),
        (("--announce", "203.0.113.7:65535"), 2, GPUS, "announce: 2 nodes need"),
        (("--engine-channel", "3"), 2, GPUS, "leave --engine-channel out"),
    ],
)
def test_what_cannot_be_divided_is_refused(given: tuple[str, ...], replicas: int, gpus: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        divide_box(options(*given), replicas, gpus)


def test_addresses_and_cards_that_are_none_are_refused() -> None:
    with pytest.raises(AddressError):
        divide_box(options("--listen", "nowhere"), 2, GPUS)
    with pytest.raises(GpuError, match="is not in the table"):
        divide_box(options("--emulate", "2xNone"), 2, ())


def test_cuts_are_the_divisors() -> None:
    assert [list_cuts(gpus) for gpus in (0, 1, 6, 8)] == [(), (1,), (1, 2, 3, 6), (1, 2, 4, 8)]


def test_a_token_for_fewer_boxes_than_nodes_is_refused() -> None:
    grant = Grant("0123456789abcdef", Role.WORKER, False, 2, 2_000_000_000)
    check_places(grant, 2)
    with pytest.raises(UsageError, match=r"has 2 for 3 nodes; .* \(p2pserve token create --uses 3\)"):
        check_places(grant, 3)


def test_ports_that_the_provider_does_not_map_are_named() -> None:
    parts = divide_box(options("--port", "4001"), 2, GPUS)
    said = describe_unmapped(parts, (22, 4001))
    assert said is not None
    assert "nobody can dial node-2;" in said
    assert "(-p 4001:4001 -p 4002:4002)" in said


@pytest.mark.parametrize(
    ("given", "mapped"),
    [
        (("--port", "4001"), ()),  # nothing is known of a mapping
        (("--port", "4001"), (4001, 4002)),
        (("--port", "4001", "--announce", "203.0.113.7:41000"), (4001,)),  # the owner says what leads there
        (("--port", "0"), (4001,)),
    ],
)
def test_nothing_is_said_of_ports_where_nothing_is_known_to_be_closed(
    given: tuple[str, ...], mapped: tuple[int, ...]
) -> None:
    assert describe_unmapped(divide_box(options(*given), 2, GPUS), mapped) is None


def test_addresses_keep_their_host() -> None:
    parts = divide_box(options("--listen", "[::]:4002"), 2, GPUS)
    assert parts[1].listen == Address("::", 4003)


def offers(*replicas: int) -> tuple[CutOffer, ...]:
    return tuple(CutOffer(replicas=number, tp=4 // number, longest=8192) for number in replicas)


@pytest.mark.parametrize(
    ("given", "mapped", "places", "left"),
    [
        ((), (), 64, (1, 2, 4)),
        ((), (), 2, (1, 2)),  # a place of the join token for each
        ((), (), 1, ()),  # one cut is no choice
        ((), (4002, 4003), 64, (1, 2)),  # nobody could dial the others
        (("--port", "65534"), (), 64, (1, 2)),
        (("--tp", "2"), (), 64, (1, 2)),
    ],
)
def test_the_network_may_choose_cuts_with_ports_and_places_for_all_nodes(
    given: tuple[str, ...], mapped: tuple[int, ...], places: int, left: tuple[int, ...]
) -> None:
    found = choose_offers(options(*given), offers(1, 2, 4), GPUS, mapped, places)
    assert [offer.replicas for offer in found] == list(left)


def test_a_part_with_more_options_keeps_the_others() -> None:
    part = divide_box(options(), 2, GPUS)[1]
    assert part.with_options({"divided": 1}).options == {**part.options, "divided": 1}


def test_models_that_share_a_box_have_its_first_gpu_and_one_kv_memory() -> None:
    """All name the whole of it; what else of the memory they may take is divided."""
    given = options("--kv-cache-mib", "1024", "--usd-per-hour", "3", "--http", "127.0.0.1:0", "--memory-gib", "10")
    parts = share_box(given, ("a", "b", "c"), 2)
    assert [part.options["model"] for part in parts] == ["a", "b", "c"]
    assert {part.options["kv_cache_mib"] for part in parts} == {1024}
    assert {part.options["memory_gib"] for part in parts} == {4.0}
    assert {part.options["tp"] for part in parts} == {1}
    assert [part.listen.port for part in parts] == [4002, 4003, 4004]
    assert [part.options["usd_per_hour"] for part in parts] == [1.0] * 3
    assert ["http" in part.options for part in parts] == [False, True, True]


def test_without_a_gpu_they_share_the_usual_kv_cache() -> None:
    parts = share_box(options(), ("a", "b"), 0)
    assert [part.options["kv_cache_mib"] for part in parts] == [256, 256]


@pytest.mark.parametrize(
    ("given", "models", "why"),
    [
        ((), ("a", "a"), "each is given once"),
        (("--tp", "2"), ("a", "b"), "have one GPU"),
        (("--replicas", "2"), ("a", "b"), "are of one model"),
        ((), ("a", "b"), "how much of the GPU's memory"),
    ],
)
def test_models_that_cannot_share_a_box_are_refused(given: tuple[str, ...], models: tuple[str, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        share_box(options(*given), models, 1)
