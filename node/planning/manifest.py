"""A plan as bytes: its manifest, which the coordinator publishes, and what must hold of the two together. Pure."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import msgspec

from ...bootstrap import DECODE_ERRORS
from ...bootstrap.members.states import EntryRules
from ...coordinator import Plan, PlanError
from ..messages import PLAN
from .messages import INLINE_PLAN_BYTES, MAX_PLAN_BYTES, PlanManifest

_manifests = msgspec.msgpack.Decoder(PlanManifest)
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


PLAN_RULES: Final = EntryRules(urgent=frozenset({PLAN}), numbered={PLAN: read_number})
"""What members do with each other's manifests."""
