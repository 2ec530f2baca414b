"""Frames: any cut of the stream gives the same frames; the queue keeps its bounds."""

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.bootstrap.errors import PeerLost, ProtocolError
from p2pserve.bootstrap.streams.frames import MAX_FRAME, FrameDecoder, FrameQueue, encode_frame


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), max_size=20))
def test_any_cut_gives_the_same_frames(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(encode_frame, frames))
    decoder, found = FrameDecoder(), []
    for cut in [*cuts, len(stream)]:
        found += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert found == frames


def test_an_absurd_length_is_refused_at_once() -> None:
    with pytest.raises(ProtocolError, match="the limit is 4194304"):
        FrameDecoder().feed(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="send bulk data over the data sockets"):
        encode_frame(bytes(MAX_FRAME + 1))


def test_the_bounds_can_be_raised() -> None:
    decoder = FrameDecoder()
    decoder.max_frame = 3
    assert decoder.feed(encode_frame(b"abc")) == [b"abc"]
    with pytest.raises(ProtocolError, match="4 bytes; the limit is 3"):
        decoder.feed(encode_frame(b"abcd")[:4])

    async def main() -> None:
        queue = FrameQueue(max_frames=1)
        queue.put_nowait(b"a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.put, b"b")
            await trio.testing.wait_all_tasks_blocked()
            queue.resize(2)
        assert len(queue) == 2

    trio.run(main)


def test_the_queue_is_bounded_in_frames_and_bytes() -> None:
    few = FrameQueue(max_frames=2)
    few.put_nowait(b"a")
    few.put_nowait(b"b")
    with pytest.raises(trio.WouldBlock):
        few.put_nowait(b"c")
    small = FrameQueue(max_bytes=10)
    small.put_nowait(b"x" * 50)  # one too large is better than one that waits for ever
    with pytest.raises(trio.WouldBlock):
        small.put_nowait(b"y")


def test_a_closed_queue_can_be_emptied_but_not_filled() -> None:
    queue = FrameQueue()
    queue.put_nowait(b"a")
    queue.close("over")
    queue.close("said twice")
    with pytest.raises(PeerLost, match="over"):
        queue.put_nowait(b"b")

    async def take_all() -> None:
        assert await queue.take() == b"a"
        with pytest.raises(PeerLost, match="over"):
            await queue.take()

    trio.run(take_all)


def test_batches_keep_their_bounds() -> None:
    async def main() -> list[list[bytes]]:
        queue = FrameQueue()
        for frame in (b"aaa", b"bbb", b"ccc", b"d"):
            queue.put_nowait(frame)
        return [await queue.take_batch(max_frames=3, max_bytes=6) for _ in range(2)]

    assert trio.run(main) == [[b"aaa", b"bbb"], [b"ccc", b"d"]]


def test_a_cancelled_wait_loses_nothing() -> None:
    async def main() -> None:
        queue = FrameQueue(max_frames=1)
        queue.put_nowait(b"a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.put, b"never")
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.put, b"b")
            assert [await queue.take(), await queue.take()] == [b"a", b"b"]
        assert len(queue) == 0

    trio.run(main)
