"""A box that hosts what it is given, on a virtual clock: it examines, fetches, and leaves to come back with a model."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import PeerId, Unreachable
from p2pserve.coordinator.services.catalogue import EMPTY, CatalogueEntry, ServiceCatalogue
from p2pserve.coordinator.services.hosting import HostedModel
from p2pserve.node.catalogue import hosting
from p2pserve.node.catalogue.hosting import RETRY_S, HostingLife, Placed, follow_lives
from p2pserve.node.catalogue.messages import HostedService, HostingPlan
from p2pserve.node.models import ModelError
from p2pserve.node.view import NetworkView

CHAT, CODE = CatalogueEntry(name="chat", model="a/chat"), CatalogueEntry(name="code", model="a/code")
LISTED = ServiceCatalogue(version=1, entries=(CHAT, CODE))
ABLE = HostedModel(fits=4, layers=4)


class Shelf:
    """Finds every model; `fetch_s` seconds bring one, which `error` may end."""

    beside = ()
    room_bytes = 0

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.examined: list[str] = []
        self.fetched: list[str] = []
        self.fetch_s = 5.0

    def examine(self, entry: CatalogueEntry) -> HostedModel:
        self.examined.append(entry.name)
        return ABLE if self.error is None else HostedModel(fault=str(self.error))

    def fetch(self, entry: CatalogueEntry, report: object) -> Any:
        return SimpleNamespace(name=entry.name)


class World:
    """What the box is told, and what it has said."""

    def __init__(self) -> None:
        self.view, self.shelf = NetworkView(), Shelf()
        self.view.catalogue = LISTED
        self.said: list[str] = []
        self.news = 0
        self.joined: Any = SimpleNamespace(
            view=self.view, own=PeerId("me"), say=self.said.append, show=lambda text: None
        )

    def give(self, name: str) -> None:
        self.view.hosting = HostingPlan(epoch=1, serial=1, services=(HostedService(name=name, boxes=("me",)),))

    def note(self) -> None:
        self.news += 1


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    async def download(fetch: Callable[[Any], Any], say: Callable[[str], None]) -> Any:
        say("downloads x: 1 %")
        with trio.move_on_after(made.shelf.fetch_s):
            await trio.sleep_forever()
        if made.shelf.error is not None:
            raise made.shelf.error
        found = fetch(None)
        made.shelf.fetched.append(found.name)
        return found

    async def run_here(work: Callable[..., object], *given: object, abandon_on_cancel: bool) -> object:
        await trio.lowlevel.checkpoint()
        return work(*given)

    monkeypatch.setattr(hosting, "run_download", download)
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    return made


def live(world: World, act: Callable[[HostingLife], Awaitable[None]], placed: Placed | None = None) -> HostingLife:
    shelf: Any = world.shelf
    life = HostingLife(shelf, placed, {})

    async def main() -> None:
        with trio.fail_after(1000.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(life.run, world.joined, world.note)
                await act(life)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return life


async def wait(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def test_a_box_says_what_it_can_do_and_waits_until_it_is_given_something(world: World) -> None:
    async def act(life: HostingLife) -> None:
        await wait(3.0)
        offer = life.offer(None)
        assert (offer.models, offer.hosts, offer.prepares) == ({"chat": ABLE, "code": ABLE}, "", "")
        assert offer.detail.startswith("waits: ")
        assert world.shelf.examined == ["chat", "code"]
        assert not life.ended.is_set()

    live(world, act)


def test_what_it_is_given_it_fetches_and_comes_back_with(world: World) -> None:
    async def act(life: HostingLife) -> None:
        await wait(3.0)
        world.give("chat")
        await wait(3.0)
        offer = life.offer(None)
        assert (offer.prepares, offer.detail) == ("chat", "downloads x: 1 %")
        stop = trio.Event()
        await life.wait_end(stop)
        assert not stop.is_set()

    life = live(world, act)
    after = life.after()
    assert (after.hosts, world.shelf.fetched) == ("chat", ["chat"])
    assert after.served is not None
    assert "chat is here: this box comes back with it" in world.said


def test_it_serves_on_until_all_files_of_the_next_are_here(world: World) -> None:
    served: Any = SimpleNamespace()

    async def act(life: HostingLife) -> None:
        world.give("code")
        await wait(4.0)
        assert (life.hosts, life.offer(None).prepares) == ("chat", "code")
        await life.ended.wait()

    assert live(world, act, Placed(CHAT, served)).after().hosts == "code"


def test_a_download_of_what_is_not_wanted_any_more_is_called_off(world: World) -> None:
    async def act(life: HostingLife) -> None:
        world.shelf.fetch_s = 100.0
        await wait(2.0)
        world.give("chat")
        await wait(3.0)
        world.shelf.fetch_s = 2.0
        world.give("code")
        await life.ended.wait()

    assert live(world, act).after().hosts == "code"
    assert world.shelf.fetched == ["code"]


def test_what_cannot_be_fetched_is_offered_no_more_and_tried_again_later(world: World) -> None:
    async def act(life: HostingLife) -> None:
        await wait(2.0)
        world.give("chat")
        world.shelf.error = ModelError("model a/chat: the disk is full")
        await wait(10.0)
        assert life.offer(None).models["chat"].fault == "model a/chat: the disk is full"
        assert life.offer(None).prepares == ""
        assert world.said.count("chat cannot be hosted here: model a/chat: the disk is full") == 1
        world.shelf.error = None
        await wait(RETRY_S)
        assert life.offer(None).models["chat"].is_possible
        await life.ended.wait()

    assert live(world, act).after().hosts == "chat"


def test_what_is_out_of_the_catalogue_is_hosted_no_more(world: World) -> None:
    served: Any = SimpleNamespace()

    async def act(life: HostingLife) -> None:
        await wait(2.0)
        world.view.catalogue = ServiceCatalogue(version=2, entries=(CODE,), removed=("a/chat",))
        await life.ended.wait()

    life = live(world, act, Placed(CHAT, served))
    assert (life.after().hosts, world.said[-1]) == ("", "chat is out of the catalogue: this box hosts it no more")


def test_a_box_that_has_just_come_back_waits_for_the_catalogue_that_it_knew(world: World) -> None:
    served: Any = SimpleNamespace()
    world.view.catalogue = EMPTY

    async def act(life: HostingLife) -> None:
        await wait(5.0)
        world.view.catalogue = LISTED
        await wait(5.0)
        assert not life.ended.is_set()

    assert live(world, act, Placed(CHAT, served, LISTED.version)).hosts == "chat"


def test_what_is_out_of_the_catalogue_is_offered_no_more(world: World) -> None:
    async def act(life: HostingLife) -> None:
        await wait(2.0)
        world.view.catalogue = ServiceCatalogue(version=2, entries=(CODE,), removed=("a/chat",))
        await wait(2.0)
        assert life.offer(None).models == {"code": ABLE}

    live(world, act)


def test_its_owner_ends_it(world: World) -> None:
    async def act(life: HostingLife) -> None:
        stop = trio.Event()
        stop.set()
        await life.wait_end(stop)
        assert not life.ended.is_set()

    live(world, act)


def fail(error: Exception) -> None:
    """As a node fails: in a group."""
    raise ExceptionGroup("", [error])


def test_one_life_follows_the_other_until_its_owner_ends_it(world: World) -> None:
    shelf, stop, served = world.shelf, trio.Event(), SimpleNamespace()
    made: Any = shelf
    placed: Any = Placed(CHAT, served)  # type: ignore[arg-type]
    hosted = []
    for life in follow_lives(made, stop):
        hosted.append(life.hosts)
        life.next = placed if len(hosted) == 1 else None
        if len(hosted) == 3:
            stop.set()
    assert hosted == ["", "chat", ""]


def test_a_box_that_reaches_nobody_when_it_comes_back_tries_again_with_the_same_model(world: World) -> None:
    shelf: Any = world.shelf
    served: Any = SimpleNamespace()
    first = HostingLife(shelf, None, {})
    with pytest.raises(ExceptionGroup), first.bear_absence(world.said.append):
        fail(Unreachable("nobody\nanswers"))
    first.next = Placed(CHAT, served)
    second = first.after()
    with second.bear_absence(world.said.append):
        fail(Unreachable("nobody\nanswers"))
    assert world.said == ["cannot come back with chat yet: nobody answers; tries again"]
    assert second.after().hosts == "chat"
    with pytest.raises(ExceptionGroup), second.bear_absence(world.said.append):
        fail(ValueError("a mistake"))
