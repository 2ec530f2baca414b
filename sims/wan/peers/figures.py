"""Rows of the comparison with peers, their targets, and the page that is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from ...experiments.page import Page, PageTable, ResultRow
from .changes import MEMBERS, RTT_MS, ChangeTimes
from .pipelines import PipelineTurns
from .turns import OURS, TurnsTaken, ratios

NAME: Final = "peers"
COMMAND: Final = f"python -m p2pserve.sims.wan {NAME}"
NIXL, MOONCAKE = "NIXL", "Mooncake"


@dataclass(frozen=True, slots=True)
class PeerTarget:
    """A ratio of ours to the peer's as a first measurement by hand had it, and the least that it is to be."""

    before: float | None = None
    least: float | None = None


REACHED, MISSED, DID_NOT_RUN = "reached", "MISSED", "did not run"
NO_TARGET: Final = PeerTarget()
LOSSY: Final = "80 ms, 0.1 % loss"
LOSSLESS: Final = "40 ms, no loss"
LOOPBACK: Final = "loopback, one connection"
PLAIN_STREAMS, PLAIN_STREAM, OURS_OVER_MANY = "16 plain TCP streams", "one plain TCP stream", "ours over 16 streams"
TARGETS: Final = {
    (LOSSY, NIXL): PeerTarget(22.0, 22.0),
    (LOSSY, MOONCAKE): PeerTarget(4.8, 4.8),
    (LOSSY, PLAIN_STREAMS): PeerTarget(1.2, 1.3),
    (LOSSLESS, NIXL): PeerTarget(1.6, 1.6),
    (LOSSLESS, MOONCAKE): PeerTarget(1.3, 1.3),
    (LOOPBACK, PLAIN_STREAM): PeerTarget(0.52, 0.7),
    (LOOPBACK, NIXL): PeerTarget(0.78, 1.1),
}
MOST_CPU_S: Final = 0.5
CPU_BEFORE: Final = {OURS: 0.7, PLAIN_STREAM: 0.4}
PIPELINE_TARGETS: Final = {20.0: PeerTarget(2.3, 2.3), 50.0: PeerTarget(2.9, 2.9)}
"""By round trip in ms, for two stages; three and four are to be as good."""


class PeerRow(ResultRow, frozen=True):
    """Ours beside one peer over one link; rates of payload, medians. `ours_over_peer`: the median over rounds."""

    link: str
    peer: str
    version: str
    mib: int
    peer_gbps: float | None
    ours_gbps: float | None
    ours_over_peer: float | None
    rounds: str
    by_hand_before: float | None
    target: str
    verdict: str


class CpuRow(ResultRow, frozen=True):
    """CPU seconds of both ends together for each GB."""

    contender: str
    cpu_s_per_gb: float | None
    by_hand_before: float | None
    target: str
    verdict: str


class PipelineRow(ResultRow, frozen=True):
    """Milliseconds between two tokens of a request alone, medians. `same_tokens`: of how many pairs."""

    stages: int
    rtt_ms: float
    vllm_ms: float | None
    ours_ms: float | None
    vllm_over_ours: float | None
    pairs: str
    same_tokens: str
    by_hand_before: float | None
    target: str
    verdict: str


class ChangeRow(ResultRow, frozen=True):
    """Milliseconds until the last member has seen what one was told, medians."""

    members: int
    rtt_ms: float
    etcd_ms: float | None
    ours_ms: float | None
    etcd_over_ours: float | None
    spread_etcd: str
    spread_ours: str
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """All that was measured; `circumstances`: sentences about the machine and the emulation."""

    links: Sequence[PeerRow] = ()
    cpu: Sequence[CpuRow] = ()
    pipelines: Sequence[PipelineRow] = ()
    changes: Sequence[ChangeRow] = ()
    circumstances: Sequence[str] = ()


def judge(ratio: float | None, target: PeerTarget, failure: str) -> str:
    """What a row says at its end."""
    if failure:
        return f"{DID_NOT_RUN}: {failure}"
    if ratio is None:
        return "not measured"
    if target.least is None:
        return ""
    return REACHED if ratio >= target.least else MISSED


def _at_least(target: PeerTarget) -> str:
    return "" if target.least is None else f">= {target.least:g}"


def _each(values: Sequence[float]) -> str:
    """All of them, in turn."""
    return " ".join(f"{value:.3g}" for value in values)


def peer_rows(link: str, taken: Sequence[TurnsTaken]) -> list[PeerRow]:
    """A row for each peer. Raises KeyError if ours are not among them."""
    ours = {turns.name: turns for turns in taken}[OURS]
    rows = []
    for peer in taken:
        if peer is ours:
            continue
        found = ratios(ours, peer)
        ratio = median(found) if found else None
        target = TARGETS.get((link, peer.name), NO_TARGET)
        failure = peer.failure if not found else ""
        if not found and not failure and ours.failure:
            failure = f"ours did not: {ours.failure}"
        row = PeerRow(
            link=link,
            peer=peer.name,
            version=peer.version,
            mib=peer.mib,
            peer_gbps=peer.gbps,
            ours_gbps=ours.gbps,
            ours_over_peer=ratio,
            rounds=_each(found),
            by_hand_before=target.before,
            target=_at_least(target),
            verdict=judge(ratio, target, failure),
        )
        rows.append(row)
    return rows


def cpu_rows(taken: Sequence[TurnsTaken]) -> list[CpuRow]:
    """A row for each contender; ours has a target."""
    rows = []
    for turns in taken:
        used = turns.cpu_s_per_gb
        verdict = judge(used, NO_TARGET, "" if turns.samples else turns.failure)
        if turns.name == OURS and used is not None:
            verdict = REACHED if used <= MOST_CPU_S else MISSED
        rows.append(
            CpuRow(
                contender=turns.name,
                cpu_s_per_gb=used,
                by_hand_before=CPU_BEFORE.get(turns.name),
                target=f"<= {MOST_CPU_S:g}" if turns.name == OURS else "",
                verdict=verdict,
            )
        )
    return rows


def pipeline_row(turns: PipelineTurns) -> PipelineRow:
    """One round trip of one pipeline."""
    found = [pair.vllm_ms / pair.ours_ms for pair in turns.pairs]
    ratio = median(found) if found else None
    target = PIPELINE_TARGETS.get(turns.rtt_ms, NO_TARGET)
    return PipelineRow(
        stages=turns.stages,
        rtt_ms=turns.rtt_ms,
        vllm_ms=turns.vllm_ms,
        ours_ms=turns.ours_ms,
        vllm_over_ours=ratio,
        pairs=_each(found),
        same_tokens=f"{sum(pair.same for pair in turns.pairs)} of {len(turns.pairs)}",
        by_hand_before=target.before if turns.stages == 2 else None,
        target=_at_least(target),
        verdict=judge(ratio, target, turns.failure),
    )


def change_row(times: ChangeTimes) -> ChangeRow:
    """Ours beside etcd: changes that began at the same members in the same order."""
    found = [etcd / ours for ours, etcd in zip(times.ours_ms, times.etcd_ms, strict=False)]
    reason = times.etcd_failure or (times.ours_failure and f"ours did not: {times.ours_failure}")
    ratio = median(found) if found else None
    return ChangeRow(
        members=MEMBERS,
        rtt_ms=RTT_MS,
        etcd_ms=_middle(times.etcd_ms),
        ours_ms=_middle(times.ours_ms),
        etcd_over_ours=ratio,
        spread_etcd=_spread(times.etcd_ms),
        spread_ours=_spread(times.ours_ms),
        verdict=judge(ratio, NO_TARGET, "" if found else reason),
    )


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _spread(values: Sequence[float]) -> str:
    """The least and the most."""
    return f"{min(values):.3g}-{max(values):.3g}" if values else ""


def missed_lines(figures: PeerFigures) -> list[str]:
    """What was missed, by how much, and what did not run: an item each."""
    lines = [
        f"Missed: {row.link}, {row.peer}: {row.ours_over_peer:.2f} times its rate, target {row.target}."
        for row in figures.links
        if row.verdict == MISSED
    ]
    lines += [
        f"Missed: CPU seconds per GB of {row.contender}: {row.cpu_s_per_gb:.2f}, target {row.target}."
        for row in figures.cpu
        if row.verdict == MISSED
    ]
    lines += [
        f"Missed: {row.stages} stages, {row.rtt_ms:g} ms: {row.vllm_over_ours:.2f} times as fast, target {row.target}."
        for row in figures.pipelines
        if row.verdict == MISSED
    ]
    absent = dict.fromkeys((row.peer, row.verdict) for row in figures.links if row.verdict.startswith(DID_NOT_RUN))
    lines += [f"{peer} {verdict}." for peer, verdict in absent]
    lines += [f"etcd {row.verdict}." for row in figures.changes if row.verdict.startswith(DID_NOT_RUN)]
    return lines


ASSUMES: Final = """\
Each peer and ours move the same bytes over the same link in turn: in each round every contender is started, moves 32
MiB to warm its connections, is timed once, and ended. What is timed ends when the receiver has all in place and the
sender knows. A contender that is slow is timed with less, as `mib` says.

Links are emulated (network namespaces, 1 Gb/s at each box): real sockets, TCP of this kernel. Ours is encrypted and
has the streams that path choice gives it from a burst; plain TCP and the libraries are not encrypted. NIXL and
Mooncake have their default settings and TCP.

Pipelines: the bundled model on CPUs, one process a stage and box; a token's time is that between two tokens of one
greedy answer to the same prompt, and vLLM stands still while ours computes."""

REMARKS: Final = """\
- "By hand before" are first figures, measured by hand on another day; "target" is what was set from them. Only
  ratios of one run compare: rates depend on what else the machine does, most of all over loopback, where all that
  moves bytes shares two cores with their receiver.
- Over loopback ours encrypts and writes into place, which plain TCP and the libraries do not: the CPU seconds above
  plain TCP's are AES-GCM at both ends. NIXL copies through UCX.
- NIXL and Mooncake have one connection, which carries 0.17 Gb/s with this loss, where TCP here is bbr. That the ratio
  to NIXL was 22 before could not be had again, neither by writing nor by reading.
- With loss, ours has 5 streams and 0.78 of the link's 1 Gb/s; 16 plain ones have 0.82. Nobody can have 1.3 times that:
  what the link carries with this loss is about 0.85.
- vLLM's pipeline of two stages takes four round trips and more for a token, ours one and more.
- vLLM does not make the buffers of a later stage on a CPU unless it compiles, so it was asked for its profile run.
- rsync is timed with its start and its end, since a transfer is what it lives for.
- etcd's members agree on a change before any of them tells it, which is more than our gossip does: a member signs
  what it says and pushes it to those that it has a session with. etcd has its default settings and keeps its data in
  memory; changes begin at each member in turn.
"""


def make_page(figures: PeerFigures) -> Page:
    """The page of all that was measured."""
    tables = [
        PageTable("Bytes over a link", figures.links, "Payload in Gb/s; ours over the peer, by round."),
        PageTable("CPU", figures.cpu, "Over loopback, one connection: CPU seconds of both ends for each GB."),
        PageTable("Pipelines", figures.pipelines, "Milliseconds between two tokens; vLLM's over ours, by pair."),
        PageTable("Changes", figures.changes, "Milliseconds until all members know what one was told."),
    ]
    missed = missed_lines(figures) or ["No target was missed."]
    return Page(
        name=NAME,
        title="Beside NIXL, Mooncake, rsync, plain TCP, vLLM's pipeline and etcd",
        command=COMMAND,
        assumes="\n\n".join(
            " ".join(paragraph.split()) for paragraph in (*ASSUMES.split("\n\n"), *figures.circumstances)
        ),
        tables=tuple(table for table in tables if table.rows),
        remarks="\n".join(f"- {line}" for line in missed) + "\n" + REMARKS,
    )
