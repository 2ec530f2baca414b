"""What an admin of the network asks of any box, and of the one that holds the network's key."""

from __future__ import annotations

from ...coordinator.bounds import Count, ModelName, Seconds
from ...coordinator.services.catalogue import CatalogueEntry, ServiceCatalogue
from ..messages import ExactMessage, Message
from ..observing.values import UnixTime


class Drain(Message, frozen=True, kw_only=True):
    """Ask a box whether it takes new requests; with `draining`, tell it to take none, or (False) to take them again."""

    draining: bool | None = None


class Drained(Message, frozen=True, kw_only=True):
    """Whether a box takes no new requests, and how many it has yet to finish. `since`: the order for it was given, 0
    where there is none; `left_s`: after which it leaves the network, whatever is unfinished then."""

    draining: bool
    since: UnixTime = 0.0
    requests: Count = 0
    left_s: Seconds | None = None


class CatalogueChange(ExactMessage, frozen=True, kw_only=True):
    """An admin wants one more service, or one less. Only the box that holds the network's key can do that."""

    add: CatalogueEntry | None = None
    remove: ModelName | None = None


class CatalogueChanged(Message, frozen=True, kw_only=True):
    """The catalogue as it is from now on. Members hear of it within a second."""

    catalogue: ServiceCatalogue
