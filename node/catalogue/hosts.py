"""The boxes that host what they are given, as a coordinator sees them."""

from __future__ import annotations

from ...coordinator.repair.ending import is_planned_without
from ...coordinator.services.hosting import HostingBox, HostingOffer
from ..adverts import find_beside
from ..messages import Advert, EngineAdvert
from ..view import NetworkView


def find_hosts(view: NetworkView) -> list[HostingBox]:
    """The nodes that host what they are given, and stay. Those of one box have equal parts of it."""
    found = []
    for peer, advert in sorted(view.adverts.items()):
        if advert.hosting is not None and not advert.draining and not is_planned_without(advert.ends_in_s):
            beside = find_beside(peer, view.adverts)
            power = power_of(advert) / max(1, len(beside))
            found.append(
                HostingBox(
                    id=str(peer),
                    offer=advert.hosting,
                    power=power,
                    serves=_find_served(advert),
                    beside=beside,
                    shows=_describe_progress(advert.hosting, advert.engine),
                    failures=advert.engine.failures if advert.engine is not None else 0,
                )
            )
    return found


def power_of(advert: Advert) -> float:
    """GiB of its GPUs, or of the box."""
    hardware = advert.hardware
    return sum(gpu.memory_gib for gpu in hardware.gpus) or hardware.memory_gib


def _find_served(advert: Advert) -> str:
    """The entry for which a box's engine is ready, or waits for others that hold the model with it; "" for none."""
    is_ready = advert.engine is not None and advert.engine.state in ("ready", "waiting") and not advert.hung
    return advert.hosting.hosts if is_ready and advert.hosting is not None else ""


def _describe_progress(offer: HostingOffer, engine: EngineAdvert | None) -> str:
    """Another text while a box fetches and loads."""
    loading = (engine.state, engine.detail, str(engine.starts)) if engine is not None else ()
    return " ".join((offer.hosts, offer.prepares, offer.detail, *loading))
