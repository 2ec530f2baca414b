"""What the owner of a network orders: who is revoked goes and stays out, and members outlive their certificates."""

from pathlib import Path

import pytest
import trio

from p2pserve.bootstrap import Bootstrap, JoinToken, Network, NetworkKey, Role, TokenError
from p2pserve.bootstrap.errors import Refused, TokenSpent
from p2pserve.bootstrap.members.states import NetworkState
from p2pserve.bootstrap.state_file import StateFile
from p2pserve.bootstrap.trust import catalogue as catalogues
from p2pserve.bootstrap.trust.catalogue import Catalogue, Issued, Wish
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, read_record
from p2pserve.bootstrap.trust.orders import Orders, sign_orders
from p2pserve.bootstrap.trust.tokens import read_grant

from .worlds import KEY, PEOPLE, World, elapse, simulate, world

LIFE_S = 300.0
BEGAN_S = 1000.0  # of the world's clock


class KeptInMemory(StateFile):
    """The file of a node that has run, without a disk. (Not for first runs: the virtual clock does not wait for
    threads.)"""

    def __init__(self, w: World, index: int) -> None:
        super().__init__(Path("nowhere"), KEY.public)
        self.kept = w.nodes[index].state()

    def load(self) -> NetworkState:
        return self.kept

    def save(self, state: NetworkState) -> None:
        self.kept = state


class Owner:
    """The box with the key: node 0, and its catalogue."""

    def __init__(self, w: World) -> None:
        self.world = w
        self.catalogue = Catalogue()

    def issue(self, **wish: object) -> Issued:
        wished = Wish(**{"expires_at": now() + LIFE_S, **wish})  # type: ignore[arg-type]
        self.catalogue, token = catalogues.issue(KEY, self.catalogue, wished, (self.world.bootstrap(),), now())
        return token

    def revoke(self, token: Issued) -> None:
        self.catalogue, _ = catalogues.revoke(self.catalogue, token.id)

    async def run(self) -> None:
        """Follow the catalogue, as the node of this box does, for as long as it runs."""
        while True:
            network = self.world.nodes.get(0)
            if network is not None:
                boxes = network.boxes_by_certificate()
                self.catalogue = catalogues.renew_members(KEY, self.catalogue, boxes, now())
                if self.catalogue.orders.number > network.orders.number:
                    network.order(sign_orders(KEY, self.catalogue.orders))
            await elapse(1.0)


def now() -> float:
    return BEGAN_S + trio.current_time()


async def enter(network: Network) -> None:
    async with network:
        await trio.sleep_forever()


async def check_refused(network: Network) -> None:
    """It is not let in, or goes, with the reason: a refusal, or the owner's own word, whichever it sees first."""
    with pytest.raises((Refused, TokenSpent, ExceptionGroup)) as caught:
        await enter(network)
    if isinstance(caught.value, ExceptionGroup):
        assert caught.group_contains(TokenSpent, match="was revoked by the network's owner")
    else:
        assert "was revoked by the network's owner" in str(caught.value)


async def revoke_after(owner: Owner, token: Issued, seconds: float) -> None:
    await elapse(seconds)
    owner.revoke(token)


def test_a_box_that_is_revoked_ends_and_is_refused_by_all_also_after_everybody_was_restarted() -> None:
    async def main() -> None:
        async with world() as w:
            owner, admin = Owner(w), w.token(Role.ADMIN)
            bad, good = owner.issue(uses=1, expires_at=1e6), owner.issue(expires_at=1e6)
            await w.start(0, role=Role.ADMIN, token=admin)
            w.nursery.start_soon(owner.run)
            await w.start(1, token=good.text)
            w.nursery.start_soon(revoke_after, owner, bad, 5.0)
            await check_refused(w.build(2, token=bad.text))
            assert 5.0 < trio.current_time() < 10.0, "it was in, and is out within seconds"
            await elapse(20.0)
            assert [each.peer_id for each in w.nodes[1].members()] == sorted(PEOPLE[i].peer_id for i in (0, 1))
            kept = {0: KeptInMemory(w, 0), 1: KeptInMemory(w, 1)}
            for index in (0, 1):
                w.kill(index)
            await elapse(1.0)
            # It comes first, and knows itself that it is revoked.
            await check_refused(w.build(2, token=bad.text, state_file=kept[1]))
            # One that has lost its file is told by any member, also where the owner's box is away.
            await w.start(1, token=good.text, state_file=kept[1], ask=())
            await check_refused(w.build(2, token=bad.text, ask=(w.bootstrap(1),)))
            await w.start(0, role=Role.ADMIN, token=admin, state_file=kept[0])
            await check_refused(w.build(2, token=bad.text))

    simulate(main)


def test_a_stranger_with_a_revoked_token_is_not_told_what_was_ordered() -> None:
    async def main() -> None:
        async with world() as w:
            owner = Owner(w)
            token = owner.issue()
            await w.start(0, role=Role.ADMIN, token=w.token(Role.ADMIN))
            w.nursery.start_soon(owner.run)
            owner.revoke(token)
            await elapse(3.0)
            stranger = w.build(3, token=token.text)
            await check_refused(stranger)
            assert stranger.orders.number == 0

    simulate(main)


def ends_of(w: World, index: int, seen_by: int) -> float:
    """Until when the certificate is good that a node shows."""
    held = w.nodes[seen_by].state().entries
    record = next(m for m in held if m.origin == PEOPLE[index].peer_id and m.kind == MEMBER_KIND)
    shown = read_record(record.payload)
    assert shown is not None
    assert shown.credential is not None
    grant = read_grant(shown.credential.certificate)
    assert grant is not None
    return grant.expires_at


def test_members_are_renewed_before_their_certificates_end_and_nobody_else_gets_in() -> None:
    async def main() -> None:
        async with world() as w:
            owner = Owner(w)
            token = owner.issue()
            await w.start(0, role=Role.ADMIN, token=w.token(Role.ADMIN))
            w.nursery.start_soon(owner.run)
            for index in (1, 2):
                await w.start(index, token=token.text)
            await elapse(LIFE_S + 10.0)
            assert ends_of(w, 1, seen_by=2) == BEGAN_S + 2 * LIFE_S
            w.air.drop_connections(PEOPLE[1].peer_id, PEOPLE[2].peer_id)
            await elapse(5.0)
            w.check_agreement((0, 1, 2))
            w.check_full_mesh()
            with pytest.raises(TokenError, match="expired"):
                await enter(w.build(3, token=token.text))
            await elapse(2 * LIFE_S)
            w.check_agreement((0, 1, 2))

    simulate(main)


def test_the_owners_box_that_was_away_when_certificates_ended_takes_its_members_back_and_renews_them() -> None:
    async def main() -> None:
        async with world() as w:
            owner = Owner(w)
            token = owner.issue(lead=True)
            admin = w.token(Role.ADMIN)
            await w.start(0, role=Role.ADMIN, token=admin)
            w.nursery.start_soon(owner.run)
            for index in (1, 2):
                await w.start(index, token=token.text)
            await elapse(15.0)
            kept = KeptInMemory(w, 0)
            w.kill(0)
            await elapse(LIFE_S + 100.0)
            assert owner.catalogue.orders.number == 0
            await w.start(0, role=Role.ADMIN, token=admin, state_file=kept)
            await elapse(20.0)
            w.check_agreement((0, 1, 2))
            w.check_full_mesh()
            for index in (1, 2):
                assert ends_of(w, index, seen_by=0) > now()

    simulate(main)


def test_a_box_that_was_renewed_comes_back_after_a_restart_with_the_token_that_has_ended() -> None:
    async def main() -> None:
        async with world() as w:
            owner = Owner(w)
            token = owner.issue()
            await w.start(0, role=Role.ADMIN, token=w.token(Role.ADMIN))
            w.nursery.start_soon(owner.run)
            await w.start(1, token=token.text)
            await elapse(LIFE_S + 20.0)
            kept = KeptInMemory(w, 1)
            w.kill(1)
            await elapse(60.0)
            await w.start(1, token=token.text, state_file=kept)
            await elapse(5.0)
            w.check_agreement((0, 1))

    simulate(main)


def test_any_member_that_the_token_names_lets_in_while_the_first_is_away() -> None:
    async def main() -> None:
        async with world() as w:
            named = (w.bootstrap(), Bootstrap("192.0.2.1", 4001), w.bootstrap(2))  # the second one by its address alone
            text = KEY.issue(named, Role.WORKER, 1e6, lead=True)
            client = KEY.issue(named, Role.CLIENT, 1e6)
            await w.start(0)
            await w.start(1, token=text)
            w.kill(0)
            for index, shown, role in ((3, text, Role.WORKER), (4, client, Role.CLIENT)):
                network = w.build(index, role=role, token=shown, ask=JoinToken.parse(shown).bootstraps)
                async with network:
                    assert PEOPLE[1].peer_id in network.connected()

    simulate(main)


def test_orders_of_another_key_are_not_followed() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            await w.start(1)
            name = JoinToken.parse(w.token()).grant.certificate
            forged = Orders(9, (name,))
            w.nodes[1].order(sign_orders(NetworkKey(b"f" * 32), forged))
            await elapse(2.0)
            assert w.nodes[0].orders.number == w.nodes[1].orders.number == 0

    simulate(main)
