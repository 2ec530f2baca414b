"""Several services in one network: whose plan is made when, what is published of them, and what a node makes of it."""

import msgspec

from p2pserve.bootstrap import PeerId
from p2pserve.bootstrap.trust.entries import MAX_PAYLOAD
from p2pserve.coordinator import Plan
from p2pserve.coordinator.bounds import MAX_SERVICES
from p2pserve.node.messages import PLAN
from p2pserve.node.planning.manifest import PlanBook, describe_plan, read_bundle, read_bundle_number
from p2pserve.node.planning.messages import INLINE_PLAN_BYTES, PLAN_BUNDLE, PlanBundle
from p2pserve.node.planning.plan_intake import PlanIntake
from p2pserve.node.planning.services import Coordinator, choose_services
from p2pserve.node.settings import WAN
from p2pserve.node.view import NetworkView

from .test_coordination import OWN, advert, settled, view_of
from .test_plan_intake import KNOWN, LARGE, LEADER, TERM, plan
from .test_plan_intake import OWN as HERE
from .test_plan_intake import advert as box


def of(service: str, version: int, **more: object) -> Plan:
    return msgspec.structs.replace(plan(version=version), service=service, **more)


def told(book: PlanBook, *plans: Plan) -> list[dict[str, object]]:
    services = sorted({each.service for each in plans})
    return [dict(book.add(describe_plan(each)[0], services)) for each in plans]


def encoded(said: object) -> bytes:
    return msgspec.msgpack.encode(said)


# -- planning -------------------------------------------------------------------------------------------------


def test_those_that_run_are_planned_for_first_and_then_those_of_most_boxes_and_not_more_than_so_many() -> None:
    view = view_of("x", "y", "y", "z", "z", "z")
    assert choose_services(view) == ("z", "y", "x")
    view.plans["x"] = of("x", 1)
    assert choose_services(view, limit=2) == ("x", "z")
    invented = view_of(*(f"invented-{number}" for number in range(100)), "real")
    invented.plans["real"] = of("real", 1)
    assert len(choose_services(invented)) == MAX_SERVICES
    assert choose_services(invented)[0] == "real"


def test_a_hundred_invented_services_get_a_bounded_number_of_plans_and_then_there_is_nothing_to_do() -> None:
    coordinator, view = Coordinator(OWN, "raw"), view_of(*(f"invented-{number}" for number in range(100)))
    planned = []
    while (task := coordinator.next(view, (OWN, 1), 0.0)) is not None:
        made = coordinator.settle(task, task.run(lambda: True), view, (OWN, 1), 0.0)
        assert made is not None
        view.consider_plan(made)
        planned.append(made.service)
    assert len(set(planned)) == len(planned) == len(view.plans) == MAX_SERVICES


def follow(coordinator: Coordinator, view: NetworkView, epoch: int = 1) -> Plan:
    made = settled(coordinator, view, epoch)
    assert view.consider_plan(made)
    return made


def test_no_number_is_given_to_plans_of_two_services() -> None:
    coordinator, view = Coordinator(OWN, "raw"), view_of("x", "y", "y")
    numbers = [follow(coordinator, view).number for _ in range(2)]
    view.adverts[PeerId("n")] = advert("x")
    numbers.append(follow(coordinator, view).number)
    assert numbers == [(1, 1), (1, 2), (1, 3)]
    assert {service: each.number for service, each in view.plans.items()} == {"y": (1, 1), "x": (1, 3)}


def test_a_box_that_is_lost_from_one_service_ends_the_search_for_another_and_is_planned_without_next() -> None:
    coordinator, view = Coordinator(OWN, "raw"), view_of("x", "x", "y", "y")
    for _ in range(2):
        follow(coordinator, view)
    view.adverts[PeerId("n")] = advert("x")
    task = coordinator.next(view, (OWN, 1), 1.0)
    assert task is not None
    assert task.service == "x"
    assert not coordinator.is_outdated(task, view, (OWN, 1), 1.5)
    del view.adverts[PeerId("d")]
    assert coordinator.is_outdated(task, view, (OWN, 1), 1.5)
    made = coordinator.settle(task, task.run(lambda: True), view, (OWN, 1), 1.6)
    assert made is not None
    view.consider_plan(made)
    urgent = coordinator.next(view, (OWN, 1), 1.7)
    assert urgent is not None
    assert (urgent.service, urgent.is_urgent, [each.peer for each in urgent.boxes]) == ("y", True, ["c"])


def test_the_plan_of_a_service_is_made_with_the_links_of_its_boxes_alone() -> None:
    coordinator, view = Coordinator(OWN, "raw"), view_of("x", "x", "y", "y")
    task = coordinator.next(view, (OWN, 1), 0.0)
    assert task is not None
    named = {box.peer for box in task.boxes}
    assert len(named) == 2
    assert {link.source for link in task.links} <= named


# -- what is published ----------------------------------------------------------------------------------------


def test_of_one_service_a_coordinator_says_what_earlier_releases_said() -> None:
    one, two = of("x", 1), of("x", 2)
    assert told(PlanBook(), one, two) == [{PLAN: describe_plan(each)[0]} for each in (one, two)]


def test_one_plan_is_told_to_every_release_and_the_others_beside_it() -> None:
    x, y, later, newer = of("x", 1), of("y", 2), of("y", 3), of("x", 4)
    manifests = [describe_plan(each)[0] for each in (x, y, later, newer)]
    assert told(PlanBook(), x, y, later, newer) == [
        {PLAN: manifests[0]},
        {PLAN_BUNDLE: PlanBundle(epoch=3, serial=1, manifests=(manifests[1],))},
        {PLAN_BUNDLE: PlanBundle(epoch=3, serial=2, manifests=(manifests[2],))},
        {PLAN: manifests[3]},
    ]


def test_no_two_bundles_have_one_number_and_the_numbers_go_up() -> None:
    book, numbers = PlanBook(), list[tuple[int, int]]()
    for version in range(1, 40):
        said = book.add(describe_plan(of("xyz"[version % 3], version))[0], ["x", "y", "z"][: 1 + version % 3])
        if PLAN_BUNDLE in said:
            number = read_bundle_number(encoded(said[PLAN_BUNDLE]))
            assert number is not None
            numbers.append(number)
    assert len(numbers) > 10
    assert numbers == sorted(set(numbers))


def test_what_of_a_bundle_has_no_room_in_one_entry_is_fetched() -> None:
    long = tuple("x" * 200 for _ in range(100))
    plans = [of(f"service-{number}", number + 1, why=long) for number in range(MAX_SERVICES)]
    bundle = told(PlanBook(), *plans)[-1][PLAN_BUNDLE]
    assert isinstance(bundle, PlanBundle)
    assert len(bundle.manifests) == MAX_SERVICES - 1
    inline = sum(len(each.plan) for each in bundle.manifests)
    assert 0 < inline <= INLINE_PLAN_BYTES
    assert any(not each.plan for each in bundle.manifests)


def test_services_with_names_that_fill_an_entry_do_not_keep_others_out_of_it() -> None:
    long = ["\U0001f999" * 500 + str(number) for number in range(MAX_SERVICES - 2)]
    ranked, book = ["first", "honest", *long], PlanBook()
    made = [of(service, version, why=tuple("x" * 100 for _ in range(20))) for version, service in enumerate(ranked, 1)]
    said = [book.add(describe_plan(each)[0], ranked) for each in made]
    bundle = said[-1][PLAN_BUNDLE]
    assert isinstance(bundle, PlanBundle)
    assert "honest" in {each.service for each in bundle.manifests}
    assert len(encoded(bundle)) < MAX_PAYLOAD


# -- what a node makes of it ----------------------------------------------------------------------------------


def bundle_of(*plans: Plan, serial: int = 1) -> bytes:
    return encoded(PlanBundle(epoch=3, serial=serial, manifests=tuple(describe_plan(each)[0] for each in plans)))


def see(intake: PlanIntake, alone: Plan | None, *others: Plan, now: float = 0.0, serial: int = 1) -> None:
    entry = encoded(describe_plan(alone)[0]) if alone is not None else b""
    intake.see(TERM, entry, now, bundle_of(*others, serial=serial) if others else b"")


def test_a_node_follows_one_plan_for_each_service() -> None:
    intake, view = PlanIntake(HERE, WAN), NetworkView()
    see(intake, of("x", 1), of("y", 2), of("z", 3))
    for each, author in intake.plans:
        assert view.consider_plan(each, author)
    assert {service: each.number for service, each in view.plans.items()} == {"x": (3, 1), "y": (3, 2), "z": (3, 3)}
    assert set(view.plan_authors.values()) == {LEADER}


def test_a_coordinator_of_the_last_release_says_one_plan_and_that_is_followed() -> None:
    intake = PlanIntake(HERE, WAN)
    see(intake, of("x", 1))
    assert [each.service for each, _ in intake.plans] == ["x"]
    assert intake.wanted is None


def test_where_two_entries_tell_of_one_service_the_later_plan_counts() -> None:
    for alone, beside in ((1, 4), (4, 1)):
        intake = PlanIntake(HERE, WAN)
        see(intake, of("x", alone), of("x", beside))
        assert [each.number for each, _ in intake.plans] == [(3, 4)]


def test_bytes_of_the_own_service_are_fetched_first_and_all_are() -> None:
    intake = PlanIntake(HERE, WAN)
    intake.first = "y"
    large = [of(service, version, why=LARGE) for version, service in enumerate("xyz", 1)]
    see(intake, large[0], *large[1:])
    fetched = []
    while (manifest := intake.wanted) is not None:
        fetched.append(manifest.service)
        intake.on_bytes(manifest, encoded(next(each for each in large if each.service == manifest.service)))
    assert fetched[0] == "y"
    assert sorted(fetched) == ["x", "y", "z"]
    assert len(intake.plans) == 3


def test_another_plan_of_another_service_gives_no_more_time_for_missing_bytes() -> None:
    intake = PlanIntake(HERE, WAN)
    see(intake, of("x", 1, why=LARGE), of("y", 2))
    see(intake, of("x", 1, why=LARGE), of("y", 3), now=WAN.plan_missing_s - 1, serial=2)
    assert intake.find_objection(box(), KNOWN, WAN.plan_missing_s - 0.5) == ""
    assert intake.find_objection(box(), KNOWN, WAN.plan_missing_s) == "nobody has its bytes"


def test_a_bundle_that_is_none_or_has_too_many_services_is_objected_to() -> None:
    manifest = describe_plan(of("x", 1))[0]
    many = {"epoch": 3, "serial": 1, "manifests": [msgspec.to_builtins(manifest)] * (MAX_SERVICES + 1)}
    for bundle in (b"\xc1", msgspec.msgpack.encode(many)):
        assert read_bundle(bundle) is None
        intake = PlanIntake(HERE, WAN)
        intake.see(TERM, encoded(manifest), 0.0, bundle)
        assert intake.find_objection(box(), KNOWN, 0.0) == "it is malformed"
        assert len(intake.plans) == 1


def test_a_plan_of_another_service_that_wants_this_box_is_objected_to() -> None:
    intake = PlanIntake(HERE, WAN)
    see(intake, of("tiny", 1), of("y", 2))
    assert intake.find_objection(box(), KNOWN, 0.0) == ""
    assert "it is to serve y, which it does not have" in intake.find_objection(box(), KNOWN, WAN.plan_stale_s)


def test_a_node_keeps_so_many_plans_and_that_of_a_service_nobody_offers_gives_way() -> None:
    view = view_of("offered")
    for number in range(MAX_SERVICES):
        assert view.consider_plan(of(f"s{number}", number + 1))
    assert view.consider_plan(of("offered", 50))
    assert len(view.plans) == MAX_SERVICES
    assert "s0" not in view.plans
    all_offered = view_of(*view.plans)
    all_offered.plans = dict(view.plans)
    assert not all_offered.consider_plan(of("one more", 60))
    assert len(all_offered.plans) == MAX_SERVICES
