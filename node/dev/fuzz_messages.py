"""Every message of the catalogue, made up by its type and mutated, against what decodes it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from ...bootstrap import DECODE_ERRORS, PeerId, Role
from ...bootstrap.dev.fuzz_report import ControlFuzzReport
from ...bootstrap.dev.mutations import TypeMaker, mutated_encoding
from ...bootstrap.handlers import Handlers
from ...bootstrap.methods import Method, Notice
from ...coordinator import Plan
from ...coordinator.services.catalogue import CatalogueEntry
from ...kvtransport.probing.burst_ticket import BurstTicket
from ...kvtransport.probing.figures import BoxFigures, LinkFigures
from ...kvtransport.probing.probe import BurstRequest
from ...kvtransport.wire.dial_path import DialPath
from ...kvtransport.wire.permits import Permit
from ...kvtransport.wire.tickets import LinkTicket, TransferTicket
from .. import messages, methods
from ..catalogue.messages import HostingPlan
from ..engine.protocol import KvSlice
from ..models.errors import PromptError
from ..planning.messages import PlanBundle, PlanManifest
from ..requests import acceptance
from .fuzz_planning import make_advert, make_links, make_manifest, make_plan

_encode: Final = msgspec.msgpack.Encoder().encode
_KEPT: Final = 64
_PERMIT: Final = Permit(b"p" * 16, b"r" * 32, "192.0.2.9", 9, 1 << 40, 1e9, 2e9)
_SAMPLES: Final = {
    type(sample): msgspec.to_builtins(sample, builtin_types=(bytes,))
    for sample in (
        _PERMIT,
        DialPath("192.0.2.9", 9, relay=_PERMIT, congestion="bbr"),
        LinkTicket(b"l" * 16, b"s" * 32, 600.0),
        TransferTicket(b"t" * 16, b"l" * 16, "kv4", 30.0),
        BurstTicket(b"b" * 16, b"k" * 32, 4, 1.0, 1 << 20, 0.01),
        BurstRequest("p", 4, 1.0, 1 << 20, False),
        LinkFigures(rtt_s=0.1, one_stream_gbps=0.2, capacity_gbps=1.0, usd_per_gb=0.1, reason="measured"),
        BoxFigures(up_gbps=1.0, down_gbps=1.0, relay_gbps=1.0, relay_budget_bytes=5),
        KvSlice(first_layer=3, last_layer=4, first_head=0, last_head=2),
        CatalogueEntry(name="chat", model="Qwen/Qwen3-8B", slo="5x"),
    )
}
_SHOWN: Final = 1 << 16  # bytes: nothing shows a large message, whose control characters take 40 bytes each to show
_FRESH: Final = 0.1  # of all inputs that begin with a new message: making one takes longer than mutating one

CATALOGUE: Final = tuple(each for each in vars(methods).values() if isinstance(each, Method | Notice))


def said_by_peers() -> tuple[type[msgspec.Struct], ...]:
    """Every type that a node decodes from what a peer has sent, above membership."""
    kinds: dict[type[msgspec.Struct], None] = {}
    for each in CATALOGUE:
        kinds[each.body] = None
        if isinstance(each, Method):
            kinds[each.answer] = None
    return (*kinds, messages.Advert, messages.LinkTable, PlanManifest, PlanBundle, Plan, HostingPlan)


class MessageMaker:
    """One type of message, with some that were made up for it."""

    def __init__(self, kind: type[msgspec.Struct], make: Callable[[random.Random], bytes] | None = None) -> None:
        self.kind = kind
        self.decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self._make_one = make or TypeMaker(kind, _SAMPLES).make
        self._made: list[bytes] = []

    def make(self, rng: random.Random) -> bytes:
        """One that is within its bounds."""
        if len(self._made) < _KEPT:
            self._made.append(self._make_one(rng))
            return self._made[-1]
        at = rng.randrange(_KEPT)
        if rng.random() < _FRESH:
            self._made[at] = self._make_one(rng)
        return self._made[at]


class MessageAttack:
    """One input for the decoder of one message, and for what first looks at it."""

    def __init__(self, rng: random.Random, report: ControlFuzzReport) -> None:
        self._rng = rng
        self._report = report
        # What is hardly ever right by chance begins with what is.
        makers = {
            messages.Advert: make_advert,
            messages.LinkTable: make_links,
            PlanManifest: make_manifest,
            Plan: make_plan,
        }
        self._kinds = [MessageMaker(kind, makers.get(kind)) for kind in said_by_peers()]

    def run(self) -> None:
        """One input."""
        rng = self._rng
        kind = rng.choice(self._kinds)
        data = kind.make(rng)
        if rng.random() < 0.9:
            data = mutated_encoding(rng, data)
        began = self._report.begin()
        try:
            message = kind.decoder.decode(data)
        except DECODE_ERRORS:
            self._report.refused += 1
        else:
            self._report.outcomes["messages read"] += 1
            self._look_at(message, kind.decoder, len(data))
        self._report.note(f"message {kind.kind.__name__}", time.thread_time() - began)

    def _look_at(self, message: Any, decoder: msgspec.msgpack.Decoder[Any], size: int) -> None:
        """What is taken can be shown, said again, and means the same then."""
        if size <= _SHOWN:
            repr(message)
        again = decoder.decode(_encode(message))
        if again != message and not _has_nan(message):
            raise AssertionError(f"{message!r} was read as {again!r} when it was said again")
        if isinstance(message, messages.Generate | messages.ContinueGenerate):
            try:
                acceptance.check(message if isinstance(message, messages.Generate) else message.generate)
            except PromptError:
                self._report.outcomes["requests refused"] += 1


def _has_nan(message: Any) -> bool:
    """A client may say that its temperature is not a number; the answer names the field."""
    generate = message.generate if isinstance(message, messages.ContinueGenerate) else message
    if not isinstance(generate, messages.Generate):
        return False
    numbers = (value for value in msgspec.structs.astuple(generate) if isinstance(value, float))
    return any(map(math.isnan, (*numbers, *generate.logit_bias.values())))


# -- for the control stream -------------------------------------------------------------------------------------------


def bodies_of_catalogue() -> Sequence[tuple[str, Callable[[random.Random], bytes]]]:
    """What may be asked and told, with bodies for each."""
    return [(each.name, MessageMaker(each.body).make) for each in CATALOGUE]


def add_catalogue(handlers: Handlers) -> None:
    """Handlers that take what they are asked, and answer nothing of substance."""
    for each in CATALOGUE:
        if isinstance(each, Method):
            handlers.add_request(each, _answer)
        else:
            handlers.add_notice(each, _take)


async def _answer(peer: PeerId, role: Role, body: msgspec.Struct) -> msgspec.Struct:
    return messages.Opened()


def _take(peer: PeerId, role: Role, body: msgspec.Struct) -> None:
    """It was decoded: nothing more is to be done."""
