"""Which cut the nodes of a box run in, and what follows from how that goes. No I/O, no clock.

as it is ── the network wants another cut ──> its nodes leave ──> on trial ── all are ready ──> as it is
   ^                                                                 │
   └──────────── its nodes leave, the reason is told ────────────────┴── one fails, or it takes too long
"""

from __future__ import annotations

from typing import Final, final

from ...coordinator.regrouping.divisions import BoxDivision, CutOffer
from ...node.owner.dividing import DividedBox, refuse_cut

TRIAL_S: Final = 800.0
"""In which all nodes of another cut must be ready: a little less than a coordinator waits, so that the reason comes
from here. Longer: slow disks are waited for; shorter: a box that hangs in another cut serves sooner again."""

MAX_WHY: Final = 300
"""Characters of a reason, most of which is what a node has printed."""


@final
class CutKeeper:
    """Of one box. `offers`: the cuts that it can take; `every_s`: the network may divide it anew so often at most.
    Times are unix seconds."""

    def __init__(self, replicas: int, offers: tuple[CutOffer, ...], every_s: float) -> None:
        self._offers = offers
        self._every_s = every_s
        self._not_before = 0.0
        self._before: int | None = None  # the cut that ran before, while another one is on trial
        self._ready: set[str] = set()  # nodes of that
        self._refused, self._why = 0, ""
        self._next: int | None = None
        self.replicas = replicas
        """The cut that runs: so many nodes."""

    def __repr__(self) -> str:
        return f"<CutKeeper {self.replicas} before={self._before} next={self._next}>"

    @property
    def is_open(self) -> bool:
        """Whether the network may choose."""
        return bool(self._offers)

    @property
    def is_on_trial(self) -> bool:
        """Whether the cut that runs has not shown yet that it can."""
        return self._before is not None

    @property
    def next(self) -> int | None:
        """The cut that comes when the nodes of this one have left; None: none, they leave for good."""
        return self._next

    def describe(self, nodes: tuple[str, ...]) -> DividedBox:
        """What these nodes of the cut that runs, by peer id, are told at their start."""
        division = BoxDivision(
            head=nodes[0], nodes=nodes, offers=self._offers, refused=self._refused, why=self._why
        )  # fmt: skip
        return DividedBox(division=division, not_before=self._not_before)

    def want(self, replicas: int, nodes: tuple[str, ...], now: float) -> str:
        """The first node says that the network wants this cut: why it is not taken; "": its nodes are to leave now."""
        if self._next is not None or self.is_on_trial:
            return "it is about to be divided anew already"
        if replicas == self.replicas:
            return f"it has {replicas} nodes already"
        why = refuse_cut(self.describe(nodes), replicas, now)
        if not why:
            self._next = replicas
        return why

    def start_next(self, now: float) -> None:
        """The nodes have left, and those of the next cut start at `now`."""
        assert self._next is not None, "a cut has been wanted"
        if self.is_on_trial:
            self._before = None  # back to what it was
        else:
            self._before, self._refused, self._why = self.replicas, 0, ""
        self.replicas, self._next = self._next, None
        self._ready = set()
        self._not_before = now + self._every_s

    def note_ready(self, node: str) -> bool:
        """The engine of a node serves; whether that ends the trial of its cut."""
        self._ready.add(node)
        if not self.is_on_trial or len(self._ready) < self.replicas:
            return False
        self._before = None
        return True

    def fail(self, why: str) -> bool:
        """A node of the cut that runs has failed, or it has taken too long; whether the nodes are to leave for the cut
        before."""
        if self._before is None or self._next is not None:
            return False
        self._refused, self._why, self._next = self.replicas, why[:MAX_WHY], self._before
        return True
