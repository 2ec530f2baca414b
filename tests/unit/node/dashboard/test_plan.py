"""What the dashboard shows of a plan whose boxes do not all serve, and of a box that ends."""

from dataclasses import replace

import msgspec
import pytest

from p2pserve.node.dashboard.sections import box, plan

from .networks import network, view_of, with_nodes


def test_a_plan_that_serves_is_shown_with_its_reasons() -> None:
    page = plan(view_of(network(4)))
    assert "<h3>Why</h3>" in page
    assert "Not serving now" not in page


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"engine_state": "failed", "engine_detail": "out of memory"}, "engine failed: out of memory"),
        ({"engine_state": "restarting", "engine_detail": ""}, "engine restarting"),
        ({"state": "draining"}, "draining"),
        ({"state": "dead"}, "dead"),
    ],
)
def test_boxes_of_a_plan_that_do_not_serve_are_named_with_the_reason(changes: dict[str, str], fault: str) -> None:
    page = plan(with_nodes(view_of(network(4)), **changes))
    assert f": {fault}</li>" in page
    assert "<h3>Why, when it was made</h3>" in page


def test_each_service_has_its_plan_on_the_page() -> None:
    view = view_of(network(4))
    assert view.snapshot.plan is not None
    other = msgspec.structs.replace(view.snapshot.plan, service="other-1", version=77)
    page = plan(replace(view, snapshot=msgspec.structs.replace(view.snapshot, other_plans=(other,))))
    for each in (view.snapshot.plan, other):
        assert f"Plan {each.epoch}.{each.version} for {each.service}" in page


@pytest.mark.parametrize(("ends_in_s", "shown"), [(7200.0, "in 2.0\u202fh"), (40.0, "in 40\u202fs"), (None, None)])
def test_a_box_that_ends_says_when(ends_in_s: float | None, shown: str | None) -> None:
    view = with_nodes(view_of(network(4)), ends_in_s=ends_in_s)
    page = box(replace(view, name=view.snapshot.nodes[0].id))
    assert ("<dt>Ends</dt>" in page) is (shown is not None)
    assert shown is None or shown in page
