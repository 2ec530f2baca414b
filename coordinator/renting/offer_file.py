"""A file of offers, of whichever market: its records one by one, so that a broken one costs no other."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ..costs.gpus import Specs
from .offers import MAX_RECORDS, LeftOut, Offer, OfferError, Offers
from .runpod import RunpodRecord, read_runpod
from .vast import VastRecord, read_vast

HOW: Final = "give what `vastai search offers --raw` printed, or RunPod's answer to a query of gpuTypes"


def parse_offers(text: bytes, specs: Specs = Specs.MEASURED, *, interruptible: bool = False) -> Offers:
    """All records of a file: a list of vast.ai's, an object with them in `offers`, one with RunPod's
    `gpuTypes`, or a single type of RunPod's. Raises OfferError where it holds no usable one."""
    records, is_runpod = _records(text)
    if not records:
        raise OfferError(f"offers: the file holds no records; {HOW}")
    if len(records) > MAX_RECORDS:
        raise OfferError(f"offers: {len(records)} records are too many; at most {MAX_RECORDS} are looked at")
    taken: dict[str, Offer] = {}
    left_out = []
    for number, record in enumerate(records, start=1):
        found = _read(record, number, specs, is_runpod=is_runpod, interruptible=interruptible)
        if isinstance(found, LeftOut):
            left_out.append(found)
            continue
        twice = next((offer.id for offer in found if offer.id in taken), None)
        if twice is not None:
            left_out.append(LeftOut(record=number, why=f"id: {twice} was there already"))
            continue
        taken.update((offer.id, offer) for offer in found)
    if not taken:
        first = f"; {left_out[0]}" if left_out else ""
        raise OfferError(f"offers: none of {len(records)} records can be used{first}")
    return Offers(taken=tuple(taken.values()), left_out=tuple(left_out))


def _records(text: bytes) -> tuple[list[Any], bool]:
    """The records, and whether they are RunPod's. Raises OfferError."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise OfferError(f"offers: the file is no JSON ({str(error) or 'too deeply nested'}); {HOW}") from None
    for field in ("data", "gpuTypes"):
        if isinstance(found, dict) and field in found:
            found = found[field]
            if field == "gpuTypes" and isinstance(found, list):
                return found, True
    if isinstance(found, dict):
        found = [found] if "displayName" in found else found.get("offers")
    if not isinstance(found, list):
        raise OfferError(f"offers: the file holds neither a list nor `offers` or `gpuTypes`; {HOW}")
    return found, any(isinstance(one, dict) and "gpu_name" not in one and "displayName" in one for one in found[:1])


def _read(
    record: object, number: int, specs: Specs, *, is_runpod: bool, interruptible: bool
) -> tuple[Offer, ...] | LeftOut:
    """What a record offers, or why it offers nothing: a line that names its field."""
    found: tuple[Offer, ...] | Offer | str
    try:
        if is_runpod:
            found = read_runpod(msgspec.convert(record, RunpodRecord), number, specs, interruptible=interruptible)
        else:
            found = read_vast(msgspec.convert(record, VastRecord), number, specs, interruptible=interruptible)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        return LeftOut(record=number, why=f"{where.rstrip('`')}: {what}" if where else what, broken=True)
    if isinstance(found, str):
        return LeftOut(record=number, why=found)
    return (found,) if isinstance(found, Offer) else found
