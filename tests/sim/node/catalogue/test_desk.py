"""An admin changes the catalogue of a network in memory: who may, who does it, who hears of it, and what stays."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import NetworkKey, RemoteError, Role
from p2pserve.bootstrap.trust.orders import Orders, sign_orders
from p2pserve.coordinator import Demand
from p2pserve.coordinator.services.catalogue import CatalogueEntry
from p2pserve.node.catalogue.desk import LEARN_S, CatalogueDesk
from p2pserve.node.methods import CATALOGUE_CHANGE
from p2pserve.node.owner.messages import CatalogueChange, CatalogueChanged
from p2pserve.node.ownership import Ownership

from ..test_joined import Member, join_both

CHAT = CatalogueChange(add=CatalogueEntry(name="chat", model="tiny", slo="5x"))


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The virtual clock does not wait for threads."""

    async def run_here(work: Callable[..., object], *given: object) -> object:
        await trio.lowlevel.checkpoint()
        return work(*given)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)


async def settle(seconds: float = 3.0) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def run(
    folder: Path,
    act: Callable[[Member, Member, Ownership], Awaitable[None]],
    second: Role = Role.WORKER,
    token_role: Role | None = None,
) -> None:
    """Two nodes, the first with the network's key."""
    owner = Ownership(folder, NetworkKey.load_or_create(folder), pytest.fail)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            one, two = await join_both(stack, second, token_role, owner.key)
            for member, key in ((one, owner), (two, None)):
                member.desk = CatalogueDesk(member.joined, key)
                member.look()
            await act(one, two, owner)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def ask(member: Member, of: Member, change: CatalogueChange) -> CatalogueChanged:
    return await member.joined.network.request(of.joined.own, CATALOGUE_CHANGE, change, 5.0)


async def refusal(member: Member, of: Member, change: CatalogueChange) -> tuple[str, str]:
    with pytest.raises(RemoteError) as caught:
        await ask(member, of, change)
    return caught.value.code, caught.value.message


def test_an_admin_adds_and_removes_and_every_node_hears_of_it_and_keeps_it(tmp_path: Path) -> None:
    async def act(one: Member, two: Member, owner: Ownership) -> None:
        changed = await ask(two, one, CHAT)
        assert (changed.catalogue.version, changed.catalogue.entries) == (1, (CHAT.add,))
        await settle()
        for member in (one, two):
            member.look()
            assert member.joined.view.catalogue == changed.catalogue
            assert member.joined.status().catalogue == changed.catalogue
            assert "catalogue, version 1: chat" in member.said
        kept = two.joined.network.state().orders
        assert kept is not None
        assert Ownership.open(owner.home).read().orders == one.joined.network.orders
        # Whoever has kept the earlier one tells it in vain.
        gone = (await ask(two, one, CatalogueChange(remove="chat"))).catalogue
        await settle()
        two.joined.network.order(kept)
        one.joined.network.order(kept)
        await settle()
        for member in (one, two):
            member.look()
            assert member.joined.view.catalogue == gone

    run(tmp_path, act, token_role=Role.ADMIN, second=Role.ADMIN)


def test_who_has_not_the_key_changes_nothing(tmp_path: Path) -> None:
    async def act(one: Member, two: Member, owner: Ownership) -> None:
        assert (await refusal(one, two, CHAT))[0] == "forbidden", "a worker asks"
        code, message = await refusal(two, two, CHAT)
        assert code == "not_owner"
        assert "p2pserve bootstrap" in message

    run(tmp_path, act, token_role=Role.ADMIN, second=Role.ADMIN)


@pytest.mark.parametrize("role", [Role.WORKER, Role.CLIENT])
def test_only_admins_change_it(tmp_path: Path, role: Role) -> None:
    async def act(one: Member, two: Member, owner: Ownership) -> None:
        assert (await refusal(two, one, CHAT))[0] == "forbidden"
        assert owner.read().orders.number == 0

    run(tmp_path, act, second=role)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (CatalogueChange(), "a change adds one service or removes one"),
        (CatalogueChange(add=CHAT.add, remove="x"), "a change adds one service or removes one"),
        (CatalogueChange(remove="prose"), "name: this network has no 'prose'; it has chat"),
        (CHAT, "name: chat is in the catalogue already, with the model tiny"),
        (CatalogueChange(add=CatalogueEntry(name="a", model="b/c", slo="soon")), "slo: 'soon' is neither like 5x"),
    ],
)
def test_what_cannot_be_is_refused_with_a_line_and_changes_nothing(
    tmp_path: Path, change: CatalogueChange, why: str
) -> None:
    async def act(one: Member, two: Member, owner: Ownership) -> None:
        await ask(two, one, CHAT)
        before = owner.read().orders
        code, message = await refusal(two, one, change)
        assert (code, message.startswith(why)) == ("invalid", True), message
        assert owner.read().orders == before

    run(tmp_path, act, token_role=Role.ADMIN, second=Role.ADMIN)


def test_changes_at_once_all_count(tmp_path: Path) -> None:
    async def act(one: Member, two: Member, owner: Ownership) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(6):
                entry = CatalogueEntry(name=f"s{number}", model=f"a/m{number}")
                nursery.start_soon(ask, two, one, CatalogueChange(add=entry))
        one.look()
        found = one.joined.view.catalogue
        assert (found.version, {entry.name for entry in found.entries}) == (6, {f"s{number}" for number in range(6)})

    run(tmp_path, act, token_role=Role.ADMIN, second=Role.ADMIN)


def test_an_owner_that_was_restored_from_an_old_copy_goes_on_from_what_the_network_knows(tmp_path: Path) -> None:
    async def act(one: Member, two: Member, owner: Ownership) -> None:
        (first,) = (owner.read(),)
        await ask(two, one, CHAT)
        owner._save(first)
        code = CatalogueChange(add=CatalogueEntry(name="code", model="a/b"))
        changed = (await ask(two, one, code)).catalogue
        assert (changed.version, [entry.name for entry in changed.entries]) == (2, ["chat", "code"])

    run(tmp_path, act, token_role=Role.ADMIN, second=Role.ADMIN)


def test_an_owner_of_the_release_before_has_orders_without_one(tmp_path: Path) -> None:
    async def act(one: Member, two: Member, owner: Ownership) -> None:
        await ask(two, one, CHAT)
        await settle()
        number = one.joined.network.orders.number
        one.joined.network.order(sign_orders(owner.key, Orders(number + 1, ("f" * 16,))))
        await settle()
        two.look()
        assert two.joined.view.catalogue.entries == ()
        assert two.joined.network.orders.revoked == ("f" * 16,)

    run(tmp_path, act, token_role=Role.ADMIN, second=Role.ADMIN)


def test_the_box_with_the_key_has_the_catalogue_remember_how_long_requests_are(tmp_path: Path) -> None:
    async def act(one: Member, two: Member, owner: Ownership) -> None:
        await ask(two, one, CHAT)
        demand = Demand(requests_s=2.0, arrival_cv=1.0, lengths=((100, 10), (300, 30)))
        two.serve("s", demand)
        await settle()
        async with trio.open_nursery() as nursery:
            for member in (one, two):
                member.look()
                assert member.desk is not None
                nursery.start_soon(member.desk.run)
            await settle(LEARN_S + 5.0)
            two.look()
            (entry,) = two.joined.view.catalogue.entries
            assert (entry.lengths, two.joined.view.catalogue.version) == ((200, 20), 2)
            one.look()
            said = len(one.said)
            await settle(3 * LEARN_S)
            one.look()
            assert one.joined.view.catalogue.version == 2, "that is no news"
            assert len(one.said) == said
            nursery.cancel_scope.cancel()

    run(tmp_path, act, token_role=Role.ADMIN, second=Role.ADMIN)
