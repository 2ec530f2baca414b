"""What a connection to a member carries, over one that takes its time."""

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import NetworkError, PeerId, RemoteError, Role
from p2pserve.node.links.bandwidth import AT_ONCE, MEASURE_S, PIECES, Carried, answer_bandwidth, measure_bandwidth
from p2pserve.node.links.messages import CARRIED_BYTES
from p2pserve.node.testing import MemoryExchange, Sent

BOX, MEMBER = PeerId("box"), PeerId("member")


def measure(latency_s: float, times: int = 1) -> tuple[Carried, int]:
    exchange = MemoryExchange(latency_s=latency_s)
    answer_bandwidth(exchange.join(MEMBER))

    async def main() -> Carried:
        for _ in range(times - 1):
            await measure_bandwidth(exchange.join(BOX, Role.CLIENT), MEMBER)
        return await measure_bandwidth(exchange.join(BOX, Role.CLIENT), MEMBER)

    return trio.run(main, clock=MockClock(autojump_threshold=0)), len(exchange.asked)


def test_pieces_are_timed_in_both_directions() -> None:
    found, asked = measure(0.02)
    expected = AT_ONCE * CARRIED_BYTES * 8e-9 / 0.02
    assert found.up_gbps == pytest.approx(expected, rel=0.3)
    assert found.down_gbps == pytest.approx(expected, rel=0.3)
    assert asked == 2 * PIECES


def test_a_slow_one_is_given_up_after_a_while_and_counts_what_came() -> None:
    found, asked = measure(0.9 * MEASURE_S)
    assert asked < PIECES
    assert 0 < found.up_gbps < 0.01


def test_nobody_has_more_carried_than_a_member_can_spare() -> None:
    with pytest.raises(RemoteError, match="enough for now"):
        measure(0.001, times=3)


def test_a_member_that_is_gone_is_an_error() -> None:
    exchange = MemoryExchange()

    async def main() -> None:
        with pytest.raises(NetworkError, match="gone"):
            await measure_bandwidth(exchange.join(BOX), MEMBER)

    def see(sent: Sent) -> None:
        assert sent.target == MEMBER

    exchange.before = see
    trio.run(main)
