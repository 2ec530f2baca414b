"""Members of a network that say anything, under valid signatures, against the machine of one node.

Two workers and a client have turned hostile: they hold certificates, and sign what they like. The
node under attack also has sessions with honest members. After each attack: nobody honest was
expelled or hung up on, nobody leads who may not, what is held is bounded, and the table agrees with
itself.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final

import msgspec

from ..errors import DECODE_ERRORS, ProtocolError, TokenError
from ..members.admission import Admission
from ..members.election import CLAIM_KIND, encode_claim
from ..members.leading import OBJECTION_KIND, encode_objection
from ..members.liveness import HEARS_KIND, encode_heard
from ..members.neighbours import Contacts
from ..members.peering import Actions, Peering
from ..members.states import Compare, EntryRules, GossipMessage, HeldClaim, Holding, NetworkState, Part, Summary, Tell
from ..members.table import BEAT_KIND, MAX_LIES, MAX_ORIGIN_BYTES
from ..settings import NetworkSettings
from ..streams.control import PROTOCOL_VERSION, Hello
from ..trust.entries import MAX_COUNTER, MEMBER_KIND, Entry, Lie, MemberRecord, is_sound, sign_entry
from ..trust.identity import Identity, NetworkKey
from ..trust.keys import PeerId
from ..trust.orders import Orders, Renewal, SignedOrders, sign_orders
from ..trust.tokens import Bootstrap, JoinToken, Role
from .fuzz_report import ControlFuzzReport
from .mutations import mutated_bytes, mutated_encoding

_KEY: Final = NetworkKey(b"n" * 32)
_FOREIGN: Final = NetworkKey(b"x" * 32)
_INPUTS: Final = 60  # of one attack
_COUNTERS: Final = (1, 1, 2, 3, 5, 1000, 2**31, 2**53 - 1, MAX_COUNTER)
_STEPS_S: Final = (0.0, 0.0, 0.01, 0.3, 1.0, 3.5, 40.0)
_encode: Final = msgspec.msgpack.Encoder().encode
READ_BY_MEMBERS: Final[tuple[type[msgspec.Struct], ...]] = (Tell, Summary, Compare, Part, Hello, NetworkState)
"""What members decode here of what others say, and of what they kept themselves."""

_decoders: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in READ_BY_MEMBERS
}

Payload = Callable[[random.Random], bytes]


def _sign(peer: str, payload: bytes) -> bytes:
    return blake2b(payload, digest_size=64, key=peer.encode()[:64]).digest()


class _QuickIdentity(Identity):
    """One whose signatures cost a hundredth of real ones; only the fuzzer's own check accepts them."""

    def sign(self, payload: bytes) -> bytes:
        return _sign(self.peer_id, payload)


def _is_sound(entry: Entry) -> bool:
    return is_sound(entry, lambda peer, payload, signature: _sign(peer, payload) == signature)


_PEOPLE: Final = sorted((_QuickIdentity(bytes([n]) * 32) for n in range(1, 9)), key=lambda each: each.peer_id)
_REAL: Final = {who.peer_id: Identity(who.seed) for who in _PEOPLE}
_ME, *_OTHERS = (_PEOPLE[3], *_PEOPLE[:3], *_PEOPLE[4:])
_HONEST, _HOSTILE, _CLIENT, _STRANGER = _OTHERS[:3], _OTHERS[3:5], _OTHERS[5], _OTHERS[6]
_TOKENS: Final = {lead: JoinToken.parse(_KEY.issue((), Role.WORKER, 2e9, lead=lead, uses=64)) for lead in (False, True)}
_CLIENT_TOKEN: Final = JoinToken.parse(_KEY.issue((), Role.CLIENT, 2e9, uses=64))
_FOREIGN_TOKEN: Final = JoinToken.parse(_FOREIGN.issue((), Role.WORKER, 2e9))
_LEADING: Final = frozenset({_ME.peer_id, _HONEST[0].peer_id, _HONEST[1].peer_id, _HOSTILE[0].peer_id})


def _token_of(who: Identity) -> JoinToken:
    if who is _CLIENT:
        return _CLIENT_TOKEN
    return _FOREIGN_TOKEN if who is _STRANGER else _TOKENS[who.peer_id in _LEADING]


def _record_of(who: Identity) -> bytes:
    token = _token_of(who)
    port = 4000 + _PEOPLE.index(who)  # type: ignore[arg-type]
    return _encode(MemberRecord(token.role, "192.0.2.1", port, token.credential(who.peer_id)))


_RECORDS: Final = {who.peer_id: _record_of(who) for who in _PEOPLE}
_ORDERS: Final = tuple(
    sign_orders(_KEY, orders)
    for orders in (
        Orders(number=1),
        Orders(number=2, revoked=("f" * 16,)),
        Orders(number=3, revoked=(_CLIENT_TOKEN.grant.certificate,)),
        Orders(MAX_COUNTER, renewed={"0" * 16: Renewal(b"\xc1", b"s" * 64)}),
    )
)
_FORGED_ORDERS: Final = SignedOrders(_ORDERS[0].payload, b"s" * 64)


def membership_payloads() -> dict[str, Payload]:
    """What members say of themselves, honest: by kind."""
    places = [each.peer_id for each in _PEOPLE]
    return {
        MEMBER_KIND: lambda rng: _RECORDS[rng.choice(_PEOPLE).peer_id],
        CLAIM_KIND: lambda rng: encode_claim(rng.choice(_COUNTERS), yielded=rng.random() < 0.2),
        HEARS_KIND: lambda rng: encode_heard(rng.sample(places, rng.randrange(8))),
        BEAT_KIND: lambda rng: b"",
        OBJECTION_KIND: lambda rng: encode_objection(rng.choice(places), rng.choice(_COUNTERS)),
        "newer": lambda rng: rng.randbytes(rng.choice((0, 1, 100, 65536))),
    }


@dataclass
class MemberAttack:
    """One node under attack, from its first session to the last check.

    Args:
        payloads: what members say, by kind; half of it is mutated before it is signed.
        on_entries: looks at what the node holds by kind, and at who leads, after every tick.
    """

    rng: random.Random
    report: ControlFuzzReport
    payloads: Mapping[str, Payload]
    rules: EntryRules = field(default_factory=EntryRules)
    on_entries: Callable[[Peering], None] = lambda peering: None

    def __post_init__(self) -> None:
        self.now = 0.0
        self.peering = Peering(
            _ME,
            Role.WORKER,
            incarnation=7,
            admission=Admission(_KEY.public),
            settings=NetworkSettings(),
            rng=self.rng,
            contacts=Contacts(named=(Bootstrap("192.0.2.1", 4009),)),
            rules=replace(self.rules, is_sound=_is_sound),
        )
        self.peering.publish(MEMBER_KIND, _RECORDS[_ME.peer_id])
        self.connected: dict[PeerId, float] = {}
        self.said: dict[tuple[str, str], Entry] = {}
        self.versions = dict.fromkeys(_PEOPLE, 1)

    def run(self) -> None:
        """Attack, and check."""
        for who in (*_HONEST, *_HOSTILE, _CLIENT):
            self._open(who, self._sign(who, MEMBER_KIND, _RECORDS[who.peer_id], 1, 1))
        for _ in range(_INPUTS):
            self.now += self.rng.choice(_STEPS_S)
            began = time.thread_time()
            target = self._attack()
            if self.rng.random() < 0.3:
                self._tick()
            self.report.note(target, time.thread_time() - began)
        self._tick()
        self._check()

    # -- one input ----------------------------------------------------------------------------------------------------

    def _attack(self) -> str:
        """What it was, for the report."""
        chance = self.rng.random()
        if chance < 0.04:
            self._greet()
            return "greetings of members"
        if chance < 0.06:
            self._restore()
            return "state of an earlier run"
        return f"gossip {self._gossip().__name__}"

    def _read(self, kind: type, data: bytes) -> Any:
        """As a node decodes it; None where that is refused. Nothing that is decoded may raise anything after that."""
        try:
            return _decoders[kind].decode(data)
        except DECODE_ERRORS:
            self.report.refused += 1
            return None

    def _gossip(self) -> type[GossipMessage]:
        """Any message, with entries under signatures that hold. Returns which."""
        rng = self.rng
        sender = rng.choice((*_HOSTILE, *_HOSTILE, _CLIENT))
        message = self._make_message(sender)
        data = _encode(message)
        if rng.random() < 0.15:
            data = mutated_encoding(rng, data)
        # As it is read by a node: by the type that the notice's name stands for.
        read: GossipMessage | None = self._read(type(message), data)
        if read is not None and self.peering.on_received(sender.peer_id, read, self.now):
            self.report.outcomes["forged"] += 1
        return type(message)

    def _make_message(self, sender: Identity) -> GossipMessage:
        rng = self.rng
        chance = rng.random()
        if chance < 0.75:
            return Tell(
                tuple(self._make_entry(sender) for _ in range(rng.choice((0, 1, 1, 1, 2, 5)))),
                (self._make_lie(),) if rng.random() < 0.1 else (),
                rng.choice((*_ORDERS, _FORGED_ORDERS)) if rng.random() < 0.03 else None,
                self._make_held_claim() if rng.random() < 0.1 else None,
                rng.random() < 0.2,
            )
        holding = Holding(rng.choice((0, *_COUNTERS)), rng.choice((0, 1, 256, 4096)), rng.choice((0, *_COUNTERS)))
        if chance < 0.85:
            own = self.peering.table.summary()
            return Summary(mutated_bytes(rng, own)[:512] if rng.random() < 0.5 else own, holding)
        if chance < 0.98:
            buckets = rng.choice((b"", bytes(range(64)), bytes(64), b"\xff" * 64))
            digest = self.peering.table.digest(buckets) if rng.random() < 0.5 else {}
            return Compare({**digest, "x": (MAX_COUNTER, {"advert": 1})}, buckets, holding, rng.random() < 0.5)
        return Part()

    def _make_entry(self, sender: Identity) -> Entry:
        rng = self.rng
        chance = rng.random()
        if chance < 0.1 and self.said:
            return rng.choice(tuple(self.said.values()))  # said before: by an honest member, perhaps
        who = rng.choice((*_HONEST, _STRANGER, _ME)) if chance < 0.15 else sender
        kind = rng.choice(tuple(self.payloads))
        payload = _RECORDS[who.peer_id] if kind == MEMBER_KIND else self.payloads[kind](rng)
        if rng.random() < 0.5:
            payload = mutated_encoding(rng, payload)
        if rng.random() < 0.02:
            kind = rng.choice(("k" * 64, "p2p.x", "\0", "member ", "plan"))
        # Most of one life and counting up, as else hardly any would be news.
        life = 1 if rng.random() < 0.9 else rng.choice(_COUNTERS)
        self.versions[who] += 1  # type: ignore[index]
        version = self.versions[who] if rng.random() < 0.97 else rng.choice(_COUNTERS)  # type: ignore[index]
        signer = who if who is sender else sender  # nobody has another's key
        return self._sign(signer, kind, payload, life, version, named=who)

    def _sign(
        self, who: Identity, kind: str, payload: bytes, life: int, version: int, named: Identity | None = None
    ) -> Entry:
        entry = sign_entry(who, kind, life, version, payload[:65536])
        if named is not None and named is not who:
            return Entry(named.peer_id, kind, life, version, entry.payload, entry.signature)
        self.said[entry.origin, kind] = entry
        return entry

    def _make_lie(self) -> Lie:
        rng = self.rng
        said = tuple(self.said.values())
        one = rng.choice(said)
        if rng.random() < 0.5:
            return Lie(one, rng.choice(said))
        return Lie(one, msgspec.structs.replace(one, payload=one.payload + b"x"))  # nobody has signed that

    def _make_held_claim(self) -> HeldClaim:
        rng = self.rng
        who = rng.choice((*_HOSTILE, _STRANGER, _CLIENT))
        claim = encode_claim(rng.choice(_COUNTERS))
        return HeldClaim(
            self._sign(who, MEMBER_KIND, _RECORDS[who.peer_id], 1, 1), self._sign(who, CLAIM_KIND, claim, 1, 900)
        )

    def _greet(self) -> None:
        """Somebody comes in, or tries to. Signatures of greetings are real ones."""
        rng = self.rng
        who = rng.choice((*_HOSTILE, _CLIENT, _STRANGER))
        real = _REAL[who.peer_id]
        life, payload = rng.choice(_COUNTERS), _RECORDS[who.peer_id]
        if rng.random() < 0.7:
            payload = mutated_encoding(rng, payload)[:65536]
        entry = sign_entry(real, MEMBER_KIND, life, 1, payload)
        data = _encode(Hello(PROTOCOL_VERSION, _KEY.public, entry, rng.choice((0, *_COUNTERS)), "1.0"))
        if rng.random() < 0.5:
            data = mutated_encoding(rng, data)
        read: Hello | None = self._read(Hello, data)
        if read is None:
            return
        try:
            Admission(_KEY.public).check_greeting(read, who.peer_id, 1e9)
        except (ProtocolError, TokenError):
            self.report.refused += 1
            return
        if who.peer_id in self.connected:
            self._close(who.peer_id)
        self.report.outcomes["let in"] += 1
        self._open(who, self._sign(who, MEMBER_KIND, read.member.payload, life, 1))

    def _restore(self) -> None:
        """A state file with a valid checksum, from a disk that is not to be trusted, or of another release."""
        state = self.peering.state()
        read: NetworkState | None = self._read(NetworkState, mutated_encoding(self.rng, _encode(state)))
        if read is None:
            return
        peering = Peering(
            _ME,
            Role.WORKER,
            incarnation=8,
            admission=Admission(_KEY.public),
            settings=NetworkSettings(),
            rng=self.rng,
            rules=replace(self.rules, is_sound=_is_sound),
        )
        peering.publish(MEMBER_KIND, _RECORDS[_ME.peer_id])
        peering.restore(read, self.now)
        peering.tick(self.now, {}, {})
        peering.table.check_integrity()

    # -- the node's own part ------------------------------------------------------------------------------------------

    def _open(self, who: Identity, record: Entry) -> None:
        self.peering.on_opened(who.peer_id, record, self.now)
        self.connected[who.peer_id] = self.now

    def _close(self, peer: PeerId) -> None:
        del self.connected[peer]
        self.peering.on_closed(peer, self.now)

    def _tick(self) -> None:
        for who in _HONEST:
            if who.peer_id in self.connected:
                self.connected[who.peer_id] = self.now
        for who in (*_HOSTILE, _CLIENT):
            if who.peer_id in self.connected and self.rng.random() < 0.9:
                self.connected[who.peer_id] = self.now
        actions = self.peering.tick(self.now, self.connected, self.connected)
        self._follow(actions)
        self.on_entries(self.peering)

    def _follow(self, actions: Actions) -> None:
        honest = {who.peer_id for who in _HONEST}
        dropped = honest.intersection(actions.drop)
        if dropped:
            raise AssertionError(f"honest members were hung up on: {dropped}")
        for peer in (*actions.drop, *actions.part):
            if peer in self.connected:
                self._close(peer)
        for _, message in actions.send:
            _encode(message)
        for dial in actions.dial:
            self.peering.on_dialled(dial.peer, False, self.now)
        self.report.outcomes["dials"] += len(actions.dial)

    def _check(self) -> None:
        table = self.peering.table
        table.check_integrity()
        repr(self.peering)
        honest = {_ME.peer_id, *(who.peer_id for who in _HONEST)}
        if honest & table.lies.keys():
            raise AssertionError("an honest member was expelled")
        if self.peering.coordinator is not None and self.peering.coordinator[0] not in _LEADING:
            raise AssertionError(f"{self.peering.coordinator} leads, and may not")
        state = self.peering.state()
        size = len(_encode(state))
        if len(table) > len(_PEOPLE) or len(table.lies) > MAX_LIES or size > 3 * len(_PEOPLE) * MAX_ORIGIN_BYTES:
            raise AssertionError(f"{table!r} holds {size} bytes")
        self.report.outcomes["attacks on members"] += 1
        self.report.outcomes["expelled"] += len(table.lies)
        self.report.outcomes["entries held"] += len(state.entries)
        self.report.outcomes["led"] += self.peering.coordinator is not None
