"""An emulated wide-area network on one machine: real sockets between boxes with caps, round trips,
loss and outages.

`Scenario` says what the network is; `EmulatedWan` makes it, with network namespaces and TUN devices
where the user is root, else with a proxy on loopback, and says which and what it cannot show.
`python -m p2pserve.sims.wan` runs one by hand and calibrates it; docs/wan.md explains.
"""

from .control import WanStatistics
from .emulated import EmulatedWan, Kind, unavailable
from .errors import WanError, WanUnavailable
from .scenario import LinkClass, Outage, Scenario, ScenarioError, WanBox, WanPair, link_classes, measured_link
from .switch import BoxStatistics, LineStatistics

__all__ = [
    "BoxStatistics",
    "EmulatedWan",
    "Kind",
    "LineStatistics",
    "LinkClass",
    "Outage",
    "Scenario",
    "ScenarioError",
    "WanBox",
    "WanError",
    "WanPair",
    "WanStatistics",
    "WanUnavailable",
    "link_classes",
    "measured_link",
    "unavailable",
]
