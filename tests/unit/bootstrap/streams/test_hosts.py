"""Dialling the addresses of a host: each gets its share of the time, and a late process still gets a word for it."""

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, Identity, PeerLost, Unreachable
from p2pserve.bootstrap.streams.hosts import try_hosts

PEER = Identity(b"p" * 32).peer_id
AT = Address("box.example", 4001)


def run(main: object, clock: MockClock) -> None:
    trio.run(main, clock=clock)  # type: ignore[arg-type]


def test_the_first_success_ends_it() -> None:
    async def main() -> None:
        tried: list[str] = []

        async def resolve(address: Address) -> list[str]:
            return ["192.0.2.1", "192.0.2.2", "192.0.2.3"]

        async def attempt(host: str) -> str:
            tried.append(host)
            if host == "192.0.2.1":
                raise PeerLost("no") from OSError(111, "Connection refused")
            return f"connected to {host}"

        assert await try_hosts(AT, PEER, attempt, dial_s=6.0, resolve=resolve) == "connected to 192.0.2.2"
        assert tried == ["192.0.2.1", "192.0.2.2"]

    run(main, MockClock(autojump_threshold=0))


def test_silent_addresses_share_the_time_and_a_quick_failure_leaves_its_share_to_the_others() -> None:
    async def main() -> None:
        began: dict[str, float] = {}

        async def resolve(address: Address) -> list[str]:
            return ["a", "quick", "b", "c"]

        async def attempt(host: str) -> None:
            began[host] = trio.current_time()
            if host == "quick":
                raise PeerLost("no") from OSError(113, "No route to host")
            await trio.sleep_forever()

        start = trio.current_time()
        with pytest.raises(Unreachable, match=r"cannot reach 12D3.* at box\.example:4001: no route to host"):
            await try_hosts(AT, PEER, attempt, dial_s=8.0, resolve=resolve)
        assert {host: at - start for host, at in began.items()} == {"a": 0.0, "quick": 2.0, "b": 2.0, "c": 5.0}
        assert trio.current_time() - start == 8.0

    run(main, MockClock(autojump_threshold=0))


@pytest.mark.parametrize("stage", ["resolving", "first attempt"])
def test_a_process_that_gets_no_processor_past_the_deadline_is_told_so_and_lives(stage: str) -> None:
    """The clock goes on while nothing here runs: no wait comes between, so trio has not seen the deadline yet."""
    clock = MockClock()

    async def main() -> None:
        async def resolve(address: Address) -> list[str]:
            if stage == "resolving":
                clock.jump(30.0)
            return ["192.0.2.1", "192.0.2.2"]

        async def attempt(host: str) -> None:
            if stage == "first attempt":
                clock.jump(30.0)
                raise PeerLost("no")
            await trio.sleep_forever()

        with pytest.raises(Unreachable, match=r"no answer within 5 s|something other than a p2pserve node"):
            await try_hosts(AT, PEER, attempt, dial_s=5.0, resolve=resolve)

    run(main, clock)


def test_a_host_without_a_name_is_not_dialled() -> None:
    async def main() -> None:
        async def resolve(address: Address) -> list[str]:
            raise Unreachable("cannot resolve host 'box.example'")

        async def attempt(host: str) -> None:
            pytest.fail("never called")

        with pytest.raises(Unreachable, match="cannot resolve"):
            await try_hosts(AT, None, attempt, dial_s=5.0, resolve=resolve)

    run(main, MockClock())


def test_whoever_may_answer_is_called_a_member() -> None:
    async def main() -> None:
        async def resolve(address: Address) -> list[str]:
            return []

        async def attempt(host: str) -> None:
            pytest.fail("never called")

        with pytest.raises(Unreachable, match=r"cannot reach a member at box\.example:4001: no answer within 5 s"):
            await try_hosts(AT, None, attempt, dial_s=5.0, resolve=resolve)

    run(main, MockClock())
