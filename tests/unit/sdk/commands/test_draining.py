"""`p2pserve drain` waits until a box has no request left, and says how many it has."""

import io
from pathlib import Path

import pytest

from p2pserve.node.box.errors import NodeError
from p2pserve.node.owner.messages import Drained
from p2pserve.node.owner.questions import OwnerAnswer, OwnerQuestion
from p2pserve.sdk.box import draining
from p2pserve.sdk.box.draining import wait_until_idle
from p2pserve.sdk.live_line import LiveLine

PEER = "12D3KooWGhxyz"


class World:
    """A box whose requests end one by one, each time it is asked."""

    def __init__(self, *requests: int, draining: bool = True) -> None:
        self.answers = [OwnerAnswer(node=PEER, drained=Drained(draining=draining, requests=each)) for each in requests]
        self.now = 0.0
        self.shown: list[str] = []

    def ask(self, draining: bool | None) -> OwnerAnswer:
        assert draining is None  # it has been told once
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def sleep(self, seconds: float) -> None:
        self.now += 2 * seconds

    def wait(self, timeout_s: float = 60.0) -> OwnerAnswer:
        first = self.answers.pop(0)
        return wait_until_idle(self.ask, first, timeout_s, self.shown.append, clock=lambda: self.now, sleep=self.sleep)


def test_it_waits_for_the_last_request() -> None:
    world = World(2, 1, 1, 0)
    found = world.wait()
    assert found.drained is not None
    assert found.drained.requests == 0
    assert world.shown == ["2 requests left, 0 s so far", "1 request left, 1 s so far", "1 request left, 2 s so far"]


def test_it_does_not_wait_for_ever() -> None:
    with pytest.raises(NodeError, match=r"goes on draining: 1 request left after 5 s"):
        World(1, 1).wait(5.0)


def test_a_box_that_has_been_told_to_serve_again_meanwhile_is_waited_for_no_longer() -> None:
    world = World(2, 2)
    world.answers[1] = OwnerAnswer(node=PEER, drained=Drained(draining=False, requests=2))
    assert world.wait().drained == Drained(draining=False, requests=2)


def test_leave_says_what_is_left_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[OwnerAnswer | NodeError] = [
        OwnerAnswer(node=PEER, drained=Drained(draining=True, requests=1, left_s=21.6)),
        OwnerAnswer(node=PEER, drained=Drained(draining=False)),  # it has not had the signal yet
        NodeError("it is gone"),
    ]

    def ask(home: Path, question: OwnerQuestion, timeout_s: float) -> OwnerAnswer:
        assert question == OwnerQuestion()
        answer = said.pop(0)
        if isinstance(answer, NodeError):
            raise answer
        return answer

    monkeypatch.setattr(draining, "ask_node", ask)
    stream, world = io.StringIO(), World()
    looking = draining.Looking([Path("/home")], LiveLine(stream, lambda: world.now), lambda: world.now)
    for at in (0.0, 0.1, 0.6, 1.2):
        world.now = at
        looking.look()
    assert stream.getvalue() == "1 request left, 22 s at most\n"
    assert said == []
