"""What a node tells of its engine's prefix cache, and a gateway that asks, on a virtual clock."""

from __future__ import annotations

import msgspec
import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import PeerId, RemoteError, RequestTimeout, Role
from p2pserve.coordinator.prefixes.held import MAX_NAMES, PrefixNews, PrefixVersion, pack_names, unpack_names
from p2pserve.node.engine.protocol import EngineReady, HeldBlocks
from p2pserve.node.prefixes.asking import INTERVAL_S, SILENT_S, USED_S, PrefixWatch
from p2pserve.node.prefixes.messages import PrefixAnswer, PrefixQuery
from p2pserve.node.prefixes.telling import PrefixDesk

READY = EngineReady(
    pid=1, engine="e", device="cpu", dtype="float32", layers=4, max_model_len=512, kv_tokens=8192, block_tokens=16
)
G, A, B = PeerId("gateway"), PeerId("a"), PeerId("b")


def desk_of(*names: int) -> PrefixDesk:
    desk = PrefixDesk("chat")
    desk.use(READY)
    desk.note(HeldBlocks(held=pack_names(names)))
    return desk


async def ask(desk: PrefixDesk, heard: PrefixVersion | None = None) -> PrefixNews | None:
    return (await desk.answer(G, Role.WORKER, PrefixQuery(service="chat", heard=heard))).news


def test_a_desk_tells_differences_of_one_engine_and_all_of_the_next() -> None:
    async def main() -> None:
        desk = desk_of(1, 2)
        first = await ask(desk)
        assert first is not None
        assert (first.since, first.block_tokens, unpack_names(first.held)) == (None, 16, [1, 2])
        assert await ask(desk, first.version) is None
        desk.note(HeldBlocks(held=pack_names([3]), lost=pack_names([1])))
        second = await ask(desk, first.version)
        assert second is not None
        assert (second.since, unpack_names(second.held), unpack_names(second.lost)) == (first.version, [3], [1])
        desk.use(READY)
        third = await ask(desk, second.version)
        assert third is not None
        assert (third.since, third.held) == (None, b"")

    trio.run(main)


@pytest.mark.parametrize("ready", [None, msgspec.structs.replace(READY, kv_tokens=0)], ids=["no engine", "a stage"])
def test_without_an_engine_that_schedules_there_is_nothing_to_tell(ready: EngineReady | None) -> None:
    async def main() -> None:
        desk = desk_of(1)
        desk.use(ready)
        desk.note(HeldBlocks(held=pack_names([1])))
        with pytest.raises(RemoteError, match="no engine"):
            await ask(desk)

    trio.run(main)


class Peers:
    """A messenger to nodes that answer by a desk, with an error, or with what they like."""

    peer_id = G

    def __init__(self, **answers: PrefixDesk | Exception | PrefixNews) -> None:
        self.answers = {PeerId(peer): answer for peer, answer in answers.items()}
        self.asked: list[tuple[float, PeerId, PrefixVersion | None]] = []

    async def request(self, peer: PeerId, method: object, body: PrefixQuery, timeout: float) -> PrefixAnswer:
        self.asked.append((trio.current_time(), peer, body.heard))
        answer = self.answers[peer]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, PrefixNews):
            return PrefixAnswer(news=answer)
        return await answer.answer(G, Role.WORKER, body)

    def times(self, peer: PeerId) -> int:
        return sum(each == peer for _, each, _ in self.asked)


async def elapse(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def watched(peers: Peers, work: object) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            watch = PrefixWatch(peers, "chat", lambda: list(peers.answers))  # type: ignore[arg-type]
            nursery.start_soon(watch.run)
            await work(watch)  # type: ignore[operator]
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def held(watch: PrefixWatch, *names: int) -> dict[str, int]:
    return watch.known.find_named(lambda _: names, trio.current_time())


def test_a_gateway_hears_what_changes_and_asks_no_more_when_nobody_comes() -> None:
    desk = desk_of(1, 2)
    peers = Peers(a=desk)

    async def work(watch: PrefixWatch) -> None:
        await elapse(100.0)
        assert peers.asked == []
        watch.note_use(trio.current_time())
        await elapse(0.1)
        assert held(watch, 1, 2, 3) == {"a": 32}
        desk.note(HeldBlocks(held=pack_names([3])))
        await elapse(INTERVAL_S)
        assert held(watch, 1, 2, 3) == {"a": 48}
        await elapse(2 * USED_S)
        asked = len(peers.asked)
        assert asked <= USED_S / INTERVAL_S + 1
        await elapse(100.0)
        assert len(peers.asked) == asked

    watched(peers, work)


def test_one_that_does_not_answer_does_not_keep_others_from_being_heard() -> None:
    peers = Peers(a=RequestTimeout("a did not answer"), b=desk_of(1))

    async def work(watch: PrefixWatch) -> None:
        watch.note_use(trio.current_time())
        await elapse(3.5 * INTERVAL_S)
        assert held(watch, 1) == {"b": 16}
        assert peers.times(A) == peers.times(B) == 4

    watched(peers, work)


def test_one_of_an_earlier_release_is_asked_seldom() -> None:
    peers = Peers(a=RemoteError("unknown_method", "prefixes"), b=desk_of(1))

    async def work(watch: PrefixWatch) -> None:
        for _ in range(int(1.5 * SILENT_S)):
            watch.note_use(trio.current_time())
            await elapse(1.0)
        assert peers.times(A) == 2
        assert peers.times(B) >= SILENT_S

    watched(peers, work)


def test_one_whose_engine_has_gone_holds_nothing_and_one_that_has_left_is_forgotten() -> None:
    desk = desk_of(1)
    peers = Peers(a=desk, b=desk_of(1))

    async def work(watch: PrefixWatch) -> None:
        watch.note_use(trio.current_time())
        await elapse(0.1)
        assert held(watch, 1) == {"a": 16, "b": 16}
        desk.use(None)
        await elapse(INTERVAL_S)
        assert held(watch, 1) == {"b": 16}
        del peers.answers[B]
        await elapse(INTERVAL_S)
        assert held(watch, 1) == {}

    watched(peers, work)


def test_one_that_never_says_what_follows_from_before_is_asked_for_all_each_time() -> None:
    """It changes what it says it had said; nothing is kept of it, and others are as before."""
    lying = PrefixNews(
        version=PrefixVersion(1, 7), since=PrefixVersion(1, 6), block_tokens=16, held=pack_names(range(MAX_NAMES))
    )
    peers = Peers(a=lying, b=desk_of(1))

    async def work(watch: PrefixWatch) -> None:
        watch.note_use(trio.current_time())
        await elapse(3.5 * INTERVAL_S)
        assert held(watch, 1) == {"b": 16}
        assert [heard for _, peer, heard in peers.asked if peer == A] == [None] * 4

    watched(peers, work)
