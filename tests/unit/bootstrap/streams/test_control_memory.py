"""What a request keeps of its frame while its handler runs: nothing, or peers could fill the memory with what waits."""

import tracemalloc

import msgspec
import trio
import trio.testing
from trio.testing import MockClock

from p2pserve.bootstrap import Address, Identity, PeerId, Role
from p2pserve.bootstrap.handlers import Handlers
from p2pserve.bootstrap.methods import EVERYONE, Method
from p2pserve.bootstrap.streams.control import ControlStream
from p2pserve.bootstrap.streams.transport import PeerConnection
from p2pserve.bootstrap.testing import MemoryNetwork

NEAR, FAR = Identity(b"a" * 32), Identity(b"b" * 32)
SIZE, COUNT = 1 << 20, 20


class LongText(msgspec.Struct, frozen=True):
    text: str


KEEP = Method("keep", LongText, LongText, EVERYONE)


def test_a_frame_is_dropped_when_it_has_been_decoded() -> None:
    async def wait(peer: PeerId, role: Role, body: LongText) -> LongText:
        del body  # the handler may keep what it needs
        await trio.sleep_forever()
        raise AssertionError

    handlers = Handlers()
    handlers.add_request(KEEP, wait)
    arrived: list[PeerConnection] = []

    async def keep(connection: PeerConnection) -> None:
        connection.admit()  # or its frames may have 128 KiB
        arrived.append(connection)
        await trio.sleep_forever()

    def stream(connection: PeerConnection) -> ControlStream:
        return ControlStream(
            connection,
            serve=lambda method, body: handlers.serve(FAR.peer_id, Role.CLIENT, method, body),
            notice=lambda method, body: None,
        )

    async def main() -> None:
        air = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            address = await nursery.start(air.transport(FAR, Address("192.0.2.2", 4001)).serve, keep)
            dialling = air.transport(NEAR, Address("192.0.2.1", 4001))
            await nursery.start(dialling.serve, keep)
            near = stream(await dialling.dial(address, FAR.peer_id))
            await trio.testing.wait_all_tasks_blocked()
            far = stream(arrived[0])
            nursery.start_soon(near.run)
            nursery.start_soon(far.run)
            body = msgspec.msgpack.encode(LongText("x" * SIZE))  # shared by all who ask
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(COUNT):
                nursery.start_soon(near.request, KEEP.name, body, 1000.0)
                await trio.testing.wait_all_tasks_blocked()
            after, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert far.statistics().serving == COUNT
            assert after - before < 2 * SIZE
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
