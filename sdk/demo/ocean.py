"""The network of `p2pserve demo --wan`: six boxes at three sites, with links as they were measured between real ones.

    virginia   87 ms   frankfurt        a box's port carries 1 Gb/s
        200 ms  \\      /  120 ms        virginia - mumbai carried 0.58 Gb/s, the others more
               mumbai                   the box behind NAT is at somebody's home there: 0.25 Gb/s

Plain values; what is chosen of a plan is chosen here, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from ...coordinator import Phase
from ...coordinator.plan import Deadlines
from ...sims.wan import Scenario, WanBox, WanPair, link_classes, measured_link

MODEL: Final = "qwen2-7b"
FAST_CARD, WIDE_CARD = "L40S", "RTX-3090TI-24GB"
"""The one has twice the arithmetic, for prompts; the other more memory bandwidth for its price, for answers."""

PLACES: Final = {"virginia": "azure:eastus", "frankfurt": "azure:germanywestcentral", "mumbai": "aws:ap-south-1"}
"""Where the sites are, as `sims/data/wan_links.csv` calls it."""

PORT_GBPS: Final = 1.0
"""Of a box in a data centre: what rented boxes commonly have, less than most of the measured links carry."""

IN_SITE: Final = "same-metro-dc"
HOME_LINE: Final = "home-500m"
CLIENT: Final = "client"
CLIENT_SITE: Final = "virginia"
DEGRADED_GBPS: Final = 0.03
"""What a link carries after it has degraded."""

SLO: Final = Deadlines(ttft_s=1.5, tpot_s=0.1)
"""What is in time. Plans have deadlines of their own, which move with what is measured: figures of several plans are
compared here."""


KvLink = tuple[str, str]
"""The box that prefills, and the one that decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OceanBox:
    """One of the boxes: where it is, the GPUs that it emulates, and the phase that its owner lets it do."""

    name: str
    site: str
    cards: str
    phase: Phase
    is_at_home: bool = False

    @property
    def port_gbps(self) -> float:
        """Of its line, both ways; its owner tells the node."""
        return link_classes()[HOME_LINE].multi_stream_gbps if self.is_at_home else PORT_GBPS

    @property
    def probed_as(self) -> str:
        """The site that its node tells: a home's line is none like those of the data centres of its city."""
        return self.name if self.is_at_home else self.site


def _box(site: str, number: int, phase: Phase) -> OceanBox:
    cards = FAST_CARD if phase is Phase.PREFILL else WIDE_CARD
    return OceanBox(name=f"{site}-{number}", site=site, cards=cards, phase=phase)


BOXES: Final = (
    _box("virginia", 1, Phase.PREFILL),
    _box("virginia", 2, Phase.DECODE),
    _box("frankfurt", 1, Phase.PREFILL),
    _box("frankfurt", 2, Phase.DECODE),
    _box("mumbai", 1, Phase.DECODE),
    OceanBox(name="mumbai-home", site="mumbai", cards=WIDE_CARD, phase=Phase.DECODE, is_at_home=True),
)
"""The first makes the network."""


def build_scenario() -> Scenario:
    """The emulated network of these boxes and their client."""
    client = OceanBox(name=CLIENT, site=CLIENT_SITE, cards="", phase=Phase.MIXED)
    everyone = (*BOXES, client)
    return Scenario(
        boxes={box.name: _access(box) for box in everyone},
        pairs={(one.name, two.name): _pair(one, two) for one, two in combinations(everyone, 2)},
    )


def kv_links() -> tuple[KvLink, ...]:
    """All that a plan can send KV over: from each box that prefills to each that decodes."""
    sources = [box.name for box in BOXES if box.phase is Phase.PREFILL]
    return tuple((source, box.name) for source in sources for box in BOXES if box.phase is Phase.DECODE)


def heaviest_link(shares: Mapping[KvLink, float], scenario: Scenario) -> KvLink | None:
    """The KV link that carries most of a plan's requests, of those that carry all that a port does: a thin one has
    less to lose."""
    between = [link for link in shares if link[0] != link[1]]
    wide = [link for link in between if scenario.carried_gbps(*link) >= PORT_GBPS]
    return max(wide or between, key=lambda link: (shares[link], link), default=None)


def busiest_decode(shares: Mapping[KvLink, float], spared: Collection[str]) -> str | None:
    """The box that decodes most of a plan's requests, of all but these."""
    decoded: dict[str, float] = defaultdict(float)
    for (_, box), share in shares.items():
        if box not in spared:
            decoded[box] += share
    return max(decoded, key=lambda box: (decoded[box], box), default=None)


def _access(box: OceanBox) -> WanBox:
    return WanBox(up_gbps=box.port_gbps, down_gbps=box.port_gbps, behind_nat=box.is_at_home)


def _pair(one: OceanBox, two: OceanBox) -> WanPair:
    classes = link_classes()
    link = classes[IN_SITE] if one.site == two.site else measured_link(PLACES[one.site], PLACES[two.site])
    # That class is of two homes: half of its round trip is one's own line.
    lines = sum(box.is_at_home for box in (one, two)) * classes[HOME_LINE].rtt_ms / 2
    return WanPair(rtt_ms=link.rtt_ms + lines, gbps=link.multi_stream_gbps)
