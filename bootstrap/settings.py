"""What two networks would set differently: times, counts and limits of the peer-to-peer layer.

    Network(..., settings=NetworkSettings.lan())
    Libp2pTransport(identity, listen, announce, settings=TransportSettings(dial_s=2.0))

Each knob says its unit and what pulling it costs. Sizes of the wire format are constants elsewhere.
"""

from dataclasses import dataclass
from typing import Final, Self

from .streams.strangers import StrangerLimits

UNDECIDED: Final = StrangerLimits(total=512, each=256, for_members=64)
STRANGERS: Final = StrangerLimits(total=128, each=64, for_members=32, spared_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """Connections below the network, in seconds; longer forgives slow paths, hides dead ones."""

    dial_s: float = 5.0  # one dial, with all addresses of its host; a peer behind a firewall that drops costs all of it
    upgrade_s: int = 5  # Noise, yamux and the opening of the control stream, each
    stalled_s: float = 5.0  # a peer that takes no byte for so long is given up
    peek_s: float = 10.0  # until an accepted socket has said what it is
    segment_bytes: int = 1220  # of TCP at most, both ways, where this end dials; 0: as the devices at its ends allow
    """The default fits a packet of 1,280 bytes, which every path carries (RFC 8200, 5). Where a path carries less than
    the devices at its ends, and what routers say of that is filtered, larger ones are lost for ever. Larger: fewer
    packets, for streams that carry little."""

    # How many at once, of all and of one address. More: larger crowds get in at a time, and strangers may hold more.
    undecided: StrangerLimits = UNDECIDED
    """Accepted sockets that have not said what they are; each takes a file."""
    strangers: StrangerLimits = STRANGERS
    """Inbound connections that were not let in yet; each takes a file and some 60 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Membership, sessions, gossip and election of one node; the same preset in the whole network.
    Defaults are :meth:`wan`."""

    # Liveness. Shorter: a death is noticed sooner, and a pause is more often mistaken for one.
    ping_s: float = 1.5  # a peer that says nothing for so long is pinged
    rtt_s: float = 10.0  # everyone is pinged so often, for the round trip; shorter costs messages
    suspect_s: float = 3.0  # silence after which a member is suspect
    dead_s: float = 8.0  # silence after which it is dead, and hung up on
    watch_ping_s: float = 0.5  # a peer from which something is awaited is pinged after so much silence
    hung_s: float = 1.5  # ... and when it has not answered that for so long, it is looked for elsewhere
    redial_s: float = 3.0  # a connection that closed may be a broken link: so long to dial anew before it is a death
    beat_s: float = 10.0  # every member says something so often; who does not for three times that, and is not heard
    # here, is dead. Shorter finds liars sooner, who say that they hear others; costs messages
    beat_each_s: float = 0.2  # of it, at least, for each member: keeps the messages of a large network bounded
    hears_s: float = 0.3  # what a member hears is told at most so often
    hears_each_s: float = 0.004  # and at most so often for each member there is
    forget_s: float = 600.0  # how long a dead member's entries are kept; shorter lets an old claim be believed again
    orphan_s: float = 10.0  # how long those of a member that nobody hears

    # Joining.
    join_s: float = 5.0  # how long to keep asking members that do not answer, before joining fails
    join_retry_s: float = 0.3  # pause before the same member is asked again
    head_start_s: float = 1.0  # members named by the token are asked so much earlier than remembered ones

    # Dialling members that are missing. Shorter back-offs reconnect sooner and cost dials to the dead.
    first_backoff_s: float = 0.5  # after the first failure; doubles with each one
    last_backoff_s: float = 30.0  # at most, for members in general
    named_backoff_s: float = 2.0  # at most, for those in the token or here before: one that restarts is found this soon
    strange_dials_s: float = 4.0  # dials per second to members that one has only been told of
    strange_dials_burst: int = 32  # of them at once
    retry_gone_s: float = 2.0  # in a large network another of those gone is tried so often
    higher_waits_s: float = 1.5  # of two, the higher peer id lets the lower one dial for so long
    crossing_s: float = 5.0  # two connections of one pair within this time were dialled at the same moment

    # Sessions.
    greeting_s: float = 5.0  # until a stranger has greeted
    identity_check_s: float = 2.0  # until the holder of an identity that turns up twice has shown that it lives
    ban_s: float = 60.0  # how long a peer that misbehaved is kept out
    retire_s: float = 1.0  # how long the loser of two crossing connections stays open for what is on its way
    max_offences: int = 16  # malformed or forged messages before a peer is disconnected
    max_requests: int = 256  # served at once for one peer; more are answered "busy"
    busy_retry_s: float = 1.0  # ... with this time to try again; shorter frees a place unused for less time

    # Overlay and gossip. More sessions and more told at once: news is faster everywhere, and costs more.
    full_mesh: int = 16  # up to so many members everybody has a session with everybody; above, with about 4 log2(n)
    part_s: float = 300.0  # a session that is not used for so long is closed, where neither end is a neighbour
    rumour_s: float = 0.2  # how long what is not urgent is collected before it is passed on
    rumour_beat_s: float = 1.0  # the same of a sign of life, which comes every `beat_s`: longer costs fewer messages
    rumour_peers: int = 3  # to so many
    compare_s: float = 5.0  # two neighbours compare what they hold so often
    entries_s: float = 8.0  # entries per second that are taken of one member
    entries_burst: int = 64  # of them at once
    answers_s: float = 1.0  # comparisons per second that are answered to one peer
    answers_burst: int = 8  # of them at once

    # Election. Shorter: a dead or hung leader is replaced sooner; a slow one is more often taken for one.
    refresh_s: float = 0.5  # a leader says so often that it leads
    lease_s: float = 1.8  # who has not said so for so long does not lead
    settle_s: float = 0.3  # how long there must be no leader before anybody claims
    claim_step_s: float = 0.4  # one candidate after the other, in the epoch's order
    pass_over_s: float = 60.0  # a leader whose plans are refused is not followed for so long
    sync_s: float = 5.0  # how long a node that was let in waits to hear what there is, before it may lead
    found_s: float = 2.0  # how long a node that was here before looks for those it remembers before it leads alone

    # Addresses remembered between runs, last seen first.
    max_remembered: int = 32

    # On the box that holds the network's key.
    catalogue_s: float = 1.0  # how often to look for what `p2pserve token` has changed; shorter: orders go out sooner

    @classmethod
    def wan(cls) -> Self:
        """Boxes in different places: a second of jitter is no reason to reconnect."""
        return cls()

    @classmethod
    def lan(cls) -> Self:
        """Boxes in one rack: round trips below a millisecond, no pauses."""
        return cls(
            ping_s=0.5,
            rtt_s=2.0,
            suspect_s=1.5,
            dead_s=4.0,
            watch_ping_s=0.3,
            hung_s=0.9,
            head_start_s=0.3,
            first_backoff_s=0.2,
            last_backoff_s=5.0,
            named_backoff_s=1.0,
            higher_waits_s=0.5,
            identity_check_s=1.0,
            redial_s=1.5,
            refresh_s=0.3,
            lease_s=1.2,
            claim_step_s=0.2,
        )
