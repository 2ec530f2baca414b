"""What nodes and clients make of the catalogue: which requests they take, for whom they look, and what is planned."""

import msgspec
import pytest

from p2pserve.bootstrap import PeerId, RemoteError
from p2pserve.coordinator import Demand
from p2pserve.coordinator.services.catalogue import EMPTY, CatalogueEntry, ServiceCatalogue, write_catalogue
from p2pserve.node.adverts import CATALOGUE, AdvertBook
from p2pserve.node.planning.services import Coordinator, choose_services, choose_slo
from p2pserve.node.requests.acceptance import check_arrival, check_listed
from p2pserve.node.settings import DEFAULT_SLO
from p2pserve.node.view import NetworkView

from ..planning.test_coordination import OWN, advert, settled, view_of
from ..requests.test_acceptance import MODEL, ask

CHAT = CatalogueEntry(name="chat", model="tiny", slo="ttft=2", weight=2.0)
LISTED = ServiceCatalogue(version=1, entries=(CHAT,))
REMOVED = ServiceCatalogue(version=2, removed=("tiny",))


def documents(catalogue: ServiceCatalogue) -> dict[str, bytes]:
    return {CATALOGUE: write_catalogue(catalogue), "another": b"\xc1"}


def test_the_latest_catalogue_that_can_be_read_is_followed() -> None:
    book = AdvertBook()
    assert book.update_catalogue(documents(LISTED))
    assert not book.update_catalogue(documents(LISTED))
    assert not book.update_catalogue({CATALOGUE: b"\xc1"})
    assert book.catalogue == LISTED
    assert book.update_catalogue(documents(REMOVED))
    assert book.update_catalogue({})
    assert book.catalogue == EMPTY


def test_a_request_may_call_a_model_as_the_catalogue_does() -> None:
    for service in ("chat", "tiny", "tiny-1234", None):
        check_arrival(ask(service=service), MODEL, LISTED, is_draining=False, is_id_in_use=False)
    with pytest.raises(RemoteError, match="service: chat is not served here"):
        check_arrival(ask(service="chat"), MODEL, EMPTY, is_draining=False, is_id_in_use=False)


def test_a_model_that_was_removed_takes_no_new_request() -> None:
    check_listed(MODEL, LISTED)
    with pytest.raises(RemoteError, match="this network serves tiny no more") as caught:
        check_listed(MODEL, REMOVED)
    assert caught.value.code == "invalid"


def test_what_was_removed_is_planned_for_no_more() -> None:
    view = view_of("x", "y", "y")
    view.catalogue = ServiceCatalogue(version=1, removed=("y",))
    assert choose_services(view) == ("x",)


def named(service: str, name: str) -> NetworkView:
    view = view_of(service, service)
    for peer, each in view.adverts.items():
        model = each.model
        assert model is not None
        model = msgspec.structs.replace(model, shape=msgspec.structs.replace(model.shape, name=name))
        view.adverts[peer] = msgspec.structs.replace(each, model=model)
    return view


def test_a_service_is_planned_with_the_deadlines_of_its_entry_and_at_once_with_others() -> None:
    coordinator, view = Coordinator(OWN, "raw"), named("x", "tiny")
    plan = settled(coordinator, view, 1)
    view.consider_plan(plan)
    assert coordinator.next(view, (OWN, 1), 0.0) is None
    view.catalogue = LISTED
    task = coordinator.next(view, (OWN, 1), 1.0)
    assert task is not None
    assert (task.slo, task.is_urgent) == ("ttft=2", True)
    made = coordinator.settle(task, task.run(lambda: True), view, (OWN, 1), 1.0)
    assert made is not None
    assert made.deadlines.ttft_s == 2.0
    view.consider_plan(made)
    view.catalogue = EMPTY
    again = coordinator.next(view, (OWN, 1), 2.0)
    assert again is not None
    assert again.slo == DEFAULT_SLO


def test_deadlines_that_no_planner_reads_are_left_out() -> None:
    view = named("x", "tiny")
    view.catalogue = ServiceCatalogue(version=1, entries=(msgspec.structs.replace(CHAT, slo="by tomorrow"),))
    assert choose_slo(view, "x") == ""
    assert choose_slo(view, "y") == ""


def test_two_models_of_one_name_are_both_the_entrys() -> None:
    view = named("x", "tiny")
    view.adverts[PeerId("other")] = msgspec.structs.replace(advert("x-2"))
    view.catalogue = LISTED
    assert [choose_slo(view, service) for service in ("x", "x-2")] == ["ttft=2", "ttft=2"]


def test_where_nobody_has_been_asked_yet_the_lengths_are_those_that_the_catalogue_remembers() -> None:
    view = named("x", "tiny")
    assert view.demands("x") == {}
    view.catalogue = ServiceCatalogue(
        version=1, entries=(msgspec.structs.replace(CHAT, prompt_tokens=900, output_tokens=80),)
    )
    (remembered,) = view.demands("x").values()
    assert (remembered.requests_s, remembered.lengths) == (0.0, ((900, 80),))
    assert view.demands("y") == {}
    asked = Demand(requests_s=1.0, arrival_cv=1.0, lengths=((10, 5),))
    view.adverts[OWN] = msgspec.structs.replace(view.adverts[OWN], demand=asked)
    assert view.demands("x") == {OWN: asked}


def test_the_first_plan_of_a_network_that_was_started_anew_is_for_those_lengths() -> None:
    view = named("x", "tiny")
    view.catalogue = ServiceCatalogue(
        version=1, entries=(msgspec.structs.replace(CHAT, prompt_tokens=90, output_tokens=8),)
    )
    plan = settled(Coordinator(OWN, "raw"), view, 1)
    assert any("90 tokens in and 8 out" in reason for reason in plan.why), plan.why
