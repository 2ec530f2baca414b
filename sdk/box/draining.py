"""`p2pserve drain` and `leave`: a box finishes what it has, to stay without new requests or to go."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from ...coordinator.names import name_of
from ...node.box.errors import NodeError
from ...node.box.home import leave_node, running_pid
from ...node.messages import Drained
from ...node.owner.draining import describe_left
from ...node.owner.questions import OwnerAnswer, OwnerQuestion, ask_node
from ..live_line import LiveLine
from ..printing import printable
from .own_nodes import OWN, find_own_node

LOOK_S: Final = 0.5

Ask = Callable[[bool | None], OwnerAnswer]
"""What a box says; with True or False it is told to drain or not."""


def leave(arguments: SimpleNamespace) -> int:
    """`p2pserve leave`."""
    name = find_own_node(arguments.home.expanduser(), arguments.node)
    home = arguments.home.expanduser() / name
    with LiveLine(sys.stderr, time.monotonic) as line:
        leave_node(home, arguments.timeout_s, look=Looking(home, line, time.monotonic).look)
    if arguments.format == "json":
        print(json.dumps({"node": name, "left": True}))
    else:
        print(f"the {name} of this box has left its network")
    return 0


class Looking:
    """Says now and then how far a node is that leaves. One that does not answer is about to be gone."""

    def __init__(self, home: Path, line: LiveLine, clock: Callable[[], float]) -> None:
        self._home = home
        self._line = line
        self._clock = clock
        self._due_at = clock()

    def look(self) -> None:
        """Say it if it is due."""
        if self._clock() < self._due_at:
            return
        try:
            drained = ask_node(self._home, OwnerQuestion(), LOOK_S).drained
        except NodeError:
            drained = None
        if drained is not None and drained.requests and drained.left_s is not None:
            self._line.show(f"{describe_left(drained.requests)}, {drained.left_s:.0f} s at most")
        self._due_at = self._clock() + LOOK_S


def drain(arguments: SimpleNamespace) -> int:
    """`p2pserve drain`."""
    home, box = _find_home(arguments.home.expanduser(), arguments.box)

    def ask(draining: bool | None) -> OwnerAnswer:
        return ask_node(home, OwnerQuestion(box=box, draining=draining))

    answer = ask(not arguments.undo)
    if not (arguments.undo or arguments.no_wait):
        with LiveLine(sys.stderr, time.monotonic) as line:
            answer = wait_until_idle(ask, answer, arguments.timeout_s, line.show)
    drained = answer.drained or Drained(draining=not arguments.undo)
    if arguments.format == "json":
        found = {"node": answer.node, "draining": drained.draining, "requests": drained.requests}
        print(json.dumps({**found, "since": drained.since or None}))
    else:
        print(printable(f"{name_of(answer.node)} {_describe(drained)}"))
    return 0


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


def _find_home(home: Path, box: str | None) -> tuple[Path, str]:
    """The folder of the node that is to be asked, and the other box that it is to ask. Of two nodes here, the one that
    made a network is its admin."""
    if box is None or box in OWN:
        return home / find_own_node(home, box), ""
    made = home / "bootstrap"
    return (made if running_pid(made) is not None else home / "node"), box
