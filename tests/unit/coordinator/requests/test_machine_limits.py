"""How long a request's machine waits, how often it tries, and what it does not hear any more."""

from collections.abc import Callable
from math import inf

import pytest

from p2pserve.coordinator.requests.machine import RequestMachine
from p2pserve.coordinator.requests.values import (
    CancelTransfer,
    CancelWork,
    EndRequest,
    FindRoute,
    OpenDecode,
    Ready,
    RequestRecord,
    RequestSettings,
    ShowTokens,
    Tokens,
)
from p2pserve.coordinator.routing.interface import Route

SETTINGS = RequestSettings(no_engine_grace_s=5.0, route_retry_s=1.0, figures_grace_s=0.5, max_failures=3)
SPLIT = Route(prefill="pppppp-prefill", decode="dddddd-decode", split=6)
ALONE = Route(prefill=None, decode="dddddd-decode")
P, D = "pppppp-prefill", "dddddd-decode"


class CountedAnswer:
    """An answer of which only the length counts."""

    def __init__(self, left: int) -> None:
        self.count, self.left = 0, left
        self.finish: str | None = None

    def take(self, tokens: Tokens, finish: str | None) -> ShowTokens | None:
        self.count += len(tokens)
        self.left -= len(tokens)
        self.finish = finish if self.left else "length"
        return ShowTokens("", tokens) if tokens else None


def machine_of(*, left: int = 5, deadline: float = 60.0, settings: RequestSettings = SETTINGS) -> RequestMachine:
    return RequestMachine(
        CountedAnswer(left), service="tiny", prompt_tokens=10, now=2.0, deadline=deadline, settings=settings
    )


def serving(route: Route = SPLIT, **more: float) -> RequestMachine:
    """A machine whose decode replica has accepted its first attempt."""
    machine = machine_of(**more)  # type: ignore[arg-type]
    machine.start(2.0)
    machine.routed(route, 2.0)
    machine.decode_opened(1, 2.1, receives=True)
    return machine


def ending(ready: Ready) -> EndRequest:
    (end,) = (action for action in ready if isinstance(action, EndRequest))
    return end


def test_a_request_that_is_held_waits_for_its_turn_until_its_deadline() -> None:
    machine = machine_of(deadline=60.0)
    (wanted,) = machine.start(2.0)
    assert machine.held(2.0) == ()
    assert machine.wake_at == 60.0
    assert machine.network_changed(30.0) == (wanted,)
    machine.held(30.0)
    assert machine.wake(59.9) == ()
    assert ending(machine.wake(60.0)).error == "deadline: the answer was not complete after 58.0 s"


def test_the_grace_for_an_engine_begins_when_a_route_is_looked_for() -> None:
    machine = machine_of()
    machine.start(2.0)
    machine.held(2.0)
    machine.network_changed(30.0)
    machine.not_routed("none", 30.0, is_hopeful=False)
    assert machine.wake_at == 31.0
    machine.not_routed("none", 34.9, is_hopeful=False)
    assert ending(machine.not_routed("none", 35.0, is_hopeful=False)).error.startswith("no engine is left")


def test_what_has_a_route_is_not_held() -> None:
    machine = serving()
    before = machine.wake_at
    assert machine.held(3.0) == ()
    assert machine.wake_at == before
    (cancel, *_) = machine.stop(4.0)
    assert isinstance(cancel, CancelWork)


def test_a_route_is_looked_for_again_until_the_grace_is_over() -> None:
    machine = machine_of()
    assert machine.start(2.0) == (FindRoute(10, {}),)
    assert machine.wake_at == 3.0
    assert machine.not_routed("no box", 2.0, is_hopeful=False) == ()
    assert machine.wake(2.9) == ()
    assert machine.wake(3.0) == (FindRoute(10, {}),)
    assert machine.not_routed("no box", 6.5, is_hopeful=False) == ()
    assert machine.wake_at == 7.0
    end = ending(machine.not_routed("no box", 7.0, is_hopeful=False))
    assert (end.finish, end.error, end.record) == ("error", "no engine is left for tiny: no box", None)
    assert (machine.is_over, machine.wake_at) == (True, inf)


def test_while_there_is_hope_the_grace_begins_anew() -> None:
    machine = machine_of()
    machine.start(2.0)
    for second in range(2, 30, 4):
        assert machine.not_routed("it is starting", float(second), is_hopeful=True) == ()
    assert machine.not_routed("it is gone", 30.9, is_hopeful=False) == ()
    assert machine.not_routed("it is gone", 31.0, is_hopeful=False) != ()


@pytest.mark.parametrize("deadline", [2.5, 6.0])
def test_a_deadline_ends_it_wherever_it_is(deadline: float) -> None:
    waiting, working = machine_of(deadline=deadline), serving(deadline=deadline)
    waiting.start(2.0)
    assert waiting.wake_at == min(3.0, deadline)
    assert working.wake_at == deadline
    assert working.wake(deadline - 0.01) == ()
    for machine in (waiting, working):
        end = ending(machine.wake(deadline))
        assert end.error == f"deadline: the answer was not complete after {deadline - 2.0:.1f} s"
        assert machine.wake(deadline + 1.0) == ()


def test_a_deadline_names_what_went_wrong_before_it() -> None:
    machine = serving(deadline=6.0)
    machine.decode_failed(1, "its engine ended", 0, 3.0)
    assert ending(machine.wake(6.0)).error == (
        "deadline: the answer was not complete after 4.0 s (decode node brisk-plover: its engine ended)"
    )


def test_a_complete_answer_waits_a_little_for_the_figures_of_its_transfer() -> None:
    machine = serving()
    ready = machine.decoded(1, range(5), "length", 4.0)
    assert ready == (ShowTokens("", range(5)),)
    assert (machine.wake_at, machine.is_over) == (4.5, False)
    assert machine.decoded(1, range(5), "length", 4.1) == ()  # it is complete
    assert ending(machine.prefill_ended(1, "", 0, 4.2)).finish == "length"
    late = serving()
    late.decoded(1, range(5), "length", 4.0)
    assert late.wake(4.4) == ()
    assert [type(action) for action in late.wake(4.5)] == [CancelWork, EndRequest]  # the prefill replica's only
    close = serving(deadline=4.2)
    close.decoded(1, range(5), "length", 4.0)
    assert close.wake_at == 4.2


def test_without_a_transfer_a_complete_answer_ends_at_once() -> None:
    machine = serving(ALONE)
    end = ending(machine.decoded(1, range(5), None, 4.0))
    assert end.record == RequestRecord(None, D, 1, (), 0, 5, 2.0, 4.0, 4.0)


def test_figures_of_a_request_by_hand() -> None:
    machine = serving(ALONE)
    machine.decoded(1, range(2), None, 3.0, cached=7, first_at=2.75)
    machine.decoded(1, range(2, 4), None, 3.5, cached=1, first_at=9.0)
    record = ending(machine.decoded(1, range(4, 5), "length", 5.75)).record
    assert record is not None
    assert (record.cached_tokens, record.tokens, record.attempts) == (7, 5, 1)
    assert (record.ttft_s, record.tpot_s, record.e2e_s) == (0.75, 0.75, 3.75)


def test_a_request_that_showed_nothing_has_its_end_as_its_first_token() -> None:
    record = ending(serving(ALONE).stop(9.0)).record
    assert record is not None
    assert (record.first_at, record.last_at, record.tokens, record.tpot_s) == (9.0, 9.0, 0, 0.0)


def test_engines_that_fail_in_a_row_are_counted_until_one_adds_to_the_answer() -> None:
    machine = serving(ALONE, left=20)
    for attempt in (1, 2):
        machine.decode_failed(attempt, "it ended", attempt, 3.0)
        machine.routed(ALONE, 3.0)
    machine.decoded(3, range(1), None, 3.5)
    for attempt in (3, 4):
        ready = machine.decode_failed(attempt, "it ended", attempt, 4.0)
        assert ready[-1] == FindRoute(11, {D: attempt})
        machine.routed(ALONE, 4.0)
    end = ending(machine.decode_failed(5, "it ended", 5, 5.0))
    assert end.error.startswith("given up: 3 engines in a row failed with it (decode node brisk-plover: it ended; ")
    assert end.error.count("it ended") == 5


def test_a_replica_that_does_not_accept_is_no_failure_of_an_engine() -> None:
    machine = serving(ALONE)
    for attempt in range(1, 8):
        assert machine.open_failed(attempt, D, "it is leaving", attempt, 3.0)[-1] == FindRoute(10, {D: attempt})
        assert machine.routed(ALONE, 3.0) == (OpenDecode(attempt + 1, D),)
    assert not machine.is_over


def test_a_lost_prefill_replica_costs_no_attempt_and_a_lost_decode_replica_one() -> None:
    machine = serving()
    assert machine.peer_lost("somebody", 0, 3.0) == ()
    assert machine.peer_lost(P, 4, 3.0) == (CancelTransfer(1, D, "it was lost"),)
    assert machine.peer_lost(P, 4, 3.1) == ()  # once
    ready = machine.peer_lost(D, 5, 3.2)
    assert ready == (CancelWork(1, D), FindRoute(10, {P: 4, D: 5}))


def test_a_prefill_that_is_over_can_no_longer_be_lost() -> None:
    machine = serving()
    assert machine.prefill_ended(1, "", 0, 3.0) == ()
    assert machine.peer_lost(P, 0, 3.1) == ()
    assert machine.open_failed(1, P, "late", 0, 3.2) == ()


EVENTS: list[Callable[[RequestMachine, int], Ready]] = [
    lambda machine, attempt: machine.decode_opened(attempt, 9.0, receives=True),
    lambda machine, attempt: machine.open_failed(attempt, D, "no", 0, 9.0),
    lambda machine, attempt: machine.first_token(attempt, range(1), None, 9.0),
    lambda machine, attempt: machine.decoded(attempt, range(1), None, 9.0),
    lambda machine, attempt: machine.decode_failed(attempt, "no", 0, 9.0),
    lambda machine, attempt: machine.refused(attempt, "no", 9.0),
    lambda machine, attempt: machine.prefill_ended(attempt, "no", 0, 9.0),
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_attempt_that_is_over_is_not_heard(event: Callable[[RequestMachine, int], Ready]) -> None:
    again = serving()
    again.decode_failed(1, "it ended", 0, 3.0)
    assert event(again, 1) == ()  # while a route is looked for
    again.routed(SPLIT, 3.0)
    again.decode_opened(2, 3.1, receives=True)
    assert event(again, 1) == ()
    over = serving()
    over.stop(4.0)
    assert event(over, 1) == ()
    assert over.is_over


@pytest.mark.parametrize(
    "event",
    [
        lambda machine: machine.routed(SPLIT, 9.0),
        lambda machine: machine.not_routed("no box", 9.0, is_hopeful=False),
        lambda machine: machine.network_changed(9.0),
    ],
)
def test_routes_are_heard_of_only_while_one_is_looked_for(event: Callable[[RequestMachine], Ready]) -> None:
    machine = serving()
    assert event(machine) == ()
    machine.stop(9.0)
    assert event(machine) == ()
    assert machine.stop(9.0) == ()


def test_a_first_token_is_shown_once_and_only_before_the_decode_replica_begins() -> None:
    whole = Route(prefill=P, decode=D, split=10)
    machine = serving(whole)
    assert machine.first_token(1, (), None, 3.0) == ()
    shown = machine.first_token(1, (7, 8), None, 3.0)
    assert shown[0] == ShowTokens("", (7,))
    assert machine.first_token(1, (7,), None, 3.1) == ()
    ready = machine.decoded(1, (9, 1), None, 3.2)  # another than was shown
    assert ready[-1] == FindRoute(11, {})
    late = serving(whole)
    late.decoded(1, (7,), None, 3.0)
    assert late.first_token(1, (7,), None, 3.1) == ()
