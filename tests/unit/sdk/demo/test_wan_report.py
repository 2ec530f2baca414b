"""What `demo --wan` makes of what its client tells: when something was noticed, what it cost, and a picture of it."""

from __future__ import annotations

import json

import msgspec
import pytest

from p2pserve.coordinator.plan import Deadlines
from p2pserve.sdk.demo.ocean import BOXES
from p2pserve.sdk.demo.wan_client import LostRequest
from p2pserve.sdk.demo.wan_report import WanReport, is_in_time, picture_lines, report_run
from p2pserve.sdk.demo.wan_timeline import WanTimeline

from .ocean_run import BEFORE, DEAD, EVENTS, HOME, ORDERS, PEERS, RATES, SLOW, answer, look, plan, whole_run

EVERYONE = frozenset(box.name for box in BOXES)
CALM = [answer(at) for at in (11.0, 12.0, 24.0, 25.0, 36.0)]
HIT = [
    answer(19.5, ttft=0.2, tpot=0.11),  # under way when the link degrades
    answer(21.0, ttft=1.6, recovered="KV late"),
    answer(22.0, relayed=True),
    answer(29.9, ttft=5.0, attempts=2, recovered="decode node: it did not answer"),
]


def report(*requests: object) -> WanReport:
    return report_run(whole_run(*requests), EVENTS, ORDERS, RATES)  # type: ignore[arg-type]


def test_a_calm_and_a_disturbed_stretch_have_the_requests_that_fell_into_them() -> None:
    found = report(*CALM, *HIT)
    assert [each.asked for each in found.stretches] == [2, 3, 2, 1, 1]
    assert [each.seconds for each in found.stretches] == [10.0, 3.0, 7.0, 4.0, 6.0]
    assert [each.moved for each in found.stretches] == [0, 0, 0, 1, 0]
    assert [each.recomputed for each in found.stretches] == [0, 1, 0, 0, 0]
    assert [each.relayed for each in found.stretches] == [0, 1, 0, 0, 0]
    assert [each.in_time for each in found.stretches] == [2, 1, 2, 0, 1]
    assert found.stretches[0].goodput_s == pytest.approx(1.0), "both of a stretch in which one came each second"
    assert found.stretches[1].goodput_s == pytest.approx(1 / 3)
    assert found.stretches[1].ttft_worst_s == pytest.approx(1.6)
    assert found.stretches[1].ttft_median_s == pytest.approx(0.5)
    assert found.stretches[1].tpot_worst_s == pytest.approx(0.11)
    assert found.ok
    assert found.problems == ()


def test_requests_from_before_the_figures_begin_count_in_no_stretch_but_are_not_lost_sight_of() -> None:
    found = report(answer(5.0), LostRequest(asked_at=6.0, error="no gateway"))
    assert [each.asked for each in found.stretches] == [0] * 5
    assert found.answers == 1
    assert found.problems == ("a request was lost: no gateway",)
    assert not found.ok


def test_when_each_event_was_noticed_and_planned_with() -> None:
    link, box = report().events
    assert (link.noticed_s, link.planned_s, link.plan) == (2.0, 3.0, "1.2")
    assert link.news == "the link virginia-1 -> virginia-2 went from 1 to 0.03 Gb/s", "boxes as the demo calls them"
    assert (box.noticed_s, box.planned_s, box.plan) == (1.0, 4.0, "1.3")


def test_the_plans_shares_are_those_before_and_after_each_event() -> None:
    found = {(link.prefill, link.decode): link for link in report().links}
    assert found[SLOW].shares == (0.6, 0.0, 0.2)
    assert found["virginia-1", DEAD].shares == (0.0, 0.6, 0.0)
    assert found[SLOW].found_gbps == 1.0, "as believed before it degraded"
    assert found["frankfurt-1", "mumbai-1"].found_gbps is None
    assert (found["virginia-1", "mumbai-1"].rtt_ms, found["virginia-1", "mumbai-1"].gbps) == (199.6, 0.58)


def test_gateways_that_send_nothing_over_a_link_any_more_have_done_something_about_it() -> None:
    timeline = WanTimeline({peer: name for name, peer in PEERS.items()})
    timeline.on_look(look(9.0, plan(1, BEFORE)))
    timeline.on_request(answer(21.0))
    for second in range(4):
        timeline.on_request(answer(22.0 + second, decode=PEERS[DEAD]))
    assert timeline.routed_around(SLOW, 20.0) is None, "0.4 to the fourth is a chance of 2.6 %"
    timeline.on_request(answer(26.0, decode=PEERS[DEAD]))
    assert timeline.routed_around(SLOW, 20.0) is None, "1.02 %"
    timeline.on_request(answer(27.0, decode=PEERS[DEAD]))
    assert timeline.routed_around(SLOW, 20.0) == 21.0
    assert timeline.routed_around(("frankfurt-1", "mumbai-1"), 20.0) is None, "the plan never sent anything there"
    link, box = report_run(timeline, EVENTS, ORDERS, RATES).events
    assert (link.routed_s, link.planned_s) == (1.0, None)
    assert box.routed_s is None
    timeline.on_request(answer(28.0))
    assert timeline.routed_around(SLOW, 20.0) is None, "it is used again"


def test_what_nobody_noticed_is_a_problem() -> None:
    timeline = WanTimeline({peer: name for name, peer in PEERS.items()})
    timeline.on_look(look(9.0, plan(1, BEFORE)))
    found = report_run(timeline, EVENTS, ORDERS, RATES)
    assert not found.ok
    assert len(found.problems) == 2
    assert all("nothing was done about it" in problem for problem in found.problems)
    assert [(event.noticed_s, event.planned_s) for event in found.events] == [(None, None)] * 2
    assert all(len(line) <= 80 for line in picture_lines(found))


def test_an_answer_that_differs_is_a_problem() -> None:
    found = report(answer(11.0), answer(12.0, digest="other"))
    assert found.problems == ("the same prompt was answered differently",)


@pytest.mark.parametrize(
    ("ttft", "tpot", "is_kept"), [(0.5, 0.02, True), (1.1, 0.02, False), (0.5, 0.06, False), (0.9, 0.049, True)]
)
def test_in_time_is_as_fast_as_was_asked_for(ttft: float, tpot: float, is_kept: bool) -> None:
    deadlines = Deadlines(ttft_s=1.0, tpot_s=0.05, e2e_s=20.0)
    assert is_in_time(answer(0.0, ttft=ttft, tpot=tpot), deadlines) is is_kept
    assert is_in_time(answer(0.0, ttft=ttft, tpot=tpot), Deadlines()), "nothing was asked for"
    assert not is_in_time(answer(0.0), Deadlines(e2e_s=1.0))


def test_the_picture_fits_a_terminal_and_says_what_is_emulated() -> None:
    found = msgspec.structs.replace(report(*CALM, *HIT), elapsed_s=83.4, peak_memory_mib=900.0, late_ms_mean=1.25)
    lines = picture_lines(found)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "emulated: round trips and rates" in text
    assert "mumbai-home  RTX-3090TI  decode   behind NAT: nobody can dial it" in text
    assert "virginia-1   L40S        prefill  coordinator" in text
    row = next(line for line in lines if line.startswith("virginia-1 > virginia-2 "))
    assert row.split()[3:] == ["2", "1.00", "1.00", "60%", "0.03", "-", "20%"]
    gone = next(line for line in lines if line.startswith("frankfurt-1 > frankfurt-2 "))
    assert gone.split()[3:] == ["2", "1.00", "-", "40%", "40%", "lost"]
    assert next(line for line in lines if line.startswith("  lost")).split()[1:] == ["0"] * 5


def test_the_report_is_json() -> None:
    found = json.loads(json.dumps(msgspec.to_builtins(report(*CALM))))
    assert found["closed"] == [HOME]
    assert found["degraded"] == list(SLOW)


def test_lines_about_what_is_new_are_short_and_call_boxes_by_their_names() -> None:
    timeline = WanTimeline({peer: name for name, peer in PEERS.items()})
    assert timeline.on_look(look(1.0, None, engine="starting")) == []
    assert not timeline.covers(EVERYONE)
    assert timeline.on_look(look(2.0, plan(1, BEFORE))) == ["plan 1.1: sends KV over 2 links"]
    assert timeline.covers(EVERYONE)
    assert timeline.coordinator == "virginia-1"
    assert timeline.on_look(look(3.0, plan(1, BEFORE))) == [], "nothing is new"
    assert timeline.on_look(look(4.0, plan(1, BEFORE), dead="suspect")) == [f"{DEAD} is suspect"]


def test_a_plan_of_fewer_boxes_does_not_cover_all() -> None:
    timeline = whole_run()
    assert not timeline.covers(EVERYONE)
    assert timeline.covers(EVERYONE - {DEAD})
