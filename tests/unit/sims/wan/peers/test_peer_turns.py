"""Contenders in turn: who moves when, how much, and what becomes of one that fails."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from p2pserve.sims.wan.peers.programs import PeerFailed
from p2pserve.sims.wan.peers.turns import WARM_MIB, Contender, MoveSample, TurnsTaken, ratios, size_in_time, take_turns


class FakeClock:
    """Moves as bytes do."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeMover:
    """Moves at a rate of so many MiB a second, and notes what it is asked for."""

    version = "1.2"

    def __init__(self, clock: FakeClock, rate: float, asked: list[int]) -> None:
        self._clock = clock
        self._rate = rate
        self._asked = asked

    def move(self, mib: int, seconds: float) -> MoveSample:
        took = mib / self._rate
        self._asked.append(mib)
        if took > seconds:
            raise PeerFailed(f"no answer within {seconds:.0f} s")
        self._clock.now += took
        return MoveSample(mib, took)


def contender(name: str, clock: FakeClock, rate: float, asked: list[int]) -> Contender:
    @contextmanager
    def opened(mib: int) -> Iterator[FakeMover]:
        yield FakeMover(clock, rate, asked)

    return Contender(name, opened)


def failing(name: str, reason: str) -> Contender:
    def opened(mib: int) -> AbstractContextManager[FakeMover]:
        raise PeerFailed(reason)

    return Contender(name, opened)


def turns_of(*contenders: Contender, clock: FakeClock, mib: int = 256, seconds: float = 1000.0) -> list[TurnsTaken]:
    return take_turns(contenders, mib=mib, rounds=3, seconds=seconds, say=lambda line: None, clock=clock)


def test_each_round_has_a_warm_move_and_a_timed_one_of_all_bytes() -> None:
    clock, asked = FakeClock(), list[int]()
    (taken,) = turns_of(contender("ours", clock, 100.0, asked), clock=clock)
    assert asked == [WARM_MIB, 256] * 3
    assert taken.version == "1.2"
    assert taken.mib == 256
    assert taken.gbps == pytest.approx(100 * 8e-9 * (1 << 20))


def test_a_slow_contender_is_timed_with_what_it_moves_in_its_turn() -> None:
    clock, asked = FakeClock(), list[int]()
    turns_of(contender("slow", clock, 2.0, asked), clock=clock, seconds=3 * 50.0)
    assert asked[:2] == [WARM_MIB, 100]


@pytest.mark.parametrize(
    ("seconds", "mib", "expected"),
    [(1.0, 256, 256), (40.0, 256, 32), (8.0, 256, 40), (40.0, 16, 16)],
)
def test_the_size_is_never_more_than_asked_nor_less_than_was_tried(seconds: float, mib: int, expected: int) -> None:
    assert size_in_time(MoveSample(min(32, mib), seconds), mib, 10.0) == expected


def test_one_that_does_not_start_keeps_its_reason_and_the_others_go_on() -> None:
    clock, asked = FakeClock(), list[int]()
    said: list[str] = []
    ours, peer = take_turns(
        [contender("ours", clock, 100.0, asked), failing("NIXL", "no module")],
        mib=64, rounds=2, seconds=100.0, say=said.append, clock=clock,
    )  # fmt: skip
    assert len(ours.samples) == 2
    assert (peer.samples, peer.failure) == ({}, "no module")
    assert said.count("NIXL: no module") == 1


def test_one_that_is_known_not_to_work_is_not_opened() -> None:
    clock = FakeClock()

    def opened(mib: int) -> AbstractContextManager[FakeMover]:
        pytest.fail("opened")

    (peer,) = turns_of(Contender("rsync", opened, "no rsync"), clock=clock)
    assert peer.failure == "no rsync"


def test_one_that_takes_too_long_is_a_failure_with_its_reason() -> None:
    clock, asked = FakeClock(), list[int]()
    (peer,) = turns_of(contender("stuck", clock, 0.1, asked), clock=clock, seconds=30.0)
    assert peer.failure == "no answer within 40 s"


def test_no_round_but_the_first_begins_after_the_time_is_up() -> None:
    clock, asked = FakeClock(), list[int]()
    ours, peer = turns_of(
        contender("ours", clock, 10.0, asked), contender("other", clock, 10.0, asked), clock=clock, seconds=30.0
    )
    assert list(ours.samples) == list(peer.samples) == [0, 1]


def samples(*rates: float) -> dict[int, MoveSample]:
    return {number: MoveSample(int(rate), 1.0, cpu_s=rate / 100) for number, rate in enumerate(rates)}


def test_ratios_pair_the_rounds_that_both_have() -> None:
    ours, peer = TurnsTaken("ours", samples(100, 300, 500)), TurnsTaken("peer", samples(50, 100))
    assert ratios(ours, peer) == [2.0, 3.0]


def test_cpu_seconds_are_for_each_billion_bytes() -> None:
    assert MoveSample(1000, 1.0, cpu_s=1.048576).cpu_s_per_gb == pytest.approx(1.0)
    assert TurnsTaken("rsync", {0: MoveSample(1000, 1.0)}).cpu_s_per_gb is None
    assert TurnsTaken("none").gbps is None


def test_what_is_said_is_a_line_for_each_turn() -> None:
    clock, said = FakeClock(), list[str]()
    say: Callable[[str], None] = said.append
    take_turns([contender("ours", clock, 128.0, [])], mib=64, rounds=1, seconds=9.0, say=say, clock=clock)
    assert said == ["ours: 64 MiB in 0.50 s, 1.074 Gb/s"]
