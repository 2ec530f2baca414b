"""What nodes say to each other about plans: manifests to all, the plan itself in pieces, and what an admin orders."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ...coordinator.bounds import MAX_REPLICAS, MAX_SERVICES, Count, Counter, Figure, ModelName, Name, Seconds
from ...coordinator.plan import BoxRecut, Groups
from ..messages import Message

PLAN_BUNDLE: Final = "plans"

MAX_PLAN_BYTES: Final = 4 << 20  # 4,096 replicas of one box each, with all the pairs that they get, take half of it
INLINE_PLAN_BYTES: Final = 32 << 10  # a plan up to this size is in its manifest: everybody is told it at once
MANIFESTS_BYTES: Final = 24 << 10  # of a bundle, beside such plans: it has room for 32 names of ordinary length
PLAN_PIECE_BYTES: Final = 256 << 10
MAX_HOLDERS: Final = 8  # of a plan, that one answer names
PLAN_DIGEST_BYTES: Final = 32  # SHA-256

PlanDigest = Annotated[bytes, msgspec.Meta(min_length=PLAN_DIGEST_BYTES, max_length=PLAN_DIGEST_BYTES)]


class PlanManifest(Message, frozen=True, kw_only=True):
    """What a coordinator publishes of a plan: which one it is, its size and SHA-256, and `plan` itself where it is
    small; else it is fetched with `plan.piece`."""

    epoch: Counter
    version: Counter
    service: ModelName
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_PLAN_BYTES)]
    digest: PlanDigest
    plan: Annotated[bytes, msgspec.Meta(max_length=INLINE_PLAN_BYTES)] = b""

    @property
    def number(self) -> tuple[int, int]:
        """`(epoch, version)`, as of the plan."""
        return (self.epoch, self.version)


class PlanBundle(Message, frozen=True, kw_only=True):
    """What a coordinator publishes beside one service's plan: those of its other services. `serial` counts the bundles
    of an epoch. Earlier releases know one plan, and not this."""

    epoch: Counter
    serial: Counter
    manifests: Annotated[tuple[PlanManifest, ...], msgspec.Meta(max_length=MAX_SERVICES)] = ()

    @property
    def number(self) -> tuple[int, int]:
        """`(epoch, serial)`: who says two things under one number lies to somebody."""
        return (self.epoch, self.serial)


class PlanPieceQuery(Message, frozen=True, kw_only=True):
    """Ask for the bytes of a plan from `offset` on, at most PLAN_PIECE_BYTES."""

    digest: PlanDigest
    offset: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PLAN_BYTES)]


class PlanPiece(Message, frozen=True, kw_only=True):
    """These bytes; none from who does not have the plan, or gives it to others now. `holders` have got it there."""

    data: Annotated[bytes, msgspec.Meta(max_length=PLAN_PIECE_BYTES)] = b""
    holders: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_HOLDERS)] = ()


class RegroupOrder(Message, frozen=True, kw_only=True):
    """An admin wants these groups of boxes in place of those that run, or these machines divided anew. What is expected
    of it, for people: requests per second in time `before` and `after`, and for how long the boxes of a step are
    away."""

    service: ModelName
    groups: Groups = ()
    recuts: Annotated[tuple[BoxRecut, ...], msgspec.Meta(max_length=MAX_REPLICAS)] = ()
    before: Figure = 0.0
    after: Figure = 0.0
    reload_s: Seconds = 0.0


class RegroupBegun(Message, frozen=True, kw_only=True):
    """The next plan is on its way to these groups: so many boxes change, in so many steps."""

    steps: Count
    boxes: Count
