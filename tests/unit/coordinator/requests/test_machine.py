"""What a machine says of itself between two events, and what its front door guarantees."""

import pytest

from p2pserve.coordinator.requests.machine import RequestMachine
from p2pserve.coordinator.requests.placement import place
from p2pserve.coordinator.requests.values import OpenDecode, RequestSettings, ShowTokens, Tokens
from p2pserve.coordinator.routing.interface import Route


class CountedAnswer:
    """An answer of which only the length counts."""

    def __init__(self, left: int) -> None:
        self.count, self.left = 0, left
        self.finish: str | None = None

    def take(self, tokens: Tokens, finish: str | None) -> ShowTokens | None:
        self.count += len(tokens)
        self.left -= len(tokens)
        self.finish = finish if self.left else "length"
        return None


SPLIT = Route(prefill="p", decode="d", split=6)
WHOLE = Route(prefill="p", decode="d", split=10)


def machine_of(left: int = 5) -> RequestMachine:
    return RequestMachine(CountedAnswer(left), service="tiny", prompt_tokens=10, now=0.0, deadline=60.0)


def work(machine: RequestMachine) -> dict[str, int]:
    return dict(machine.list_work())


def test_the_work_of_a_split_request_is_shared_until_each_side_is_done() -> None:
    machine = machine_of()
    machine.start(0.0)
    assert work(machine) == {}
    machine.routed(SPLIT, 0.0)
    assert work(machine) == {"p": 6, "d": 4}  # also before they have been asked: the next route counts on it
    machine.decode_opened(1, 0.1, receives=True)
    assert machine.is_prefilling
    machine.prefill_ended(1, "", 0, 0.2)
    assert work(machine) == {"d": 4}
    machine.decoded(1, range(1), None, 0.3)
    assert work(machine) == {"d": 0}
    machine.decoded(1, range(1, 5), "length", 0.4)
    assert work(machine) == {}
    assert machine.is_over


def test_the_work_of_a_whole_prompt_is_done_with_its_first_token() -> None:
    machine = machine_of()
    machine.start(0.0)
    machine.routed(WHOLE, 0.0)
    assert work(machine) == {"p": 10, "d": 0}
    machine.decode_opened(1, 0.1, receives=True)
    machine.first_token(1, range(1), None, 0.2)
    assert work(machine) == {"p": 0, "d": 0}  # its KV is still being sent
    machine.prefill_ended(1, "", 0, 0.3)
    assert work(machine) == {"d": 0}


@pytest.mark.parametrize("how", ["fails", "is lost", "refuses", "is not needed"])
def test_without_a_prefill_replica_all_of_the_prompt_is_the_decode_replicas(how: str) -> None:
    machine = machine_of()
    machine.start(0.0)
    machine.routed(SPLIT, 0.0)
    machine.decode_opened(1, 0.1, receives=how != "is not needed")
    if how == "fails":
        machine.prefill_ended(1, "the link was cut", 0, 0.2)
    elif how == "is lost":
        machine.peer_lost("p", 0, 0.2)
    elif how == "refuses":
        machine.open_failed(1, "p", "it is leaving", 0, 0.2)
    assert work(machine) == {"d": 10}
    assert not machine.is_prefilling


def test_what_a_replica_has_in_its_cache_is_no_work() -> None:
    """Whoever computes the prompt's beginning: alone, before another replica, or of what that chose to compute."""
    for route, expected in (
        (Route(prefill=None, decode="d", found=8), {"d": 2}),
        (Route(prefill="p", decode="d", split=10, found=8), {"p": 2, "d": 0}),
        (Route(prefill="p", decode="d", split=6, found=8), {"p": 0, "d": 4}),
        (Route(prefill="p", decode="d", split=9, cached=8), {"p": 1, "d": 1}),
    ):
        machine = machine_of()
        machine.start(0.0)
        machine.routed(route, 0.0)
        assert work(machine) == expected
        machine.decode_opened(1, 0.1, receives=False)
        if route.prefill is not None:
            assert work(machine) == {"d": 10}, "what another replica has is nothing here"


def test_after_a_failure_there_is_work_again_only_when_there_is_a_route() -> None:
    machine = machine_of()
    machine.start(0.0)
    machine.routed(WHOLE, 0.0)
    machine.decoded(1, range(3), None, 0.1)
    machine.decode_failed(1, "the engine process ended", 0, 0.2)
    assert work(machine) == {}
    machine.routed(Route(prefill=None, decode="d2"), 0.3)
    assert work(machine) == {"d2": 13}
    assert "13 tokens" not in repr(machine)
    assert "10+3 tokens has an attempt under way, attempt 2" in repr(machine)


@pytest.mark.parametrize(
    ("route", "left", "prefill_samples", "expected"),
    [
        (Route(prefill=None, decode="d"), 1, True, OpenDecode(7, "d")),
        (SPLIT, 5, True, OpenDecode(7, "d", "p", 6, False)),
        (SPLIT, 1, True, OpenDecode(7, "d", "p", 6, False)),
        (WHOLE, 5, True, OpenDecode(7, "d", "p", 10, True)),
        (WHOLE, 5, False, OpenDecode(7, "d", "p", 10, False)),
        (WHOLE, 2, True, OpenDecode(7, "d", "p", 10, True)),
        (WHOLE, 1, True, OpenDecode(7, "p")),
        (WHOLE, 1, False, OpenDecode(7, "d", "p", 10, False)),
        (Route(prefill="p", decode="d", split=11), 1, True, OpenDecode(7, "p")),
        (Route(prefill="p", decode="d", split=10, found=9), 1, True, OpenDecode(7, "p", cached=9)),
    ],
)
def test_where_a_request_goes(route: Route, left: int, prefill_samples: bool, expected: OpenDecode) -> None:
    assert place(route, 7, 10, left, RequestSettings(first_token_at_prefill=prefill_samples)) == expected


def test_who_may_not_be_split_is_computed_where_it_is_decoded() -> None:
    assert place(SPLIT, 7, 10, 5, RequestSettings(may_split=False)) == OpenDecode(7, "d")


def test_a_replica_that_has_decoded_a_request_so_far_sends_it_from_its_cache() -> None:
    placed = place(Route(prefill=None, decode="d2"), 7, 10, 5, RequestSettings(), source="d")
    assert (placed.prefill, placed.split, placed.cached) == ("d", 10, 9)


def test_settings_decide_how_long_is_waited() -> None:
    settings = RequestSettings(no_engine_grace_s=2.0, route_retry_s=0.5, max_failures=1)
    machine = RequestMachine(CountedAnswer(5), service="tiny", prompt_tokens=10, now=0.0, settings=settings)
    machine.start(0.0)
    assert machine.wake_at == 0.5
    machine.not_routed("no box", 1.8, is_hopeful=False)
    assert machine.wake_at == 2.0
    machine.routed(WHOLE, 1.9)
    machine.decode_failed(1, "it ended", 0, 1.9)
    assert machine.is_over
