"""Plans as bytes: their manifests, which the coordinator publishes, and what must hold of the two together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Final, final

import msgspec

from ...bootstrap import DECODE_ERRORS
from ...bootstrap.members.states import EntryRules
from ...coordinator import Plan, PlanError
from ..catalogue.messages import HOSTING, read_hosting_number
from ..messages import PLAN, Message
from .messages import INLINE_PLAN_BYTES, MANIFESTS_BYTES, MAX_PLAN_BYTES, PLAN_BUNDLE, PlanBundle, PlanManifest

_manifests = msgspec.msgpack.Decoder(PlanManifest)
_bundles = msgspec.msgpack.Decoder(PlanBundle)
_plans = msgspec.msgpack.Decoder(Plan)


def describe_plan(plan: Plan) -> tuple[PlanManifest, bytes]:
    """A plan's manifest and its bytes. Raises PlanError for one that is too large to be told."""
    payload = msgspec.msgpack.encode(plan)
    if len(payload) > MAX_PLAN_BYTES:
        raise PlanError(f"it has {len(payload)} bytes; a plan has at most {MAX_PLAN_BYTES}")
    manifest = PlanManifest(
        epoch=plan.epoch,
        version=plan.version,
        service=plan.service,
        size=len(payload),
        digest=sha256(payload).digest(),
        plan=payload if len(payload) <= INLINE_PLAN_BYTES else b"",
    )
    return manifest, payload


def read_manifest(entry: bytes) -> PlanManifest | None:
    """A manifest from a published entry; None for bytes that are none."""
    try:
        return _manifests.decode(entry)
    except (*DECODE_ERRORS, ValueError):
        return None


def read_number(entry: bytes) -> tuple[int, int] | None:
    """The number of a published plan. Who publishes two plans under one number lies to somebody."""
    manifest = read_manifest(entry)
    return None if manifest is None else manifest.number


def read_bundle(entry: bytes) -> PlanBundle | None:
    """The manifests of more services from a published entry; None for bytes that are none."""
    try:
        return _bundles.decode(entry)
    except (*DECODE_ERRORS, ValueError):
        return None


def read_bundle_number(entry: bytes) -> tuple[int, int] | None:
    """As `read_number`, of a bundle."""
    bundle = read_bundle(entry)
    return None if bundle is None else bundle.number


@final
class PlanBook:
    """The plans that a coordinator has published in its epoch, as it tells them: of one service under the kind that
    every release reads, of the others as a bundle."""

    def __init__(self) -> None:
        self._epoch = -1
        self._serial = 0
        self._manifests: dict[str, PlanManifest] = {}
        self._alone: PlanManifest | None = None  # the one that is told alone
        self._others: tuple[PlanManifest, ...] = ()

    def __repr__(self) -> str:
        return f"<PlanBook {self._epoch}.{self._serial} {len(self._manifests)} plans>"

    def add(self, manifest: PlanManifest, offered: Sequence[str]) -> dict[str, Message]:
        """What is to be published, by kind, now that there is this plan. `offered`: the services that are planned for,
        best first; plans of others are told no more."""
        if manifest.epoch != self._epoch:
            self._epoch, self._serial, self._manifests, self._others = manifest.epoch, 0, {}, ()
        known = {**self._manifests, manifest.service: manifest}
        kept = {service: known[service] for service in offered if service in known}
        self._manifests = kept or {manifest.service: manifest}
        # Its service stays while there is a plan for it: nodes of earlier releases follow that one alone.
        first = self._alone.service if self._alone is not None else ""
        alone = self._manifests.get(first) or next(iter(self._manifests.values()))
        others = tuple(each for each in self._manifests.values() if each is not alone)
        said: dict[str, Message] = {}
        if alone != self._alone:
            said[PLAN] = alone
        if others != self._others:
            self._serial += 1
            said[PLAN_BUNDLE] = PlanBundle(epoch=self._epoch, serial=self._serial, manifests=tuple(_fit(others)))
        self._alone, self._others = alone, others
        return said


def _fit(manifests: Iterable[PlanManifest]) -> Iterator[PlanManifest]:
    """As many of these, best first, as one entry has room for, whatever their services are called; with their plans
    while there is room for those, too. The other plans are fetched."""
    kept, names_left = list[PlanManifest](), MANIFESTS_BYTES
    for manifest in manifests:
        names_left -= len(msgspec.msgpack.encode(manifest)) - len(manifest.plan)
        if names_left >= 0:
            kept.append(manifest)
    left = INLINE_PLAN_BYTES
    for manifest in sorted(kept, key=lambda each: len(each.plan)):
        left -= len(manifest.plan)
        yield manifest if left >= 0 else msgspec.structs.replace(manifest, plan=b"")


def read_plan(manifest: PlanManifest, payload: bytes) -> Plan:
    """The plan of a manifest. Raises PlanError for bytes that are another's, or no plan's."""
    if not is_that_of(manifest, payload):
        raise PlanError("its bytes are not those of its manifest")
    try:
        plan = _plans.decode(payload)
    except (*DECODE_ERRORS, ValueError) as error:
        raise PlanError(f"it is malformed: {error}") from error
    if (plan.number, plan.service) != (manifest.number, manifest.service):
        raise PlanError(f"it is plan {plan.epoch}.{plan.version} for {plan.service}, and its manifest says otherwise")
    return plan


def is_that_of(manifest: PlanManifest, payload: bytes) -> bool:
    """Whether these are the bytes of the manifest's plan."""
    return len(payload) == manifest.size and sha256(payload).digest() == manifest.digest


PLAN_RULES: Final = EntryRules(
    urgent=frozenset({PLAN, PLAN_BUNDLE, HOSTING}),
    numbered={PLAN: read_number, PLAN_BUNDLE: read_bundle_number, HOSTING: read_hosting_number},
)
"""What members do with each other's manifests, and with who is to host what."""
