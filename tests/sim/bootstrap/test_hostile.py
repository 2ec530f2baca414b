"""What one member that lies can do to a network: each of these once ended it, and does nothing now."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from p2pserve.bootstrap import (
    Address,
    Bootstrap,
    Identity,
    JoinToken,
    MemberState,
    NetworkKey,
    NetworkSettings,
    PeerId,
    Role,
)
from p2pserve.bootstrap.dev.simulation import EPOCH_S, SimulatedNode, Simulation, identity_of
from p2pserve.bootstrap.members.election import CLAIM_KIND, encode_claim
from p2pserve.bootstrap.members.liveness import HEARS_KIND, encode_heard
from p2pserve.bootstrap.members.peering import Actions
from p2pserve.bootstrap.members.states import Tell
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, Entry, MemberRecord, sign_entry
from p2pserve.bootstrap.trust.orders import Orders, sign_orders
from p2pserve.bootstrap.trust.tokens import DEFAULT_USES

COUNT = 6
LIAR = "6"


def place(number: int) -> Address:
    return Address("192.0.2.1", 4000 + number)


def bootstrap(number: int) -> Bootstrap:
    return Bootstrap(place(number).host, place(number).port, identity_of(number).peer_id)


def build(*, may_lead: Callable[[int], bool], settings: NetworkSettings | None = None) -> Simulation:
    """Six nodes that have been one network for a while; the first leads."""
    sim = Simulation(settings=settings)
    for number in range(1, COUNT + 1):
        named = [bootstrap(1)] if number > 1 else []
        sim.add(str(number), identity_of(number), place(number), named=named, token=sim.token(lead=may_lead(number)))
        sim.run(1.0)
    sim.run(15.0)
    assert leaders(sim) == {(identity_of(1).peer_id, 1)}
    return sim


def honest(sim: Simulation) -> list[SimulatedNode]:
    return [node for node in sim.running() if node.name != LIAR]


def leaders(sim: Simulation) -> set[tuple[PeerId, int] | None]:
    """Whom the honest nodes follow."""
    return {node.peering.coordinator for node in honest(sim)}


def on_each_tick(sim: Simulation, act: Callable[[SimulatedNode], None]) -> None:
    """The liar does something besides, over and over."""
    last = [0.0]

    def look(node: SimulatedNode) -> None:
        if node.name == LIAR and sim.now >= last[0] + 0.2:
            last[0] = sim.now
            act(node)

    sim.on_tick = look


def tell(sim: Simulation, target: SimulatedNode, *entries: Entry) -> int:
    """Say something to one node over the liar's session; how many offences that was."""
    offences = target.peering.on_received(sim.nodes[LIAR].peer, Tell(entries), sim.now)
    sim.wake(target)
    return offences


def test_vouching_keeps_no_dead_coordinator_alive() -> None:
    sim = build(may_lead=lambda number: number <= 3)
    dead = identity_of(1).peer_id
    everybody = tuple(node.peer for node in sim.running())
    on_each_tick(sim, lambda liar: liar.peering.publish(HEARS_KIND, encode_heard(everybody)))
    sim.run(2.0)
    sim.kill("1")
    sim.run(3.0)
    (leader,) = leaders(sim)
    assert leader is not None
    assert leader[0] in {identity_of(2).peer_id, identity_of(3).peer_id}
    sim.run(30.0)
    assert {node.peering.roster.state_of(dead, sim.now) for node in honest(sim)} == {MemberState.DEAD}


@pytest.mark.parametrize("seed", range(6))
def test_one_that_may_lead_and_never_claims_is_passed_over(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its rank in the new epoch."""
    sim = build(may_lead=lambda number: number in {1, 2, int(LIAR)})
    sim.rng.seed(seed)
    liar = sim.nodes[LIAR]
    answers = liar.peering.tick

    def tick_silently(*moment: object) -> Actions:
        """It pings and tells whom it hears, and claims nothing."""
        actions = answers(*moment)  # type: ignore[arg-type]
        sent = tuple(
            (peer, replace_entries(message) if isinstance(message, Tell) else message) for peer, message in actions.send
        )
        return replace(actions, send=sent)

    def replace_entries(message: Tell) -> Tell:
        kept = tuple(e for e in message.entries if (e.kind, e.origin) != (CLAIM_KIND, liar.peer))
        return msgspec.structs.replace(message, entries=kept)

    monkeypatch.setattr(liar.peering, "tick", tick_silently)
    sim.run(float(seed))
    sim.kill("1")
    sim.run(6.0)
    (leader,) = leaders(sim)
    assert leader is not None
    assert leader[0] == identity_of(2).peer_id


@pytest.mark.parametrize("epoch", [2, 3, 2**40])
def test_who_may_not_lead_leads_nobody(epoch: int) -> None:
    sim = build(may_lead=lambda number: number <= 3)
    on_each_tick(sim, lambda liar: liar.peering.publish(CLAIM_KIND, encode_claim(epoch)))
    for _ in range(20):
        sim.run(0.5)
        assert leaders(sim) == {(identity_of(1).peer_id, 1)}


def test_two_claims_under_one_version_are_proof_of_a_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = build(may_lead=lambda number: True)
    liar = sim.nodes[LIAR]
    monkeypatch.setattr(liar.peering, "on_received", lambda *said: 0)  # or it would say at once what it says now
    one, other = (sign_entry(liar.identity, CLAIM_KIND, liar.born, 1000, encode_claim(epoch)) for epoch in (7, 8))
    tell(sim, sim.nodes["1"], one)
    tell(sim, sim.nodes["2"], other)
    sim.run(10.0)
    assert len(leaders(sim)) == 1
    assert liar.peer not in {leader[0] for leader in leaders(sim) if leader is not None}
    for node in honest(sim):
        assert liar.peer in node.peering.table.lies
        assert liar.peer not in node.sessions


def inventors_token(sim: Simulation) -> JoinToken:
    """As `bootstrap` issues it, and the same each time."""
    return JoinToken.parse(sim.key.issue((), Role.WORKER, EPOCH_S + 1e6, secret=b"s" * 32))


def join_s(sim: Simulation, number: int, token: JoinToken | None = None) -> float:
    """How long one more takes to be let in."""
    late = sim.add(str(number), identity_of(number), place(number), named=[bootstrap(1)], token=token)
    began = sim.now
    while not late.is_joined and sim.now < began + 30.0:
        sim.run(0.1)
    return sim.now - began


def invented(sim: Simulation, count: int, token: JoinToken | None = None) -> list[Entry]:
    """Members that nobody has ever seen, all with one token."""
    token = token or inventors_token(sim)
    found = []
    for number in range(count):
        identity = Identity((1000 + number).to_bytes(32, "big"))
        record = MemberRecord(token.role, "198.51.100.7", 4001, token.credential(identity.peer_id))
        found.append(sign_entry(identity, MEMBER_KIND, 1, 1, msgspec.msgpack.encode(record)))
    return found


@pytest.mark.parametrize("count", [200, 4100])
def test_invented_members_are_neither_kept_nor_dialled_and_keep_nobody_out(count: int) -> None:
    sim = build(may_lead=lambda number: number <= 3)
    dialled: list[Address] = []
    third = Address("198.51.100.7", 4001)
    sim.on_event = lambda text: dialled.append(third) if third.host in text else None
    entries = invented(sim, count)
    for node in honest(sim):
        for begin in range(0, count, 50):
            tell(sim, node, *entries[begin : begin + 50])
    sim.run(5.0)
    for node in honest(sim):
        assert len(node.peering.table.origins()) <= COUNT + DEFAULT_USES
    assert len(dialled) < 100
    assert join_s(sim, 7) < 3.0
    sim.run(20.0)
    assert join_s(sim, 8, inventors_token(sim)) < 3.0, "who was invented has used no place of the token"
    sim.run(5.0)
    known = {node.peer for node in sim.running()}
    for node in honest(sim):
        assert set(node.peering.table.origins()) <= known
    assert leaders(sim) == {(identity_of(1).peer_id, 1)}


def test_one_holder_of_a_token_for_several_does_not_use_it_up_for_good() -> None:
    """Its boxes are let in one after the other under new identities, and go again."""
    settings = NetworkSettings(forget_s=30.0)
    sim = build(may_lead=lambda number: number <= 3, settings=settings)
    token = JoinToken.parse(sim.key.issue((), Role.WORKER, EPOCH_S + 1e6, uses=3))
    for number in range(11, 14):
        assert join_s(sim, number, token) < 3.0
        sim.run(2.0)
        sim.kill(str(number))
    sim.run(5.0)
    join_s(sim, 14, token)
    assert not sim.nodes["14"].is_joined, "so many identities are let in, and no more"
    sim.run(2 * settings.forget_s)
    assert join_s(sim, 15, token) < 3.0
    sim.run(5.0)
    views = {frozenset(node.peering.roster.find_boxes()) for node in sim.running()}
    assert views == {frozenset(node.peer for node in sim.running())}


@pytest.mark.parametrize("kind", ["foreign", "revoked", "expired"])
def test_a_member_that_tells_of_others_with_bad_certificates_lets_none_of_them_in(kind: str) -> None:
    sim = build(may_lead=lambda number: number <= 3)
    key = NetworkKey(b"x" * 32) if kind == "foreign" else sim.key
    until = EPOCH_S - 60 if kind == "expired" else EPOCH_S + 1e6
    token = JoinToken.parse(key.issue((), Role.WORKER, until))
    if kind == "revoked":
        sim.nodes["1"].peering.order(sign_orders(sim.key, Orders(1, (token.grant.certificate,))))
        sim.run(2.0)
    entries = invented(sim, 10, token)
    who = identity_of(30)
    record = MemberRecord(Role.WORKER, place(30).host, place(30).port, token.credential(who.peer_id))
    entries.append(sign_entry(who, MEMBER_KIND, 1, 1, msgspec.msgpack.encode(record)))
    for node in honest(sim):
        # Who passes on what is revoked may not have heard of it; what has ended, it may have heard in time.
        assert tell(sim, node, *entries) == (len(entries) if kind == "foreign" else 0)
        if kind != "expired":
            assert {each.origin for each in entries}.isdisjoint(node.peering.table.origins())
    sim.run(1.0)
    join_s(sim, 30, token)
    assert not sim.nodes["30"].is_joined, "it is no member because one has said so"
    known = {node.peer for node in sim.running()}
    for node in honest(sim):
        assert set(node.peering.table.origins()) <= known
        assert node.admission.holders.get(token.grant.certificate, frozenset()) == frozenset()
    assert leaders(sim) == {(identity_of(1).peer_id, 1)}


def test_twenty_that_join_at_once_follow_who_leads() -> None:
    sim = Simulation()
    sim.add("1", identity_of(1), place(1))
    sim.run(5.0)
    epochs = set()
    for number in range(2, 22):
        sim.add(str(number), identity_of(number), place(number), named=[bootstrap(1)])
    for _ in range(150):
        sim.run(0.1)
        epochs |= {node.peering.coordinator for node in sim.running()} - {None}
    assert epochs == {(identity_of(1).peer_id, 1)}, "nobody claims before it has heard the others"
    assert all(node.is_joined for node in sim.running())
    assert leaders(sim) == {(identity_of(1).peer_id, 1)}
