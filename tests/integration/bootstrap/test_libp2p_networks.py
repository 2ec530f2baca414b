"""Networks over real libp2p on loopback, in one process and in several."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import trio

from p2pserve.bootstrap import (
    Address,
    Bootstrap,
    Identity,
    IdentityInUse,
    MemberState,
    Network,
    NetworkKey,
    NetworkSettings,
    PeerId,
    PeerLost,
    Refused,
    RequestTimeout,
    Role,
    Unreachable,
)
from p2pserve.bootstrap.streams.framed import FramedConnection
from p2pserve.bootstrap.streams.libp2p_host import Libp2pTransport

from .libp2p_worlds import BRISK, KEY, PATIENT, Echo, asking, build, run, telling, until

pytestmark = pytest.mark.beside


def test_three_join_talk_and_elect() -> None:
    async def main() -> None:
        async with build(None) as one, build(one) as two, build(one) as three:
            everybody = (one, two, three)
            for network in everybody:
                network.publish("load", network.peer_id.encode())
            await until(lambda: all(len(network.entries("load")) == 3 for network in everybody))
            await until(lambda: all(network.coordinator is not None for network in everybody))
            assert len({network.coordinator for network in everybody}) == 1
            assert await two.request(three.peer_id, asking("echo"), Echo("hello"), 30) == Echo("hello")
            heard: list[tuple[PeerId, Role, str]] = []
            three.on_notice(telling("tell"), lambda peer, role, body: heard.append((peer, role, body.text)))
            two.notify(three.peer_id, telling("tell"), Echo("psst"))
            await until(lambda: heard)
            assert heard == [(two.peer_id, Role.WORKER, "psst")]
            await until(lambda: all(m.rtt_s is not None for m in one.members() if m.peer_id != one.peer_id))
            for network in everybody:
                network.check_integrity()
            await three.leave()
            await until(lambda: len(one.entries("load")) == 2)
            assert {m.state for m in one.members() if m.peer_id == three.peer_id} == {MemberState.LEFT}

    run(main)


def test_hundreds_of_timeouts_leave_the_connection_healthy() -> None:
    async def main() -> None:
        async with build(None) as one, build(one) as two:

            async def hang(peer: PeerId, role: Role, body: Echo) -> Echo:
                await trio.sleep(0.3)
                return body

            one.handle(asking("hang"), hang)

            async def give_up() -> None:
                for _ in range(20):
                    with pytest.raises(RequestTimeout):
                        await two.request(one.peer_id, asking("hang"), Echo("x" * 1000), 0.01)

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(give_up)
            assert await two.request(one.peer_id, asking("echo"), Echo("fine"), 30) == Echo("fine")

    run(main)


class RecordingTransport(Libp2pTransport):
    """One that remembers whom it dialled."""

    dialled: FramedConnection | None = None

    async def dial(self, address: Address, peer_id: PeerId) -> FramedConnection:
        self.dialled = await super().dial(address, peer_id)
        return self.dialled


def test_a_peer_that_stops_reading_is_disconnected_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        hurried = replace(PATIENT, crossing_s=0.3)
        async with (
            build(None, settings=hurried) as one,
            build(one, settings=hurried, transport=RecordingTransport) as two,
        ):
            heard: list[int] = []
            lost: list[PeerId] = []
            two.on_notice(telling("tell"), lambda peer, role, body: heard.append(len(body.text)))
            one.on_peer_lost(lost.append)
            two.on_peer_lost(lost.append)
            await until(lambda: one.connected() and two.connected())
            await trio.sleep(0.5)

            async def stuck() -> bytes:
                await trio.sleep_forever()
                raise AssertionError

            assert isinstance(two.transport, RecordingTransport)
            monkeypatch.setattr(two.transport.dialled, "receive", stuck)

            def tell(count: int) -> None:
                for _ in range(count):
                    one.notify(two.peer_id, telling("tell"), Echo("x" * 60_000))

            with pytest.raises(PeerLost, match="does not read its messages"):
                tell(5000)
            await until(lambda: sorted(lost) == sorted([one.peer_id, two.peer_id]))
            heard.clear()
            await until(lambda: one.connected() and two.connected())
            await trio.sleep(0.2)
            one.notify(two.peer_id, telling("tell"), Echo("again"))
            await until(lambda: heard == [5])

    run(main)


def test_a_wrong_token_is_refused_by_the_other_side() -> None:
    async def main() -> None:
        async with build(None) as one:
            here = Bootstrap(one.address.host, one.address.port, one.peer_id)
            other_key = NetworkKey.generate()
            stranger = build(here, key=other_key)  # one that believes in its own network
            with pytest.raises(Refused, match="belongs to another network"):
                async with stranger:
                    pass
            assert one.statistics().strangers_refused == 1
            assert one.statistics().members == 1

    run(main)


def test_nobody_answers_at_the_bootstrap() -> None:
    async def main() -> None:
        nobody = Bootstrap("127.0.0.1", 1, Identity.generate().peer_id)
        with pytest.raises(Unreachable, match=r"at 127\.0\.0\.1:1: .*connection refused; check"):
            async with build(nobody, settings=replace(PATIENT, join_s=1.0)):
                pass

    run(main)


NODE = """
import random, sys, time, trio
from p2pserve.bootstrap import *
from p2pserve.bootstrap import Libp2pTransport, Network
key, here, token = sys.argv[1], Address("127.0.0.1", 0), sys.argv[2]
async def main():
    identity = Identity.generate()
    network = Network(transport=Libp2pTransport(identity, here, here), identity=identity, token=token,
        network_key_public=bytes.fromhex(key), role=Role.WORKER, announce=here,
        bootstraps=JoinToken.parse(token).bootstraps, rng=random.Random())
    async with network:
        network.publish("load", b"x")
        print(identity.peer_id, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@contextmanager
def node_process(bootstrap: Network) -> Iterator[subprocess.Popen[str]]:
    here = Bootstrap(bootstrap.address.host, bootstrap.address.port, bootstrap.peer_id)
    token = KEY.issue((here,), Role.WORKER, time.time() + 60)
    arguments = [sys.executable, "-c", NODE, KEY.public.hex(), token]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize(("how", "settings"), [(signal.SIGKILL, PATIENT), (signal.SIGSTOP, BRISK)])
def test_the_death_of_a_process_is_noticed(how: signal.Signals, settings: NetworkSettings) -> None:
    """Of one that is killed its connections tell; of one that hangs, its silence."""

    async def main() -> None:
        async with build(None, settings=settings) as one, build(one, settings=settings) as two:
            with node_process(one) as process:
                await until(lambda: len(one.entries("load")) == len(two.entries("load")) == 1)
                await until(lambda: len(one.connected()) == len(two.connected()) == 2)
                (victim,) = one.entries("load")
                lost: list[PeerId] = []
                two.on_peer_lost(lost.append)
                process.send_signal(how)
                await until(lambda: not one.entries("load") and not two.entries("load"))
                assert victim in lost
                assert settings is BRISK or lost == [victim]

    run(main)


def test_a_member_is_joined_by_its_address_and_a_clone_is_refused() -> None:
    async def main() -> None:
        async with build(None) as one, build(one) as two:
            await until(two.connected)
            anybody = Bootstrap(two.address.host, two.address.port)
            async with build(anybody, token=KEY.issue((), Role.WORKER, time.time() + 60)) as three:
                await until(lambda: len(one.connected()) == len(three.connected()) == 2)
                clone = build(one, identity=three.identity)
                with pytest.raises(IdentityInUse, match=r"delete identity\.key"):
                    async with clone:
                        pass
                assert three.connected() == {one.peer_id, two.peer_id}

    run(main)
