"""Who may come in, and what the others are told."""

from collections.abc import Callable

import msgspec
import pytest
import trio

from p2pserve.bootstrap import (
    Address,
    Identity,
    JoinToken,
    NetworkKey,
    PeerLost,
    PortInUse,
    Refused,
    Role,
    TokenError,
    Unreachable,
)
from p2pserve.bootstrap.streams.control import PROTOCOL_VERSION, Hello, Rejected, decode_greeting, encode_greeting
from p2pserve.bootstrap.streams.transport import PeerConnection
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, MemberRecord, sign_entry

from .worlds import KEY, PEOPLE, World, elapse, simulate, world

OTHER_KEY = NetworkKey(b"x" * 32)


@pytest.mark.parametrize(
    ("token", "role", "error", "reason"),
    [
        (lambda w: w.token(key=OTHER_KEY), Role.WORKER, TokenError, "another network"),
        (lambda w: w.token(expires_at=900.0), Role.WORKER, TokenError, "expired"),
        (lambda w: w.token(Role.CLIENT), Role.WORKER, TokenError, "for the role 'client'"),
        (lambda w: "nonsense", Role.WORKER, TokenError, "malformed"),
    ],
)
def test_a_bad_token_is_told_before_anything_is_dialled(
    token: Callable[[World], str], role: Role, error: type[Exception], reason: str
) -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            dials = w.air.statistics().dials
            with pytest.raises(error, match=reason):
                await w.start(1, token=token(w), role=role)
            assert w.air.statistics().dials == dials

    simulate(main)


async def dial(w: World, identity: Identity) -> PeerConnection:
    """A connection to the bootstrap, before any greeting."""
    transport = w.air.transport(identity, Address("192.0.2.9", 0))

    async def nobody(connection: PeerConnection) -> None:
        await connection.aclose()

    await w.nursery.start(transport.serve, nobody)
    return await transport.dial(Address("192.0.2.1", 4000), PEOPLE[0].peer_id)


async def knock(w: World, identity: Identity, hello: bytes) -> str:
    """Greet the bootstrap by hand; returns the reason of its refusal."""
    connection = await dial(w, identity)
    await connection.send(hello)
    answer = decode_greeting(await connection.receive())
    assert isinstance(answer, Rejected)
    with pytest.raises(PeerLost):
        await connection.receive()
    return answer.reason


def hello(identity: Identity, token: str | None, *, version: int = PROTOCOL_VERSION, role: Role = Role.WORKER) -> bytes:
    credential = JoinToken.parse(token).credential(identity.peer_id) if token else None
    payload = msgspec.msgpack.encode(MemberRecord(role, "192.0.2.9", 9, credential))
    return encode_greeting(Hello(version, KEY.public, sign_entry(identity, MEMBER_KIND, 1, 1, payload)))


def test_strangers_are_refused_with_the_reason() -> None:
    thief, stranger = PEOPLE[8], PEOPLE[9]

    async def main() -> None:
        async with world() as w:
            await w.start(0)
            stolen = hello(PEOPLE[1], w.token())
            for greeting, reason in (
                (hello(stranger, None), "no join token was shown"),
                (hello(stranger, w.token(key=OTHER_KEY)), "another network"),
                (hello(stranger, w.token(expires_at=900.0)), "expired"),
                (hello(stranger, w.token(Role.CLIENT)), "for the role 'client', not 'worker'"),
                (hello(stranger, w.token(), version=1), "protocol versions 1 and"),
                (stolen, "not its own"),
                (b"\xc1garbage", None),
            ):
                if reason is None:
                    with pytest.raises(PeerLost):
                        await knock(w, thief, greeting)
                else:
                    assert reason in await knock(w, Identity.generate() if greeting is stolen else stranger, greeting)
                w.air.kill(stranger.peer_id)
            assert w.nodes[0].statistics().members == 1
            assert w.nodes[0].statistics().strangers_refused == 7

    simulate(main)


def test_a_stranger_may_send_little() -> None:
    async def main() -> None:
        async with world() as w:
            node = await w.start(0)
            with pytest.raises(PeerLost):
                await knock(w, PEOPLE[8], bytes(200_000))
            assert node.statistics().strangers_refused == 1

    simulate(main)


async def hung_up(frame: bytes) -> None:
    raise PeerLost("the other side closed the connection")


@pytest.mark.parametrize("role", [Role.CLIENT, Role.WORKER])
def test_a_client_that_hangs_up_while_it_is_let_in_keeps_no_place(role: Role) -> None:
    """Otherwise a holder of the token could use it up for all others, a greeting for each place."""

    async def main() -> None:
        async with world() as w:
            await w.start(0)
            token = KEY.issue((w.bootstrap(),), role, 1e6, uses=1)
            for seed in range(5):
                guest = Identity(bytes([100 + seed]) * 32)
                connection = await dial(w, guest)
                w.air.end_of(PEOPLE[0].peer_id, guest.peer_id).send = hung_up  # type: ignore[method-assign]
                await connection.send(hello(guest, token, role=Role.CLIENT))
                await elapse(0.1)
                w.air.kill(guest.peer_id)
            await w.start(3, role=Role.CLIENT, token=token)
            assert w.nodes[0].statistics().members == 2

    simulate(main)


def test_who_was_let_in_may_say_all_it_has_at_once() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            newcomer = w.build(1)
            for index in range(3):
                newcomer.publish(f"kind{index}", bytes(60_000))
            async with newcomer:
                await elapse(0.2)
                assert len(w.nodes[0].entries("kind2")[newcomer.peer_id]) == 60_000

    simulate(main)


def test_a_dialler_hears_why_it_was_refused() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            await w.nodes[0].leave()
            with pytest.raises(Refused, match="leaving the network; join through another one"):
                await w.start(1)

    simulate(main)


def test_nobody_at_the_bootstrap_address() -> None:
    async def main() -> None:
        async with world() as w:
            before = trio.current_time()
            with pytest.raises(Unreachable, match=r"nobody listens at 192\.0\.2\.1:4000"):
                await w.start(1)
            assert trio.current_time() - before < 7.0

    simulate(main)


def test_the_port_is_taken() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            with pytest.raises(PortInUse, match="in use"):
                await w.start(0)

    simulate(main)


def test_expiry_bounds_joining_and_not_staying() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(3):
                await w.start(index, token=w.token(expires_at=1100.0))
            await elapse(200)
            w.air.drop_connections(PEOPLE[1].peer_id, PEOPLE[2].peer_id)
            await elapse(5)
            w.check_agreement(range(3))
            w.check_full_mesh()
            with pytest.raises(TokenError, match="expired"):
                await w.start(3, token=w.token(expires_at=1100.0))

    simulate(main)
