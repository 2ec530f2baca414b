"""A member that lies, as a process: it has a worker's token, and says of itself and of the plan whatever it likes.

It publishes forged adverts, which make it look like the best box there is, plans although it does not lead, and values
that no box has. Whoever asks it for work is refused, or accepted and then told nothing, or told wrong tokens: always
`LIE`, so that its answers are told from honest ones that are wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, final

import msgspec
import trio

from ...bootstrap import Address, Identity, JoinToken, NetworkError, PeerId, RemoteError, Role, parse_address
from ...bootstrap.network import Network
from ...node import messages as m
from ...node.methods import ANSWER, DECODE_OPEN, GENERATE, GENERATE_CONTINUE, PREFILL_OPEN, TOKENS
from .records import LIE

TOKEN: Final = "P2PSERVE_TOKEN"
AGAIN_S: Final = 1.0  # between two lies to everybody
SOON_S: Final = 0.05  # from an acceptance to wrong tokens
WORK: Final = 16  # wrong tokens of an answer
JUNK: Final[tuple[object, ...]] = (-1, 2**53, 2**64 - 1, 1e308, 5e-324, "", "x" * 64, "\x1b[2J", None, [], {}, True)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def forge_advert(rng: random.Random, honest: bytes) -> bytes:
    """Another box's advert, as of one that is ready, idle and fast."""
    said = _decode(honest)
    if isinstance(said.get("engine"), dict):
        said["engine"] |= {"state": "ready", "tflops": 1e4, "memory_gbps": 1e5, "kv_tokens": 10**7, "max_requests": 512}
    said |= {"draining": False, "hung": False, "profile": None}
    said["phase"] = rng.choice(("prefill", "decode", "mixed"))
    said["stats"] = {"running": 0, "waiting": 0, "kv_usage": 0.0, "kv_free_tokens": 10**7}
    return _encode(said)


def spoil(rng: random.Random, value: Any) -> Any:
    """A copy that has a value which no box has, somewhere inside."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        return {**value, key: spoil(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], spoil(rng, value[at]), *value[at + 1 :]]
    return rng.choice(JUNK)


@final
class Liar:
    """What it says and answers."""

    def __init__(self, network: Network, nursery: trio.Nursery, rng: random.Random) -> None:
        self._network = network
        self._nursery = nursery
        self._rng = rng
        network.handle(GENERATE, self._on_generate)
        network.handle(GENERATE_CONTINUE, self._on_continue)
        network.handle(DECODE_OPEN, self._on_decode)
        network.handle(PREFILL_OPEN, self._on_prefill)

    def __repr__(self) -> str:
        return f"<Liar {self._network!r}>"

    async def publish(self) -> None:
        """Lie to everybody, again and again."""
        while True:
            kind = self._rng.choice((m.ADVERT, m.ADVERT, m.ADVERT, m.PLAN, m.LINKS))
            others = sorted(self._network.entries(kind).items())
            if others:
                honest = self._rng.choice(others)[1]
                is_forged = kind == m.ADVERT and self._rng.random() < 0.7
                with suppress(NetworkError):
                    self._network.publish(kind, self._forge(honest) if is_forged else self._spoil(honest))
            await trio.sleep(AGAIN_S)

    def _forge(self, honest: bytes) -> bytes:
        return forge_advert(self._rng, honest)

    def _spoil(self, honest: bytes) -> bytes:
        try:
            return _encode(spoil(self._rng, _decode(honest)))
        except msgspec.MsgspecError:
            return honest[::-1]

    async def _on_generate(self, peer: PeerId, role: Role, body: m.Generate) -> m.Generating:
        wrong = m.AnswerUpdate(request=body.request, tokens=(LIE,) * WORK, finish="length")
        self._answer(peer, wrong)
        return m.Generating(service=body.service or "lies", prompt_tokens=1)

    async def _on_continue(self, peer: PeerId, role: Role, body: m.ContinueGenerate) -> m.Generating:
        return await self._on_generate(peer, role, body.generate)

    async def _on_decode(self, peer: PeerId, role: Role, body: m.DecodeOpen) -> m.DecodeOpened:
        self._answer(peer, m.Tokens(request=body.request, tokens=(LIE,) * WORK, finish="length"))
        return m.DecodeOpened()

    async def _on_prefill(self, peer: PeerId, role: Role, body: m.PrefillOpen) -> m.Opened:
        self._answer(peer, m.Tokens(request=body.request, tokens=(LIE,)))
        return m.Opened()

    def _answer(self, peer: PeerId, wrong: m.AnswerUpdate | m.Tokens) -> None:
        """Refuse, or say nothing, or what is wrong. Raises RemoteError."""
        match self._rng.randrange(3):
            case 0:
                raise RemoteError("internal", "it does not feel like it")
            case 1:
                self._nursery.start_soon(self._tell, peer, wrong)

    async def _tell(self, peer: PeerId, wrong: m.AnswerUpdate | m.Tokens) -> None:
        await trio.sleep(SOON_S)
        with suppress(NetworkError):
            if isinstance(wrong, m.Tokens):
                self._network.notify(peer, TOKENS, wrong)
            else:
                self._network.notify(peer, ANSWER, wrong)


async def run_liar(text: str, here: Address, seed: int) -> None:
    """Join, and lie until cancelled. Raises NetworkError."""
    from ...bootstrap.streams.libp2p_host import Libp2pTransport  # half a second, for members alone

    token, identity = JoinToken.parse(text), Identity.generate()
    network = Network(
        transport=Libp2pTransport(identity, here, here),
        identity=identity,
        token=text,
        network_key_public=token.network,
        role=token.role,
        announce=here,
        bootstraps=token.bootstraps,
        rng=random.Random(seed),
    )
    async with trio.open_nursery() as nursery:
        liar = Liar(network, nursery, random.Random(seed))
        async with network:
            sys.stdout.write(f"{identity.peer_id}\n")
            sys.stdout.flush()
            await liar.publish()


def main(argv: Sequence[str] | None = None) -> int:
    """The command: its token is in the environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--listen", type=parse_address, required=True)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args(argv)
    trio.run(run_liar, os.environ[TOKEN], given.listen, given.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
