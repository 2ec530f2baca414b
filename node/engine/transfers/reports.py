"""What an engine tells its agent of KV transfers and of the links they take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from ....kvtransport.link.send_link import SendLink
from ....kvtransport.link.sending import SendProgress
from ....kvtransport.routing.report import TransferTimes
from ....kvtransport.wire.tickets import TransferTicket
from ..protocol import LinkReport, Outlet, PathReport, TransferReport


class ProgressSource(Protocol):
    """The sending end of a transfer, as the reports see it."""

    def progress(self) -> SendProgress:
        """How far it is."""
        ...


Sending = TypeVar("Sending", bound=ProgressSource)


class SentTotals(NamedTuple):
    """What was given to a link: bytes as they lay in the cache, bytes with all overhead, frames."""

    raw_bytes: int
    wire_bytes: int
    frames: int


def sent_report(
    ticket: TransferTicket, sent: SentTotals, times: TransferTimes, progress: SendProgress, *, mode: str, reason: str
) -> TransferReport:
    """How a transfer has ended; with a `reason` it was not delivered."""
    return TransferReport(
        transfer=ticket.transfer,
        delivered=not reason,
        reason=reason,
        frames=sent.frames,
        raw_bytes=sent.raw_bytes,
        wire_bytes=sent.wire_bytes + progress.bytes_resent,
        span_s=times.span,
        visible_s=times.visible,
        hidden_fraction=times.hidden_fraction,
        link=ticket.link,
        mode=mode,
        paths=progress.bytes_by_path,
        resent_bytes=progress.bytes_resent,
        blocked_s=progress.blocked_s,
    )


def unopened_report(outlet: Outlet, reason: str) -> TransferReport:
    """A transfer that could not even begin."""
    return TransferReport(
        transfer=outlet.ticket.transfer,
        delivered=False,
        reason=reason,
        frames=0,
        raw_bytes=0,
        wire_bytes=0,
        span_s=0.0,
        visible_s=0.0,
        hidden_fraction=1.0,
        link=outlet.ticket.link,
        mode=outlet.pacing,
        paths={},
        resent_bytes=0,
        blocked_s=0.0,
    )


def link_report(
    link: SendLink, senders: Iterable[Sending], blocked_s: Mapping[Sending, float], interval_s: float
) -> LinkReport:
    """How a link gets on. `blocked_s`: waits for credit at the report `interval_s` ago."""
    progress = {each: each.progress() for each in senders}
    # Until its first credit a transfer sends nothing, and no path is to blame; but without a connection that is up
    # nobody knows what the receiver has to say.
    blocked = [
        link.connections > 0
        and (
            each.blocked_s - blocked_s.get(sender, 0.0) > interval_s / 2
            or (each.bytes_queued > 0 and each.first_sent_at is None)
        )
        for sender, each in progress.items()
    ]
    return LinkReport(
        link=link.ticket.link,
        paths=tuple(
            PathReport(
                path.label,
                path.connections,
                path.bytes_acknowledged,
                path.bytes_in_flight,
                path.rate_bytes_s,
                path.rtt_s,
            )
            for path in link.statistics().paths.values()
        ),
        transfers=len(progress),
        waiting_bytes=sum(max(0, each.bytes_queued - each.bytes_acknowledged) for each in progress.values()),
        blocked=all(blocked),
    )
