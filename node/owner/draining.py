"""Draining: a box takes no new requests, finishes what it has, and stays in the network.

    p2pserve drain            on the box itself
    p2pserve drain BOX        another box of the network, on the box of an admin of it

The order holds until it is taken back, also when the node is started anew: it is a file in the node's home. A member
that asks for it over the network must have an admin's certificate, as the box that made the network has; neither
clients nor other boxes have one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from ...bootstrap import NetworkError, PeerId, RemoteError, Role
from ...bootstrap.methods import Messenger
from .. import methods
from ..admin.naming import UnknownBox, find_box
from ..observing.values import NodeSummary
from .messages import Drain, Drained
from .questions import OwnerAnswer, OwnerQuestion

FILE: Final = "draining"
_NO_ADMIN: Final = (
    "takes that from admins of its network alone, and this node is none; run it on the box that ran `p2pserve "
    "bootstrap`, or on that box itself"
)
ASK_S: Final = 5.0  # another box; longer: slow ones answer; shorter: what hangs is told sooner


@final
class DrainOrder:
    """The owner's order, in the folder `home`. Raises OSError when it is read or changed."""

    def __init__(self, home: Path) -> None:
        self._file = home / FILE

    def __repr__(self) -> str:
        return f"<DrainOrder since {self.since}>"

    @property
    def since(self) -> float | None:
        """When it was given, in unix seconds; None: there is none."""
        try:
            return self._file.stat().st_mtime
        except FileNotFoundError:
            return None

    def give(self) -> None:
        """From now on; one that was given before stays."""
        if self.since is None:
            self._file.touch(mode=0o600)

    def take_back(self) -> None:
        """The box takes requests again."""
        self._file.unlink(missing_ok=True)


@final
class DrainDesk:
    """One per node. `nodes`: the boxes of the network; `requests`: how many are unfinished here; `apply` hears of each
    change of the order, and who has asked for it ("" for the owner)."""

    def __init__(
        self,
        order: DrainOrder,
        messenger: Messenger,
        *,
        nodes: Callable[[], tuple[NodeSummary, ...]],
        requests: Callable[[], int],
        apply: Callable[[bool, PeerId | None], None],
    ) -> None:
        self._order = order
        self._messenger = messenger
        self._nodes = nodes
        self._requests = requests
        self._apply = apply
        self._since = order.since
        self.leaves_in: Callable[[], float] | None = None  # seconds, once the node is leaving
        messenger.handle(methods.DRAIN, self._on_drain)

    def __repr__(self) -> str:
        return f"<DrainDesk since={self._since} requests={self._requests()}>"

    @property
    def is_draining(self) -> bool:
        """Whether the order holds."""
        return self._since is not None

    def describe(self) -> Drained:
        """As others may read it."""
        leaves_in = self.leaves_in
        return Drained(
            draining=self.is_draining or leaves_in is not None,
            since=self._since or 0.0,
            requests=self._requests(),
            left_s=max(0.0, leaves_in()) if leaves_in is not None else None,
        )

    async def answer(self, question: OwnerQuestion) -> OwnerAnswer:
        """The owner of this box wants to know, or wants a box to drain."""
        own = self._messenger.peer_id
        try:
            peer = PeerId(find_box(self._nodes(), question.box, "box").id) if question.box else own
            if peer == own:
                self._follow(question.draining, None)
                return OwnerAnswer(node=own, drained=self.describe())
            drained = await self._messenger.request(peer, methods.DRAIN, Drain(draining=question.draining), ASK_S)
        except UnknownBox as error:
            return OwnerAnswer(failed=str(error)[:500], fault="usage")
        except OSError as error:
            return OwnerAnswer(failed=f"home: the order cannot be kept: {error.strerror}", fault="failed")
        except RemoteError as error:
            if error.code == "forbidden":
                return OwnerAnswer(failed=f"box: {question.box} {_NO_ADMIN}", fault="refused")
            return OwnerAnswer(failed=f"box: {question.box}: {error.message}"[:500], fault="failed")
        except NetworkError as error:
            return OwnerAnswer(failed=f"box: {question.box}: {error}"[:500], fault="failed")
        return OwnerAnswer(node=peer, drained=drained)

    async def _on_drain(self, peer: PeerId, role: Role, body: Drain) -> Drained:
        """An admin of the network asks."""
        try:
            self._follow(body.draining, peer)
        except OSError as error:
            raise RemoteError("failed", f"the order cannot be kept there: {error.strerror}") from error
        return self.describe()

    def _follow(self, draining: bool | None, by: PeerId | None) -> None:
        """Raises OSError."""
        if draining is None or draining == self.is_draining:
            return
        if draining:
            self._order.give()
        else:
            self._order.take_back()
        self._since = self._order.since
        self._apply(draining, by)


def describe_left(requests: int) -> str:
    """For people: `1 request left`."""
    return f"{requests or 'no'} request{'s' * (requests > 1)} left"
