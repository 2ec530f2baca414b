"""Messages as a release says them: every kind that travels between nodes, and one member's way into a network.

`recorded/RELEASE.json` has what was recorded of each release; `test_upgrading.py` reads them. Record at a release, and
only then: `REWRITE_RECORDED=1 pytest tests/unit/node/test_upgrading.py`, and read the diff.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as types

import p2pserve
from p2pserve.bootstrap import Identity, JoinToken, NetworkKey, Role
from p2pserve.bootstrap.members.admission import Admission
from p2pserve.bootstrap.members.election import CLAIM_KIND, encode_claim
from p2pserve.bootstrap.members.leading import OBJECTION_KIND, encode_objection
from p2pserve.bootstrap.members.liveness import HEARS_KIND, encode_heard
from p2pserve.bootstrap.members.peering import Peering
from p2pserve.bootstrap.members.states import Compare, EntryRules, NetworkState, Part, Summary, Tell
from p2pserve.bootstrap.settings import NetworkSettings
from p2pserve.bootstrap.streams import control
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, Entry, Lie, MemberRecord, sign_entry
from p2pserve.bootstrap.trust.orders import Orders, Renewal, SignedOrders, sign_orders
from p2pserve.bootstrap.trust.tokens import Credential
from p2pserve.node.dev.fuzz_messages import MessageMaker, said_by_peers
from p2pserve.node.dev.fuzz_planning import make_advert, make_links, make_manifest, make_plan
from p2pserve.node.messages import ADVERT, LINKS, PLAN, Advert

FOLDER = Path(__file__).parent / "recorded"
RELEASE = p2pserve.__version__
KEY = NetworkKey(b"k" * 32)
HERE, THERE = Identity(b"h" * 32), Identity(b"t" * 32)
EACH = 2
MAX_BYTES = 2048

OF_THE_NETWORK: tuple[type[msgspec.Struct], ...] = (
    *(control.Hello, control.Welcome, control.Rejected, control.Request, control.Reply, control.Failure),
    *(control.NoticeFrame, control.ControlPing, control.ControlPong, Tell, Summary, Compare, Part, NetworkState),
    *(Entry, Lie, MemberRecord, Credential, Orders, Renewal, SignedOrders),
)
BODY = msgspec.Raw(msgspec.msgpack.encode({"body": 1}))
WITH_BODIES: dict[type[msgspec.Struct], msgspec.Struct] = {
    control.Request: control.Request(7, "status", BODY),
    control.Reply: control.Reply(7, BODY),
    control.NoticeFrame: control.NoticeFrame("answer", BODY),
}
KINDS: dict[str, type[msgspec.Struct]] = {kind.__name__: kind for kind in (*OF_THE_NETWORK, *said_by_peers())}


def record() -> dict[str, Any]:
    """What this release says."""
    rng = random.Random(RELEASE)
    return {
        "release": RELEASE,
        "protocol": control.PROTOCOL_VERSION,
        "messages": {name: [each.hex() for each in _samples(rng, kind)] for name, kind in KINDS.items()},
        "joining": _join(rng),
    }


def _samples(rng: random.Random, kind: type[msgspec.Struct]) -> list[bytes]:
    if kind in WITH_BODIES:
        return [msgspec.msgpack.encode(WITH_BODIES[kind])]
    makers = {"Advert": make_advert, "LinkTable": make_links, "PlanManifest": make_manifest, "Plan": make_plan}
    make = MessageMaker(kind, makers.get(kind.__name__)).make
    found: dict[bytes, None] = {}
    for _ in range(50):
        data = make(rng)
        if len(data) <= MAX_BYTES and _is_taken(data, kind):
            found[data] = None
    return list(found)[-EACH:]


def _is_taken(data: bytes, kind: type[msgspec.Struct]) -> bool:
    """Whether it is read, and says no NaN: no release says one, and it equals nothing."""
    try:
        message, again = (msgspec.msgpack.decode(data, type=kind) for _ in range(2))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return bool(message == again)


def _join(rng: random.Random) -> dict[str, str]:
    """What one member shows and says when it joins, with signatures that hold."""
    text = KEY.issue((), Role.WORKER, 2e9, lead=True)
    token = JoinToken.parse(text)
    record = MemberRecord(Role.WORKER, "192.0.2.1", 4001, token.credential(THERE.peer_id))
    member = sign_entry(THERE, MEMBER_KIND, 5, 1, msgspec.msgpack.encode(record))
    said = {
        CLAIM_KIND: encode_claim(3),
        HEARS_KIND: encode_heard((HERE.peer_id,)),
        OBJECTION_KIND: encode_objection(HERE.peer_id, 2),
        ADVERT: next(each for each in iter(lambda: make_advert(rng), b"") if _is_taken(each, Advert)),
        LINKS: make_links(rng),
        PLAN: make_manifest(rng),
    }
    entries = [sign_entry(THERE, kind, 5, number, said[kind]) for number, kind in enumerate(said, 2)]
    hello = control.Hello(control.PROTOCOL_VERSION, KEY.public, member, 5, RELEASE)
    orders = sign_orders(KEY, Orders(number=4, revoked=("0" * 16,)))
    state = NetworkState(
        entries=(member, entries[0]), orders=orders, holders={token.grant.certificate: [THERE.peer_id]}
    )
    told = Tell((member, *entries), orders=orders, complete=True)
    notice = control.encode_notice("p2p.tell", msgspec.msgpack.encode(told))
    return {
        "token": text,
        "hello": control.encode_greeting(hello).hex(),
        "tell": notice.hex(),
        "state": msgspec.msgpack.encode(state).hex(),
    }


def load() -> dict[str, dict[str, Any]]:
    """What was recorded, by release."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def save(recorded: Mapping[str, Any]) -> None:
    """Replace what was recorded of this release."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(recorded, indent=1, sort_keys=True)
    (FOLDER / f"{recorded['release']}.json").write_text(text + "\n", "utf-8")


def make_node() -> Peering:
    """A node of this release that is in the recorded network."""
    peering = Peering(
        HERE,
        Role.WORKER,
        incarnation=1,
        admission=Admission(KEY.public),
        settings=NetworkSettings(),
        rng=random.Random(0),
        rules=EntryRules(urgent=frozenset({PLAN})),
    )
    token = JoinToken.parse(KEY.issue((), Role.WORKER, 2e9))
    own = MemberRecord(Role.WORKER, "192.0.2.2", 4002, token.credential(HERE.peer_id))
    peering.publish(MEMBER_KIND, msgspec.msgpack.encode(own))
    return peering


# -- what a newer release may add -------------------------------------------------------------------------------------

MORE = {"of": ["tomorrow", 1.5, None]}


def with_more(kind: type[msgspec.Struct], value: Any) -> Any:
    """The same message as a newer release may say it: with another field wherever unknown ones are ignored."""
    return _with_more(types.type_info(kind), value)


def _with_more(kind: types.Type, value: Any) -> Any:
    match kind:
        case types.Metadata():
            return _with_more(kind.type, value)
        case types.UnionType():
            fitting = [each for each in kind.types if isinstance(each, types.NoneType) is (value is None)]
            return _with_more(fitting[0], value) if len(fitting) == 1 else value
        case types.StructType(array_like=True):
            head = 0 if kind.tag is None else 1
            said = [_with_more(field.type, each) for field, each in zip(kind.fields, value[head:], strict=False)]
            is_whole = len(said) == len(kind.fields) and not kind.forbid_unknown_fields
            return [*value[:head], *said, *([MORE] if is_whole else [])]
        case types.StructType():
            fields = {field.encode_name: field.type for field in kind.fields}
            said_by_name = {name: _with_more(fields[name], each) for name, each in value.items()}
            return said_by_name if kind.forbid_unknown_fields else {"tomorrow": MORE, **said_by_name}
        case types.VarTupleType() | types.ListType():
            return [_with_more(kind.item_type, each) for each in value]
        case types.DictType():
            return {key: _with_more(kind.value_type, each) for key, each in value.items()}
        case _:
            return value


def with_defaults(message: Any, said: Any) -> Any:
    """What was said of a message, with those fields that it leaves out because they have their defaults."""
    if not isinstance(message, msgspec.Struct) or not isinstance(said, dict):
        return said
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    omitted = fields if message.__struct_config__.omit_defaults else {}
    filled = msgspec.msgpack.decode(msgspec.msgpack.encode(omitted))
    return {**filled, **{name: with_defaults(fields.get(name), said[name]) for name in said}}


def holds_all_of(said: Any, recorded: Any) -> bool:
    """Whether an encoding of today has all that the recorded one has, so that who reads that finds it."""
    if isinstance(recorded, dict) and isinstance(said, dict):
        return all(key in said and holds_all_of(said[key], each) for key, each in recorded.items())
    if isinstance(recorded, list) and isinstance(said, list):
        return len(said) >= len(recorded) and all(map(holds_all_of, said, recorded))
    return bool(said == recorded)
