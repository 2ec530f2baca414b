"""Which gateway is asked, and what is known of boxes that would serve and are dead."""

from dataclasses import replace
from typing import Any

import msgspec
import trio

from p2pserve.bootstrap import Address, PeerId, Role
from p2pserve.bootstrap.members.states import Member, MemberState
from p2pserve.bootstrap.trust.orders import Orders
from p2pserve.coordinator.services.catalogue import CatalogueEntry, ServiceCatalogue, write_catalogue
from p2pserve.node.adverts import CATALOGUE
from p2pserve.node.requests.gateway_choice import GatewayFinder

from ..planning.test_coordination import advert


class Members:
    """As much of a network as is looked at: who is in it."""

    def __init__(self, *found: Member) -> None:
        self._found = found

    def members(self) -> tuple[Member, ...]:
        return self._found


def member(peer: str, state: MemberState, gone_s: float | None = None, role: Role = Role.WORKER) -> Member:
    return Member(
        peer_id=PeerId(peer), role=role, state=state, address=Address("192.0.2.1", 4001), incarnation=1, gone_s=gone_s
    )


def test_dead_boxes_are_named_with_their_age_and_nobody_else() -> None:
    network: Any = Members(
        member("12D3first1", MemberState.DEAD, 130.0),
        member("12D3second", MemberState.ALIVE),
        member("12D3boot01", MemberState.LEFT, 10.0),
        member("12D3client", MemberState.DEAD, 10.0, Role.CLIENT),
        member("12D3unsure", MemberState.DEAD),
    )
    assert GatewayFinder(network).describe_dead() == "solar-deer is dead since 2 min"
    nobody: Any = Members()
    assert GatewayFinder(nobody).describe_dead() == ""


# -- the catalogue --------------------------------------------------------------------------------------------------


class Boxes(Members):
    """A network of boxes with an engine, whose owner has published this catalogue."""

    coordinator = None

    def __init__(self, catalogue: ServiceCatalogue, **services: str) -> None:
        super().__init__(*(member(peer, MemberState.ALIVE) for peer in services))
        self.services = services
        self.orders = Orders(1, documents={CATALOGUE: write_catalogue(catalogue)})

    def entries(self, kind: str) -> dict[PeerId, bytes]:
        return {PeerId(peer): msgspec.msgpack.encode(advert(each)) for peer, each in self.services.items()}


def finder(catalogue: ServiceCatalogue, **services: str) -> GatewayFinder:
    network: Any = Boxes(catalogue, **services)
    return GatewayFinder(network)


LISTED = ServiceCatalogue(
    version=1, entries=(CatalogueEntry(name="chat", model="tiny"), CatalogueEntry(name="code", model="a/b"))
)


def test_a_request_finds_boxes_by_the_name_that_the_catalogue_has() -> None:
    found = finder(LISTED, one="s-1", two="s-2")
    assert [found.rank(name) for name in ("chat", "tiny", "s-2", "code", "prose")] == [
        ["one", "two"], ["one", "two"], ["two"], [], [],
    ]  # fmt: skip
    assert [found.model_of(name) for name in ("chat", "s-2", None)] == ["tiny", "s-2", None]


# -- which is asked -------------------------------------------------------------------------------------------------


class Near(Boxes):
    """Boxes at these round trips, in milliseconds."""

    def __init__(self, round_trips: dict[str, float], **services: str) -> None:
        super().__init__(LISTED, **services)
        self.round_trips = round_trips

    def members(self) -> tuple[Member, ...]:
        return tuple(
            replace(each, rtt_s=self.round_trips[each.peer_id] / 1e3)
            for each in super().members()
            if each.peer_id in self.round_trips
        )


def pick(found: GatewayFinder, service: str, *lost: str) -> str:
    return str(trio.run(found.pick, [peer for peer in found.rank(service) if peer not in lost], service))


def test_of_gateways_about_as_near_the_one_that_was_asked_last_is_asked_again() -> None:
    network: Any = Near({"one": 2.0, "two": 3.0, "other": 1.0}, one="s-1", two="s-1", other="s-2")
    found = GatewayFinder(network)
    assert (pick(found, "s-1"), pick(found, "s-2")) == ("one", "other")
    network.round_trips = {"one": 3.0, "two": 2.0, "other": 1.0}
    assert (found.rank("s-1")[0], pick(found, "s-1")) == ("two", "one")
    network.round_trips["one"] = 13.0  # by more than round trips vary
    assert pick(found, "s-1") == "two"
    network.round_trips["one"] = 1.0
    assert pick(found, "s-1") == "two"
    network.round_trips = {"one": 180.0, "two": 200.0, "other": 1.0}
    assert pick(found, "s-1") == "two"
    network.round_trips["one"] = 140.0
    assert pick(found, "s-1") == "one"


def test_a_request_that_goes_elsewhere_leaves_the_gateway_of_the_others_as_it_is() -> None:
    network: Any = Near({"one": 2.0, "two": 3.0}, one="s-1", two="s-1")
    found = GatewayFinder(network)
    assert [pick(found, "s-1"), pick(found, "s-1", "one"), pick(found, "s-1")] == ["one", "two", "one"]
    del network.round_trips["one"]
    assert pick(found, "s-1") == "two"
    network.round_trips["one"] = 2.0
    assert pick(found, "s-1") == "two"


def test_an_entry_that_no_box_has_is_waited_for_also_before_anything_else_was_asked() -> None:
    found = finder(LISTED, one="s-1")
    assert [found.is_awaited(name) for name in ("code", "a/b", "chat", "prose", None)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_boxes_of_a_model_that_was_removed_are_no_gateways() -> None:
    by_id = finder(ServiceCatalogue(version=1, removed=("s-1",)), one="s-1", two="s-2")
    assert (by_id.rank("tiny"), by_id.rank(None)) == (["two"], ["two"])
    by_name = finder(ServiceCatalogue(version=1, removed=("tiny",)), one="s-1", two="s-2")
    assert (by_name.rank("tiny"), by_name.rank(None), by_name.candidates()) == ([], [], [])
