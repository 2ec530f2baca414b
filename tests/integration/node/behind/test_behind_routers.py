"""Rented boxes as they are: behind routers that translate addresses, map ports or let nobody in, on thin links, with
IPv6 alone, and with addresses that change. Real nodes, in network namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from p2pserve.sims.wan import namespaces

from ..engine.figures import ATTEMPTS
from .nodes import Nodes, open_nodes
from .routers import Box, Internet

pytestmark = [pytest.mark.beside, pytest.mark.slow, pytest.mark.timeout(500)]

PUBLIC, OTHER = "11.0.0.1", "11.0.0.2"
FOUND_OUT = 20  # requests, in which links find out what a path carries
ROUTER, FARTHER = "12.0.0.1", "13.0.0.1"


@pytest.fixture(scope="module", autouse=True)
def _has_namespaces() -> None:
    reason = namespaces.unavailable()
    if reason is not None:
        pytest.skip(reason)


@contextmanager
def world(home: Path, boxes: dict[str, Box]) -> Iterator[Nodes]:
    with ExitStack() as stack:
        internet = stack.enter_context(Internet({"first": Box(PUBLIC), **boxes}))
        nodes = stack.enter_context(open_nodes(internet, home))
        yield nodes


def is_told(nodes: Nodes, box: str) -> bool:
    """Whether its owner knows that nobody can dial it."""
    return "others cannot dial this node" in nodes.said(box)


def serve_together(nodes: Nodes, attempts: int = ATTEMPTS) -> None:
    """A client's request is prefilled on one box and decoded on the other, and its KV comes in time; on a busy machine
    not always at the first time. The prompt is short: this process carries all packets, some MB/s of them, and where KV
    takes seconds a box rightly computes it instead."""

    def is_planned() -> bool:
        plan = nodes.ask("first", "status").get("plan")
        return plan is not None and len(plan["replicas"]) == 2

    nodes.until(is_planned)
    found = []
    for number in range(attempts):
        answer = nodes.ask("first", "generate", f"{number} word " * 20, "--max-tokens", "20")
        assert len(answer["tokens"]) == 20
        found.append(answer["figures"])
        if found[-1]["transfer"] is not None and not found[-1]["recovered"]:
            assert found[-1]["prefill_node"] != found[-1]["decode_node"]
            return
    raise AssertionError(found)


def test_boxes_behind_routers_that_map_no_port_serve_together(tmp_path: Path) -> None:
    boxes = {"inner": Box("10.0.0.2", ROUTER), "other": Box("10.0.0.2", FARTHER)}
    with world(tmp_path, boxes) as nodes:
        nodes.bootstrap("first")
        nodes.join("inner", "--phase", "prefill")
        nodes.join("other", "--phase", "decode")
        for box, outside in (("inner", ROUTER), ("other", FARTHER)):
            nodes.until(partial(is_told, nodes, box))
            line = next(line for line in nodes.said(box).splitlines() if "cannot dial" in line)
            assert "10.0.0.2:4002" in line
            assert f"forward TCP port 4002 of {outside} to port 4002 here" in line
        serve_together(nodes)


def test_a_mapped_port_is_found_in_the_providers_variables_and_dialled(tmp_path: Path) -> None:
    environ = {"VAST_TCP_PORT_4002": "41000", "PUBLIC_IPADDR": ROUTER}
    with world(tmp_path, {"inner": Box("10.0.0.2", ROUTER, {41_000: 4002})}) as nodes:
        nodes.bootstrap("first")
        greeting = nodes.join("inner", environ=environ)
        assert greeting["address"] == f"{ROUTER}:41000"
        nodes.until(lambda: nodes.addresses("first").get(greeting["peer"]) == f"{ROUTER}:41000")
        assert "cannot dial" not in nodes.said("inner")


def examine(nodes: Nodes, environ: dict[str, str]) -> dict[str, dict[str, str]]:
    """What `doctor` finds on a box that has not joined."""
    found = nodes.ask("inner", "doctor", "--port", "4003", environ=environ)
    return {each["check"]: each for each in found["checks"]}


def test_doctor_has_members_dial_a_box_before_it_joins(tmp_path: Path) -> None:
    mapped = {"VAST_TCP_PORT_4003": "41001", "PUBLIC_IPADDR": ROUTER}
    with world(tmp_path, {"inner": Box("10.0.0.2", ROUTER, {41_001: 4003})}) as nodes:
        nodes.bootstrap("first")
        found = examine(nodes, mapped)
        assert {found[name]["fitness"] for name in ("announce", "reach", "nat")} == {"ok"}
        assert f"come from {ROUTER}; its port is mapped" in found["nat"]["found"]
        assert "Mb/s back" in found["bandwidth"]["found"]
        assert found["packets"]["fitness"] == "ok"
        found = examine(nodes, mapped | {"VAST_TCP_PORT_4003": "41009"})
        assert {found[name]["fitness"] for name in ("reach", "nat")} == {"warning"}
        assert f"nobody reaches port 4003 at {ROUTER}:41009" in found["reach"]["found"]
        assert "-p 4003:4003" in found["reach"]["fix"]


def test_the_variables_may_lie_and_the_owner_is_told_which(tmp_path: Path) -> None:
    environ = {"VAST_TCP_PORT_4002": "41000", "PUBLIC_IPADDR": ROUTER}
    with world(tmp_path, {"inner": Box("10.0.0.2", ROUTER)}) as nodes:
        nodes.bootstrap("first")
        nodes.join("inner", environ=environ)
        nodes.until(lambda: "others cannot dial this node" in nodes.said("inner"))
        assert "VAST_TCP_PORT_4002=41000" in nodes.said("inner")


def test_a_machine_whose_router_passes_everything_on_announces_what_others_see(tmp_path: Path) -> None:
    with world(tmp_path, {"inner": Box("10.0.0.2", ROUTER, {4002: 4002})}) as nodes:
        nodes.bootstrap("first")
        peer = nodes.join("inner")["peer"]
        nodes.until(lambda: nodes.addresses("first").get(peer) == f"{ROUTER}:4002")
        assert f"others reach this node at {ROUTER}:4002" in nodes.said("inner")


def test_routes_that_work_one_way_alone(tmp_path: Path) -> None:
    """The two cannot open connections to each other in one direction: each still works with the other."""
    boxes = {"inner": Box(OTHER, is_walled=True), "other": Box("11.0.0.3")}
    with world(tmp_path, boxes) as nodes:
        nodes.bootstrap("first")
        nodes.join("inner", "--phase", "decode")
        nodes.join("other", "--phase", "prefill")
        nodes.until(lambda: "open TCP port 4002 in the firewall" in nodes.said("inner"))
        serve_together(nodes)


def test_a_link_of_1280_bytes(tmp_path: Path) -> None:
    boxes = {"inner": Box(OTHER, mtu=1280), "other": Box("11.0.0.3")}
    with world(tmp_path, boxes) as nodes:
        nodes.bootstrap("first")
        nodes.join("inner", "--phase", "decode")
        nodes.join("other", "--phase", "prefill")
        serve_together(nodes)


def test_a_path_that_loses_large_packets_and_says_nothing(tmp_path: Path) -> None:
    """Its smallest link is in the middle, and what its router says of that is filtered: a box would send packets of
    1,500 bytes again and again."""
    boxes = {"inner": Box(OTHER, carries=1280), "other": Box("11.0.0.3")}
    with world(tmp_path, boxes) as nodes:
        nodes.bootstrap("first")
        nodes.join("inner", "--phase", "decode")
        nodes.join("other", "--phase", "prefill")
        serve_together(nodes, attempts=FOUND_OUT)
        found = examine(nodes, {})
        assert found["packets"]["fitness"] == "warning"
        assert "no router says so" in found["packets"]["found"]
        assert "Mb/s back" in found["bandwidth"]["found"]


def test_boxes_that_have_ipv6_alone(tmp_path: Path) -> None:
    addresses = {name: f"2a01:4f8::{number}" for number, name in enumerate(("first", "inner", "other"), 1)}
    with world(tmp_path, {name: Box(address) for name, address in addresses.items()}) as nodes:
        nodes.bootstrap("first", "--listen", "[::]:4001")
        for box, phase in (("inner", "prefill"), ("other", "decode")):
            greeting = nodes.join(box, "--listen", "[::]:4002", "--phase", phase)
            assert greeting["address"] == f"[{addresses[box]}]:4002"
        serve_together(nodes)


def test_a_box_whose_address_changes_is_found_at_the_new_one(tmp_path: Path) -> None:
    with world(tmp_path, {"inner": Box(OTHER)}) as nodes:
        nodes.bootstrap("first")
        peer = nodes.join("inner")["peer"]
        nodes.until(lambda: nodes.addresses("first").get(peer) == f"{OTHER}:4002")
        nodes.internet.move("inner", "11.0.0.9")
        nodes.until(lambda: nodes.addresses("first").get(peer) == "11.0.0.9:4002")
        nodes.until(lambda: is_alive(nodes, peer))
        assert "this box is at 11.0.0.9:4002 now" in nodes.said("inner")


def is_alive(nodes: Nodes, peer: str) -> bool:
    return any(node["peer"] == peer and node["state"] == "alive" for node in nodes.ask("first", "status")["nodes"])
