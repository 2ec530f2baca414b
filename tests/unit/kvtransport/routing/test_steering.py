"""Running transfers that change their paths, on a virtual clock over links whose rates follow a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import FiguresError
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures, bytes_per_s
from p2pserve.kvtransport.routing.paths import PathNetwork, PathQuery, choose
from p2pserve.kvtransport.routing.settings import SteeringSettings
from p2pserve.kvtransport.routing.steering import PathChange, PathController, TriggerKind

MB = 1_000_000
TICK = 0.05
Rate = Callable[[float], float]  # time -> Gb/s


def link(rtt_ms: float, gbps: float) -> LinkFigures:
    return LinkFigures(rtt_s=rtt_ms / 1e3, one_stream_gbps=min(gbps, 20.8 / rtt_ms), capacity_gbps=gbps)


BELIEVED = {("a", "b"): link(90, 1.0), ("a", "r"): link(60, 0.8), ("r", "b"): link(60, 0.8)}
BOXES = {"a": BoxFigures(up_gbps=1.0)}  # so that two paths are no better than one
NETWORK = PathNetwork(BELIEVED, BOXES)


@dataclass
class Transfer:
    """A transfer of `size` bytes over paths that really move what `rates` says, steered by a controller."""

    size: int
    rates: Mapping[str | None, Rate]
    network: PathNetwork = NETWORK
    settings: SteeringSettings = field(default_factory=SteeringSettings)
    supply: Rate | None = None  # Gb/s at which there is something to send
    now: float = 100.0
    changes: list[PathChange] = field(default_factory=list)

    def run(self, *, at_most: float = 600.0) -> float:
        """Seconds until everything has been acknowledged."""
        begun = self.now
        job = PathQuery(source="a", target="b", bytes=self.size)
        self.controller = PathController(job, choose(job, self.network), now=begun, settings=self.settings)
        acked: dict[str | None, float] = {}
        supplied = 0.0 if self.supply else float(self.size)
        while sum(acked.values()) < self.size:
            self.now += TICK
            if self.now - begun > at_most:
                raise AssertionError(f"not done: {acked}, {self.changes}")
            since = self.now - begun
            if self.supply:
                supplied = min(supplied + bytes_per_s(self.supply(since)) * TICK, self.size)
            for path in self.controller.choice.paths:
                can = bytes_per_s(self.rates[path.via](since)) * TICK
                moved = min(can, supplied - sum(acked.values()))
                acked[path.via] = acked.get(path.via, 0.0) + moved
                backlog = supplied - sum(acked.values())
                self.controller.on_progress(path.via, int(acked[path.via]), int(backlog), now=self.now)
            if (change := self.controller.step(self.network, now=self.now)) is not None:
                self.changes.append(change)
            assert self.controller.wake_at() > self.now - 1.0
        return self.now - begun


def steady(gbps: float) -> Rate:
    return lambda now: gbps


def until(moment: float, before: float, after: float) -> Rate:
    return lambda now: before if now < moment else after


def test_a_good_path_is_left_alone() -> None:
    run = Transfer(1000 * MB, {None: steady(1.0), "r": steady(0.8)})
    assert run.run() == pytest.approx(8.0, abs=0.1)
    assert run.changes == []


def test_noise_is_no_reason() -> None:
    noisy: Rate = lambda now: 0.4 if int(now * 4) % 3 == 0 else 1.2  # noqa: E731
    run = Transfer(2000 * MB, {None: noisy, "r": steady(0.8)})
    run.run()
    assert run.changes == []


def test_a_degraded_path_is_left_within_seconds() -> None:
    run = Transfer(1000 * MB, {None: until(3.0, 1.0, 0.05), "r": steady(0.8)})
    seconds = run.run()
    (change,) = run.changes
    assert change.choice.vias == {"r"}
    assert change.trigger.kind is TriggerKind.DEGRADED
    assert 3.0 < change.at - 100.0 < 5.0
    assert change.trigger.observed_gbps < 0.5
    assert change.remaining_bytes == pytest.approx(1000 * MB - 3.0 * bytes_per_s(1.0), rel=0.05)
    assert seconds < 13.0  # staying would have taken 103 s
    assert "direct degraded: 0." in change.explain()
    assert "taken" in change.explain()


def test_a_stalled_path_is_left() -> None:
    run = Transfer(1000 * MB, {None: until(3.0, 1.0, 0.0), "r": steady(0.8)})
    run.run()
    (change,) = run.changes
    assert change.choice.vias == {"r"}
    assert change.trigger.observed_gbps == 0.0
    assert change.at - 100.0 < 4.5


def test_a_path_that_never_starts_is_left() -> None:
    run = Transfer(500 * MB, {None: steady(0.0), "r": steady(0.8)})
    run.run()
    assert run.changes[0].trigger.kind is TriggerKind.STALLED


def test_a_path_that_ramps_up_is_given_time() -> None:
    run = Transfer(1000 * MB, {None: until(0.9, 0.02, 1.0), "r": steady(0.8)})
    run.run()
    assert run.changes == []


def test_having_little_to_send_is_not_the_links_fault() -> None:
    run = Transfer(500 * MB, {None: steady(1.0), "r": steady(0.8)}, supply=steady(0.1))
    assert run.run() == pytest.approx(40.0, rel=0.05)
    assert run.changes == []


def test_pauses_of_the_supply_are_not_stalls() -> None:
    bursts: Rate = lambda now: 1.0 if int(now) % 4 == 0 else 0.0  # noqa: E731
    run = Transfer(500 * MB, {None: steady(1.0), "r": steady(0.8)}, supply=bursts)
    run.run()
    assert run.changes == []


def test_with_no_other_way_it_waits() -> None:
    alone = PathNetwork({("a", "b"): BELIEVED["a", "b"]})
    rates: dict[str | None, Rate] = {None: lambda now: 0.0 if 2.0 < now < 20.0 else 1.0}
    run = Transfer(1000 * MB, rates, alone)
    assert run.run() == pytest.approx(26.0, abs=0.5)
    assert run.changes == []


def test_a_relay_slower_than_what_is_left_of_the_path_is_no_help() -> None:
    slow = PathNetwork({**BELIEVED, ("a", "r"): link(60, 0.2)}, BOXES)
    run = Transfer(300 * MB, {None: until(1.0, 1.0, 0.4), "r": steady(0.2)}, slow)
    run.run()
    assert run.changes == []


def test_a_recovered_path_is_taken_again_after_a_while() -> None:
    recovering: Rate = lambda now: 0.02 if 3.0 < now < 10.0 else 1.0  # noqa: E731
    network = PathNetwork({**BELIEVED, ("a", "r"): link(60, 0.3), ("r", "b"): link(60, 0.3)}, BOXES)
    run = Transfer(6000 * MB, {None: recovering, "r": steady(0.3)}, network)
    run.run()
    away, back = run.changes
    assert away.choice.vias == {"r"}
    assert back.choice.vias == {None}
    assert back.trigger.kind is TriggerKind.BETTER
    assert back.at - away.at >= 30.0


def test_flapping_links_are_not_followed() -> None:
    """Direct is good for 10 s, dead for 10 s, and so on: ever longer it is not trusted."""
    flapping: Rate = lambda now: 1.0 if int(now / 10) % 2 == 0 else 0.02  # noqa: E731
    network = PathNetwork({**BELIEVED, ("a", "r"): link(60, 0.3), ("r", "b"): link(60, 0.3)}, BOXES)
    run = Transfer(20_000 * MB, {None: flapping, "r": steady(0.3)}, network)
    run.run(at_most=800)
    # 26 flaps in the time it takes; every second change leads back to the direct path after 30, 60, 120, ... s.
    assert 1 <= len(run.changes) <= 8
    gaps = [back.at - away.at for away, back in zip(run.changes[::2], run.changes[1::2], strict=False)]
    assert all(later > 1.5 * earlier for earlier, later in pairwise(gaps))


def test_one_bad_path_of_two_is_dropped() -> None:
    network = PathNetwork({("a", "b"): link(40, 1.0), ("a", "r"): link(20, 1.0), ("r", "b"): link(20, 1.0)})
    run = Transfer(3000 * MB, {None: steady(1.0), "r": until(4.0, 1.0, 0.02)}, network)
    run.run()
    assert run.controller.choice.vias == {None}
    assert [change.trigger.via for change in run.changes] == ["r"]


def test_a_path_in_trouble_is_not_made_one_of_two() -> None:
    """Seen over a whole window it still looks half good, and both together would be predicted to be the fastest."""
    links = {("a", "b"): link(90, 1.45), ("a", "r"): link(30, 1.45), ("r", "b"): link(90, 1.45)}
    network = PathNetwork(links, {"b": BoxFigures(down_gbps=2.5)})
    run = Transfer(2000 * MB, {None: until(4.0, 1.45, 0.3), "r": steady(1.4)}, network)
    run.size = 2500 * MB
    job = PathQuery(source="a", target="b", bytes=run.size)
    assert choose(job, network, observed={None: 0.3}).vias == {None, "r"}
    assert choose(job, network, observed={None: 0.3}, unsteady=frozenset({None})).vias == {"r"}
    run.run()
    assert run.changes[0].trigger.via is None
    assert all(change.choice.vias == {"r"} for change in run.changes[:1])


def test_the_end_of_a_transfer_is_not_worth_a_change() -> None:
    run = Transfer(130 * MB, {None: until(1.0, 1.0, 0.3), "r": steady(0.8)})
    run.run()
    assert run.changes == []


def test_progress_of_paths_no_longer_in_use_counts() -> None:
    job = PathQuery(source="a", target="b", bytes=100 * MB)
    controller = PathController(job, choose(job, NETWORK), now=0.0)
    controller.on_progress("r", 60 * MB, 0, now=1.0)
    controller.on_progress(None, 40 * MB, 0, now=1.0)
    controller.on_progress(None, 30 * MB, 0, now=1.1)  # old news
    assert controller.remaining == 0
    assert controller.step(NETWORK, now=50.0) is None
    assert "0 bytes remain" in repr(controller)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=3, max_size=8),
    st.lists(st.sampled_from([0.3, 0.8]), min_size=3, max_size=8),
    st.integers(1, 6),
)
def test_whatever_links_do_transfers_end_and_changes_stay_few(
    direct: list[float], relay: list[float], period: int
) -> None:
    rates: dict[str | None, Rate] = {
        None: lambda now: direct[int(now / period) % len(direct)],
        "r": lambda now: relay[int(now / period) % len(relay)],
    }
    run = Transfer(1500 * MB, rates)
    seconds = run.run(at_most=1500 * MB / bytes_per_s(0.3) * 3 + 60)
    # Each change needs a cause that lasts a second at least, and every second one a longer and longer wait.
    assert len(run.changes) <= 2 + seconds / 5.0


@pytest.mark.parametrize(
    "bad", [{"window_s": 0.0}, {"slow_share": 1.0}, {"slow_share": 0.0}, {"hold_s": -1.0}, {"look_s": float("inf")}]
)
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(FiguresError, match=f"steering.{next(iter(bad))}"):
        SteeringSettings(**bad)
