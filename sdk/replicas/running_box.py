"""The nodes of a box, in one cut after the other: what the network wants of it, and what becomes of that."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import msgspec
import trio

from ...bootstrap import AddressError, Identity, IdentityError, PeerId
from ...coordinator.names import count_of
from ...coordinator.regrouping.divisions import BoxDivision
from ...node.owner.dividing import READY, WANTS
from ...node.settings import NodeTuning
from ..errors import UsageError
from ..options.values import BOX
from .cuts import TRIAL_S, CutKeeper
from .dividing import NodePart, divide_box
from .node_process import DIVIDED
from .processes import BoxNodes, Greet, Parent, Tell

HANGS_S: Final = 30.0
"""After the time that requests have to finish, until a node that does not end is killed. Longer: more KV gets through
to others; shorter: a box with a hung node serves sooner again."""


def identify(home: Path, part: NodePart) -> PeerId:
    """The peer id of a node of this box, which its folder holds. Raises OSError or IdentityError."""
    folder = home / part.folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Identity.load_or_create(folder).peer_id


@final
class RunningBox(Parent):
    """One box. `options`: those of `join`; `visible`: its GPUs, as CUDA calls them."""

    def __init__(
        self,
        options: Mapping[str, Any],
        visible: Sequence[str],
        keeper: CutKeeper,
        *,
        tell: Tell,
        greet: Greet,
        tuning: NodeTuning,
    ) -> None:
        self._options = options
        self._visible = visible
        self._keeper = keeper
        self._tell = tell
        self._greet = greet
        self._tuning = tuning
        self._nodes: BoxNodes | None = None
        self._peers: tuple[str, ...] = ()  # of the nodes that run
        self._leaves = False  # for good
        self._let_go = trio.Event()  # the nodes of this cut are to leave
        self._shown = trio.Event()  # this cut works

    def __repr__(self) -> str:
        return f"<RunningBox {self._keeper} {self._nodes}>"

    def leave(self) -> None:
        """Let all nodes finish their requests and leave; a second time, let them end at once."""
        is_leaving = self._let_go.is_set() and not self._leaves  # for another cut: they have been told
        self._leaves = True
        self._let_go.set()
        if self._nodes is not None and not is_leaving:
            self._nodes.leave()

    async def run(self) -> int:
        """Run nodes until all have left for good; the exit code. Raises UsageError, AddressError, IdentityError or
        OSError where the first cut cannot be."""
        keeper, ran_before = self._keeper, False
        while True:
            self._let_go, self._shown = trio.Event(), trio.Event()
            try:
                nodes = self._make_nodes(ran_before)
            except (UsageError, AddressError, IdentityError, OSError) as error:
                if not keeper.fail(str(error)):
                    raise
                self._say_back(str(error))
            else:
                code = await self._run_cut(nodes)
                ran_before = True
                if self._leaves or keeper.next is None:
                    return code
            keeper.start_next(time.time())
            self._tell(BOX, f"divided among {count_of(keeper.replicas, 'node')} from now on")

    def on_told(self, part: NodePart, told: Mapping[str, Any]) -> None:
        """A node tells that its engine serves, or the first one what the network wants."""
        if READY in told:
            if self._keeper.note_ready(part.folder):
                self._tell(BOX, "all nodes are ready")
                self._shown.set()
            return
        replicas = told[WANTS]
        if self._leaves or not isinstance(replicas, int):
            return
        why = self._keeper.want(replicas, self._peers, time.time())
        if why:
            self._tell(BOX, f"the network wants {replicas} nodes: {why}")
            return
        self._tell(BOX, f"the network wants {count_of(replicas, 'node')}: those that run finish their requests")
        self._let_nodes_leave()

    def on_failed(self, part: NodePart, why: str) -> bool:
        """A node has ended that was not to; whether all are to leave for that, and the cut before comes back."""
        if self._leaves or not self._keeper.fail(f"{part.folder}: {why}"):
            return False
        self._say_back(why)
        self._let_go.set()
        return True

    def _say_back(self, why: str) -> None:
        failed = count_of(self._keeper.replicas, "node")
        self._tell(BOX, f"cannot be {failed}, goes back to {self._keeper.next}: {why}")

    def _let_nodes_leave(self) -> None:
        self._let_go.set()
        if self._nodes is not None:
            self._nodes.leave()

    def _make_nodes(self, were_members: bool) -> BoxNodes:
        """Raises UsageError, AddressError, IdentityError or OSError."""
        parts = divide_box(self._options, self._keeper.replicas, self._visible)
        home: Path = self._options["home"].expanduser()
        self._peers = tuple(identify(home, part) for part in parts)
        if self._keeper.is_open:
            told = self._keeper.describe(self._peers)
            others = msgspec.structs.replace(told, division=BoxDivision(head=self._peers[0]))
            parts = tuple(part.with_options({DIVIDED: others if number else told}) for number, part in enumerate(parts))
        self._nodes = BoxNodes(
            parts,
            self._options,
            tell=self._tell,
            greet=self._greet,
            tuning=self._tuning,
            parent=self,
            were_members=were_members,
        )
        return self._nodes

    async def _run_cut(self, nodes: BoxNodes) -> int:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_trial)
            nursery.start_soon(self._end_hung, nodes)
            code = await nodes.run()
            nursery.cancel_scope.cancel()
        return code

    async def _watch_trial(self) -> None:
        """A cut that takes too long to show that it works has failed."""
        with trio.move_on_after(TRIAL_S):
            await self._shown.wait()
        why = f"its engines were not ready after {TRIAL_S:.0f} s"
        if not self._let_go.is_set() and self._keeper.fail(why):
            self._say_back(why)
            self._let_nodes_leave()

    async def _end_hung(self, nodes: BoxNodes) -> None:
        """A node that does not leave for another cut is not waited for without end."""
        await self._let_go.wait()
        await trio.sleep(self._options["drain_s"] + HANGS_S)
        if not self._leaves:
            nodes.end()
