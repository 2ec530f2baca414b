"""Who may let a box drain, what becomes of the order, and what is told of it."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from p2pserve.bootstrap import PeerId, RemoteError, Role
from p2pserve.node.methods import DRAIN
from p2pserve.node.observing.values import NodeSummary
from p2pserve.node.owner.draining import DrainDesk, DrainOrder, describe_left
from p2pserve.node.owner.messages import Drain
from p2pserve.node.owner.questions import OwnerQuestion
from p2pserve.node.testing import MemoryExchange

T = TypeVar("T")

HERE, THERE = PeerId("12D3KooWhere"), PeerId("12D3KooWthere")
NODES = tuple(
    NodeSummary(id=peer, name=name, role="worker", state="alive", address="192.0.2.1:4002")
    for peer, name in ((HERE, "amber-otter"), (THERE, "calm-heron"))
)


class Box:
    """A node's desk, and what it has heard."""

    def __init__(self, exchange: MemoryExchange, peer: PeerId, home: Path, role: Role = Role.WORKER) -> None:
        self.heard: list[tuple[bool, PeerId | None]] = []
        self.requests = 2
        home.mkdir(exist_ok=True)
        self.messenger = exchange.join(peer, role)
        self.desk = DrainDesk(
            DrainOrder(home),
            self.messenger,
            nodes=lambda: NODES,
            requests=lambda: self.requests,
            apply=lambda draining, by: self.heard.append((draining, by)),
        )


def run(ask: Callable[[], Awaitable[T]]) -> T:
    return trio.run(ask)


def test_the_owner_of_a_box_lets_it_drain_and_serve_again(tmp_path: Path) -> None:
    box = Box(MemoryExchange(), HERE, tmp_path)
    asked = run(lambda: box.desk.answer(OwnerQuestion()))
    assert asked.drained is not None
    assert (asked.node, asked.drained.draining, asked.drained.since) == (HERE, False, 0.0)
    given = run(lambda: box.desk.answer(OwnerQuestion(draining=True)))
    assert given.drained is not None
    assert (given.drained.draining, given.drained.requests) == (True, 2)
    assert given.drained.since > 0.0
    again = run(lambda: box.desk.answer(OwnerQuestion(draining=True)))
    assert again == given  # and the box has heard of it once
    back = run(lambda: box.desk.answer(OwnerQuestion(draining=False)))
    assert back.drained is not None
    assert not back.drained.draining
    assert box.heard == [(True, None), (False, None)]


def test_the_order_outlives_the_node(tmp_path: Path) -> None:
    first = Box(MemoryExchange(), HERE, tmp_path)
    run(lambda: first.desk.answer(OwnerQuestion(draining=True)))
    second = Box(MemoryExchange(), HERE, tmp_path)
    assert second.desk.is_draining
    assert second.desk.describe().since == first.desk.describe().since
    run(lambda: second.desk.answer(OwnerQuestion(draining=False)))
    assert not Box(MemoryExchange(), HERE, tmp_path).desk.is_draining


@pytest.mark.parametrize(("role", "may"), [(Role.ADMIN, True), (Role.WORKER, False), (Role.CLIENT, False)])
def test_only_an_admin_lets_another_box_drain(tmp_path: Path, role: Role, may: bool) -> None:
    exchange = MemoryExchange()
    here = Box(exchange, HERE, tmp_path / "here", role)
    there = Box(exchange, THERE, tmp_path / "there")
    answer = run(lambda: here.desk.answer(OwnerQuestion(box="calm-heron", draining=True)))
    assert here.heard == []
    if may:
        assert (answer.node, there.heard, there.desk.is_draining) == (THERE, [(True, HERE)], True)
    else:
        assert (answer.fault, there.heard, there.desk.is_draining) == ("refused", [], False)
        assert "admins of its network alone" in answer.failed


@pytest.mark.parametrize("role", [Role.WORKER, Role.CLIENT])
def test_nor_may_others_ask_how_it_stands(tmp_path: Path, role: Role) -> None:
    exchange = MemoryExchange()
    Box(exchange, THERE, tmp_path)
    other = exchange.join(HERE, role)
    with pytest.raises(RemoteError, match=r"may not call 'drain'.* admin"):
        run(lambda: other.request(THERE, DRAIN, Drain(), 1.0))


def test_a_box_that_nobody_knows_or_that_is_gone_is_named(tmp_path: Path) -> None:
    here = Box(MemoryExchange(), HERE, tmp_path, Role.ADMIN)
    unknown = run(lambda: here.desk.answer(OwnerQuestion(box="no-such", draining=True)))
    assert unknown.fault == "usage"
    assert unknown.failed == "box: no box is called no-such; there are amber-otter, calm-heron"
    gone = run(lambda: here.desk.answer(OwnerQuestion(box="calm-heron", draining=True)))
    assert (gone.fault, gone.failed) == ("failed", f"box: calm-heron: {THERE} is gone")


def test_an_order_that_cannot_be_kept_changes_nothing(tmp_path: Path) -> None:
    box = Box(MemoryExchange(), HERE, tmp_path / "home")
    (tmp_path / "home").rmdir()
    answer = run(lambda: box.desk.answer(OwnerQuestion(draining=True)))
    assert (answer.fault, box.heard, box.desk.is_draining) == ("failed", [], False)


def test_one_that_leaves_says_when(tmp_path: Path) -> None:
    box = Box(MemoryExchange(), HERE, tmp_path)
    left = [22.0, -1.0]
    box.desk.leaves_in = lambda: left.pop(0)
    first, last = box.desk.describe(), box.desk.describe()
    assert (first.draining, first.left_s, last.left_s) == (True, 22.0, 0.0)


def test_what_is_left_for_people() -> None:
    assert [describe_left(each) for each in (0, 1, 2)] == ["no request left", "1 request left", "2 requests left"]
