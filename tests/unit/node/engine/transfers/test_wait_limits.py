"""When KV is too late: computed here instead only if that is clearly sooner, for a while, and by what was measured."""

from hypothesis import given
from hypothesis import strategies as st

from p2pserve.node.engine.transfers.wait_limits import LEARNED_FROM_TOKENS, WaitLimits, WaitLimitSettings

SETTINGS = WaitLimitSettings()
TOKENS = 1000


def measured(token_s: float = 0.001) -> WaitLimits:
    """Of an engine that reads 1000 tokens a second, and waits for a prompt of 1000 since time 0."""
    limits = WaitLimits()
    limits.on_prefill(500, 500 * token_s)
    limits.begin("r", 0, TOKENS, 0.0)
    return limits


def run(limits: WaitLimits, rate: float, until: float, *, start: float = 0.0, stop: float = 1e9) -> float | None:
    """KV comes with `rate` parts per second from `start` to `stop`; returns when it is given up."""
    step, now = 0.05, 0.0
    while now <= until:
        part = min(1.0, max(0.0, min(now, stop) - start) * rate)
        limits.on_arrival("r", part, 0, now)
        if limits.give_up(now):
            assert not limits.waiting
            return now
        now += step
    return None


def test_kv_that_comes_faster_than_it_is_computed_is_waited_for() -> None:
    assert run(measured(), rate=2.0, until=10.0) is None
    assert run(measured(), rate=0.9, until=1.2) is None  # a little slower: not worth a prefill beside the decodes


def test_kv_that_comes_much_more_slowly_is_given_up_soon() -> None:
    given_up = run(measured(), rate=0.05, until=10.0)
    assert given_up is not None
    assert given_up <= 1.0


def test_kv_that_stalls_is_given_up_after_the_window() -> None:
    given_up = run(measured(), rate=0.8, until=10.0, stop=0.6)
    assert given_up is not None
    assert 0.6 + SETTINGS.hold_s < given_up <= 0.6 + SETTINGS.window_s + 2 * SETTINGS.hold_s


def test_a_short_pause_is_ridden_out() -> None:
    """Slower for less than `hold_s`, then as fast as before."""
    limits = measured()
    for now, part in ((0.1, 0.2), (0.2, 0.4), (0.9, 0.4), (0.95, 0.8), (1.0, 1.0)):
        limits.on_arrival("r", part, 0, now)
        assert not limits.give_up(now)


def test_nothing_at_all_is_waited_for_several_times_as_long_as_computing_takes() -> None:
    given_up = run(measured(), rate=0.0, until=20.0)
    assert given_up is not None
    bound = SETTINGS.first_gain * 1.0 + SETTINGS.first_margin_s
    assert bound < given_up <= bound + 0.1


def test_what_is_complete_need_not_be_computed() -> None:
    """Chunk after chunk has come in whole: the rest takes little here, so slow KV is given up where it else is not."""
    for complete, late in ((0, False), (900, True)):
        limits = measured()
        given_up = False
        for step in range(30):
            now = step * 0.05
            limits.on_arrival("r", 0.6 + 0.2 * now, complete, now)
            given_up = given_up or bool(limits.give_up(now))
        assert given_up == late


def test_the_reason_says_how_far_it_was_and_what_it_would_have_taken() -> None:
    limits = measured()
    limits.on_arrival("r", 0.25, 0, 0.0)
    limits.on_arrival("r", 0.25, 0, 2.0)
    assert limits.give_up(2.0) == {}
    (reason,) = limits.give_up(2.5).values()
    assert reason == "KV stopped coming with 25% of it there; computing the rest takes 1.0 s"


def test_before_a_prefill_is_measured_any_prompt_is_taken_to_be_long() -> None:
    limits = WaitLimits()
    limits.on_prefill(LEARNED_FROM_TOKENS - 1, 0.001)  # says more of the decodes beside it
    limits.begin("r", 0, 10, 0.0)
    bound = SETTINGS.first_gain * SETTINGS.unmeasured_s + SETTINGS.first_margin_s
    assert limits.give_up(bound - 0.1) == {}
    assert list(limits.give_up(bound + 0.1)) == ["r"]


def test_the_kv_of_a_long_first_prompt_may_take_as_long_as_such_a_prompt_does() -> None:
    """30,000 tokens of which a twentieth comes each second, at a box that has prefilled nothing yet."""
    given_up: dict[int, float] = {}
    for tokens in (1_000, 30_000):
        limits = WaitLimits()
        limits.begin("r", 0, tokens, 0.0)
        for step in range(1, 200):
            now = step * 0.05
            limits.on_arrival("r", now / 20.0, 0, now)
            if limits.give_up(now):
                given_up[tokens] = now
                break
    assert list(given_up) == [1_000]


def test_a_load_that_has_ended_is_not_given_up() -> None:
    limits = measured()
    limits.begin("other", 0, TOKENS, 0.0)
    limits.end("r")
    limits.end("r")
    limits.on_arrival("r", 0.5, 0, 1.0)
    assert list(limits.give_up(100.0)) == ["other"]
    assert limits.give_up(100.0) == {}


@given(st.floats(0.05, 50.0), st.floats(1e-5, 0.01))
def test_giving_up_never_costs_much_more_than_either_choice(rate: float, token_s: float) -> None:
    """Whatever the rate of the KV and of this engine, time to the first token stays within a few times the better of
    the two, plus the time it takes to notice."""
    compute_s, transfer_s = TOKENS * token_s, 1.0 / rate
    given_up = run(measured(token_s), rate=rate, until=transfer_s + 1.0)
    took = transfer_s if given_up is None else given_up + compute_s
    best = min(transfer_s, compute_s)
    assert took <= (SETTINGS.gain + 1) * best + SETTINGS.margin_s + SETTINGS.hold_s + 2 * SETTINGS.window_s


def test_a_prompt_of_one_second_is_waited_for_six_before_anything_has_come() -> None:
    limits = measured()
    assert limits.give_up(6.0) == {}
    assert list(limits.give_up(6.01)) == ["r"]


def test_waiting_as_long_as_is_allowed_is_not_yet_worse() -> None:
    """1.6 s of waiting for 1 s of computing; it then has to stay worse for a quarter of a second."""
    limits = measured()
    limits.on_arrival("r", 0.5, 0, 1.6)
    for now in (1.6, 1.85, 2.05):
        assert limits.give_up(now) == {}
    assert list(limits.give_up(2.1)) == ["r"]


def test_the_rate_of_this_engine_follows_its_last_prefills() -> None:
    limits = WaitLimits()
    assert repr(limits) == "<WaitLimits waiting=0 prefill not measured>"
    limits.on_prefill(100, 0.1)
    assert repr(limits) == "<WaitLimits waiting=0 prefill 1000 tokens/s>"
    limits.on_prefill(100, 0.0)  # nothing is learned from a step without a time
    limits.on_prefill(100, 1.0)
    assert repr(limits) == f"<WaitLimits waiting=0 prefill {1 / (0.7 * 0.001 + 0.3 * 0.01):.0f} tokens/s>"
    limits.on_prefill(LEARNED_FROM_TOKENS, 1.0)
    assert "270 tokens" not in repr(limits)


def test_the_rate_is_that_of_the_last_second() -> None:
    """At 1.5 s it is what came since 0.5 s: a tenth, so that eight tenths take eight seconds more."""
    limits = measured()
    for now, part in ((0.5, 0.1), (1.0, 0.2)):
        limits.on_arrival("r", part, 0, now)
    assert limits.give_up(1.25) == {}
    assert limits.give_up(1.5) == {"r": "KV would take 8.0 s more with 20% of it there; computing the rest takes 1.0 s"}


def test_only_positions_between_first_and_last_are_computed_and_time_begins_with_the_blocks() -> None:
    """Half a second of computing: four times that, and two seconds."""
    limits = measured()
    limits.end("r")
    limits.begin("half", 200, 700, 10.0)
    assert limits.give_up(14.0) == {}
    assert limits.give_up(14.25) == {"half": "no KV came in 4.2 s"}


def test_what_has_come_in_whole_is_waited_for_until_its_end_is_told() -> None:
    limits = measured()
    limits.on_arrival("r", 1.0, 999, 0.1)
    assert [limits.give_up(now) for now in (5.0, 6.0)] == [{}, {}]


def test_what_was_slow_for_a_while_has_to_be_slow_for_as_long_again() -> None:
    limits = measured()
    limits.on_arrival("r", 0.1, 0, 1.0)
    assert limits.give_up(1.0) == {}  # nine seconds more, as it seems
    limits.on_arrival("r", 0.9, 0, 1.2)
    assert limits.give_up(1.2) == {}  # 0.1 of 0.9 in 1.2 s
    assert limits.give_up(2.3) == {}  # stopped, since now
    assert limits.give_up(2.5) == {}
    assert list(limits.give_up(2.55)) == ["r"]


def test_kv_of_a_prompt_that_is_being_computed_is_given_up_only_when_it_stops_coming() -> None:
    """It comes as fast as the prefill engine's steps are: a hundred seconds here. Once that has computed it, the link
    alone is to blame."""
    limits = measured()
    limits.begin("r", 0, TOKENS, 0.0, is_computed=False)
    assert run(limits, rate=0.01, until=10.0) is None
    limits.on_computed("r")
    assert limits.give_up(10.1) == {}
    assert list(limits.give_up(10.1 + SETTINGS.hold_s)) == ["r"]
    limits.begin("r", 0, TOKENS, 0.0, is_computed=False)
    stopped_at, bound = 3.0, SETTINGS.first_gain * 1.0 + SETTINGS.first_margin_s
    given_up = run(limits, rate=0.01, until=20.0, stop=stopped_at)
    assert given_up is not None
    assert stopped_at + bound < given_up <= stopped_at + bound + 0.2
    limits.on_computed("unknown")
