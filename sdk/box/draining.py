"""`p2pserve drain` and `leave`: nodes finish what they have, to stay without new requests or to go."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from ...coordinator.names import name_of
from ...node.box.errors import NodeError
from ...node.box.home import ask_to_leave, running_pid, wait_until_left
from ...node.owner.draining import describe_left
from ...node.owner.messages import Drained
from ...node.owner.questions import OwnerAnswer, OwnerQuestion, ask_node
from ..live_line import LiveLine
from ..options.values import BOX, MADE, is_own_node
from ..printing import printable
from .own_nodes import find_own_nodes

LOOK_S: Final = 0.5

Ask = Callable[[bool | None], OwnerAnswer]
"""What a box says; with True or False it is told to drain or not."""


def leave(arguments: SimpleNamespace) -> int:
    """`p2pserve leave`."""
    home = arguments.home.expanduser()
    names = find_own_nodes(home, arguments.node)
    # What has started several nodes is asked itself: else it would start one again that has failed just now.
    asked = [BOX] if arguments.node is None and running_pid(home / BOX) is not None else names
    pids = {name: ask_to_leave(home / name) for name in asked}  # all of them at once: none waits for another
    give_up = time.monotonic() + arguments.timeout_s
    with LiveLine(sys.stderr, time.monotonic) as line:
        look = Looking([home / name for name in names], line, time.monotonic).look
        for name, pid in pids.items():
            if pid is not None:
                wait_until_left(home / name, pid, max(0.0, give_up - time.monotonic()), look=look)
    if arguments.format == "json":
        print(json.dumps({"node": names[0], "left": True, **({"nodes": names} if len(names) > 1 else {})}))
    else:
        who = f"the {names[0]} of this box has" if len(names) == 1 else f"{', '.join(names)} of this box have"
        print(f"{who} left {'its' if len(names) == 1 else 'their'} network")
    return 0


class Looking:
    """Says now and then how far nodes are that leave. One that does not answer is about to be gone."""

    def __init__(self, homes: Sequence[Path], line: LiveLine, clock: Callable[[], float]) -> None:
        self._homes = homes
        self._line = line
        self._clock = clock
        self._due_at = clock()

    def look(self) -> None:
        """Say it if it is due."""
        if self._clock() < self._due_at:
            return
        found = [drained for home in self._homes if (drained := self._ask(home)) is not None]
        leaving = [(drained.requests, drained.left_s) for drained in found if drained.left_s is not None]
        requests = sum(count for count, _ in leaving)
        if requests:
            left_s = max(left_s for count, left_s in leaving if count)
            self._line.show(f"{describe_left(requests)}, {left_s:.0f} s at most")
        self._due_at = self._clock() + LOOK_S

    def _ask(self, home: Path) -> Drained | None:
        try:
            return ask_node(home, OwnerQuestion(), LOOK_S).drained
        except NodeError:
            return None


def drain(arguments: SimpleNamespace) -> int:
    """`p2pserve drain`."""
    homes, box = _find_homes(arguments.home.expanduser(), arguments.box)

    def ask_at(home: Path) -> Ask:
        return lambda draining: ask_node(home, OwnerQuestion(box=box, draining=draining))

    asked = [(ask, ask(not arguments.undo)) for ask in map(ask_at, homes)]
    if not (arguments.undo or arguments.no_wait):
        give_up = time.monotonic() + arguments.timeout_s
        with LiveLine(sys.stderr, time.monotonic) as line:
            for number, (ask, answer) in enumerate(asked):
                left_s = max(0.0, give_up - time.monotonic())
                asked[number] = ask, wait_until_idle(ask, answer, left_s, line.show)
    _print_drained([answer for _, answer in asked], arguments.format, draining=not arguments.undo)
    return 0


def _print_drained(answers: Sequence[OwnerAnswer], form: str, *, draining: bool) -> None:
    """A line for each node; as JSON one object, in which several nodes are a list."""
    drained = [answer.drained or Drained(draining=draining) for answer in answers]
    if form != "json":
        for answer, each in zip(answers, drained, strict=True):
            print(printable(f"{name_of(answer.node)} {_describe(each)}"))
        return
    rows = [
        {"node": answer.node, "draining": each.draining, "requests": each.requests, "since": each.since or None}
        for answer, each in zip(answers, drained, strict=True)
    ]
    print(json.dumps({**rows[0], **({"nodes": rows} if len(rows) > 1 else {})}))


def wait_until_idle(
    ask: Ask,
    answer: OwnerAnswer,
    timeout_s: float,
    show: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> OwnerAnswer:
    """Until the box has no request left; its last answer. Raises NodeError."""
    began = clock()
    while answer.drained is not None and answer.drained.draining and answer.drained.requests:
        waited_s = clock() - began
        left = describe_left(answer.drained.requests)
        if waited_s >= timeout_s:
            raise NodeError(f"{name_of(answer.node)} goes on draining: {left} after {timeout_s:g} s")
        show(f"{left}, {waited_s:.0f} s so far")
        sleep(LOOK_S)
        answer = ask(None)
    return answer


def _describe(drained: Drained) -> str:
    if drained.left_s is not None:
        return f"is leaving the network: {describe_left(drained.requests)}"
    if drained.draining:
        return f"is draining: it takes no new requests; {describe_left(drained.requests)}"
    return "takes new requests"


def _find_homes(home: Path, box: str | None) -> tuple[list[Path], str]:
    """The folders of the nodes that are to be asked, and the other box that one is to ask. Of the nodes here, the one
    that made a network is its admin."""
    if box is None or is_own_node(box):
        return [home / name for name in find_own_nodes(home, box)], ""
    if running_pid(home / MADE) is not None:
        return [home / MADE], box
    return [home / find_own_nodes(home, None)[0]], box
