"""Releases side by side in one network: it is upgraded box by box, and who is too new or too old is told what to do."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio

from p2pserve.bootstrap import Address, PeerId, Refused
from p2pserve.bootstrap.streams.control import PROTOCOL_VERSION
from p2pserve.bootstrap.streams.transport import ConnectionHandler, PeerConnection, Transport

from .worlds import PEOPLE, Echo, World, asking, elapse, simulate, world

COUNT = 4
MORE = {"of": ["tomorrow", 1.5, None]}
GREETINGS = ("h", "w")
NEXT = PROTOCOL_VERSION + 1

Said = list[Any]  # a frame in MessagePack's types: its kind, and what that kind has
Speak = Callable[[Said], list[Said]]  # one frame of this release -> what another one sends instead


def newer(said: Said) -> list[Said]:
    """Of the same protocol version: more fields everywhere, and kinds of messages that nobody else knows."""
    if said[0] in (*GREETINGS, "x"):
        return [[*said, MORE]]
    if said[0] == "n":
        body = said[2]
        more = {**body, "tomorrow": MORE} if isinstance(body, dict) else [*body, MORE]
        return [["z", 1, MORE], ["n", "p2p.tomorrow", MORE], ["n", said[1], more, MORE]]
    return [[*said, MORE]]


def next_version(said: Said) -> list[Said]:
    """Of the next protocol version, with greetings that are still alike."""
    return [[said[0], NEXT, *said[2:5], "9.0"]] if said[0] in GREETINGS else [said]


def unlike(said: Said) -> list[Said]:
    """Of a protocol version of which only the beginning can be read."""
    return [[said[0], NEXT, MORE, "9.0"]] if said[0] in GREETINGS else [said]


class OtherRelease:
    """A connection on which another release speaks. It hears what all say."""

    def __init__(self, under: PeerConnection, speak: Speak) -> None:
        self._under, self._speak = under, speak
        self.peer, self.remote = under.peer, under.remote
        self.receive, self.admit, self.aclose = under.receive, under.admit, under.aclose

    def _frames(self, frame: bytes) -> list[bytes]:
        return [msgspec.msgpack.encode(each) for each in self._speak(msgspec.msgpack.decode(frame))]

    async def send(self, frame: bytes) -> None:
        for each in self._frames(frame):
            await self._under.send(each)

    def send_nowait(self, frame: bytes) -> None:
        for each in self._frames(frame):
            self._under.send_nowait(each)


class OtherReleaseTransport:
    """What another release runs on."""

    def __init__(self, under: Transport, speak: Speak) -> None:
        self._under, self._speak = under, speak
        self.peer_id, self.identify, self.dial_over = under.peer_id, under.identify, under.dial_over

    async def dial(self, address: Address, peer_id: PeerId) -> OtherRelease:
        return OtherRelease(await self._under.dial(address, peer_id), self._speak)

    async def serve(
        self,
        on_connection: ConnectionHandler,
        *more: Any,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async def on_other(connection: PeerConnection) -> None:
            await on_connection(OtherRelease(connection, self._speak))

        await self._under.serve(on_other, *more, task_status=task_status)


def speaking(speak: Speak) -> Callable[[Transport], Transport]:
    return lambda under: OtherReleaseTransport(under, speak)


async def check_all_talk(w: World) -> None:
    """One network, in which all ask each other."""
    w.check_agreement(range(COUNT))
    w.check_full_mesh()
    for one in range(COUNT):
        for other in range(COUNT):
            answer = await w.nodes[one].request(PEOPLE[other].peer_id, asking("echo"), Echo("hello"), 5.0)
            assert answer == Echo("hello from worker")


@pytest.mark.parametrize("order", [range(COUNT), reversed(range(COUNT))], ids=["leader first", "leader last"])
def test_a_network_is_upgraded_box_by_box(order: list[int]) -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(COUNT):
                await w.start(index)
            await elapse(10.0)
            await check_all_talk(w)
            for index in order:
                await w.nodes[index].leave()
                await elapse(1.0)
                w.kill(index)
                await elapse(3.0)
                w.check_agreement(set(range(COUNT)) - {index})
                network = await w.start(index, ask=(w.bootstrap((index + 1) % COUNT),), wrap=speaking(newer))
                network.publish("tomorrow", b"news")
                await elapse(8.0)
                await check_all_talk(w)
                for node in w.nodes.values():
                    assert network.peer_id in node.entries("tomorrow")  # kept and passed on, if not understood
                    assert node.statistics().strangers_refused == 0

    simulate(main)


@pytest.mark.parametrize("speak", [next_version, unlike])
@pytest.mark.parametrize("is_newcomer", [True, False], ids=["newcomer", "network"])
def test_another_protocol_version_is_refused_with_both_versions_and_who_is_to_be_upgraded(
    speak: Speak, is_newcomer: bool
) -> None:
    async def main() -> None:
        async with world() as w:
            later, usual = {"wrap": speaking(speak)}, {}  # type: ignore[var-annotated]
            await w.start(0, **(usual if is_newcomer else later))
            with pytest.raises(Refused) as refused:
                await w.build(1, **(later if is_newcomer else usual)).__aenter__()
            line = str(refused.value)
            assert "\n" not in line
            assert f"protocol versions {NEXT}" in line
            assert f"and {PROTOCOL_VERSION} do not understand each other" in line
            assert line.endswith(f"upgrade the box that speaks version {PROTOCOL_VERSION}")
            if is_newcomer:  # (what is the network here would itself have refused this release's greeting)
                assert w.nodes[0].statistics().members == 1

    simulate(main)
