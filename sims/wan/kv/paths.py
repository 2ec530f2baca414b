"""Path choice put to the test: five situations between three sites, with real KV bytes over
emulated links.

Every choice is made by `kvtransport.paths.choose` from what was measured over the links just
before, and every time is from the start of a transfer to the receiver's acknowledgement, checksums
of all of it included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from ....kvtransport.routing.costs import transfer_usd
from ....kvtransport.routing.paths import KVPath, PathChoice, PathQuery, choose
from ....kvtransport.routing.steering import PathChange, PathController
from ..emulated import EmulatedWan, Kind
from ..scenario import Scenario, WanBox, WanPair
from .kvbox import FRAME_BYTES
from .kvnetwork import KVNetwork, Moved

SOURCE, TARGET, RELAY = "paris", "nyc", "london"
LINKS = ((SOURCE, TARGET), (SOURCE, RELAY), (RELAY, TARGET))
USD_PER_GB = 0.01

TIMES_FASTER = 3.0
FAIR = 0.9
LEAST_SHARE = 0.5
TRANSFERS = 32
WARM_UP = 40
THIN_GBPS = 0.03
DEGRADED_GBPS = 0.03


class PathCase(msgspec.Struct, frozen=True, kw_only=True):
    """One situation, emulated by `kind`: what was chosen and why, what it took beside what it is
    compared with, and the verdict.

    `by_path`: bytes confirmed over each path. `usd`: what they cost, at one cent per GB for whoever
    sends it and one for whoever receives it. `figures`: further numbers of this case.
    """

    name: str
    kind: str
    what: str
    target: str
    chosen: str
    seconds: float
    gbps: float
    compared_with: str
    compared_s: float
    usd: float
    by_path: dict[str, int]
    figures: dict[str, float]
    why: tuple[str, ...]
    ok: bool

    @property
    def times_faster(self) -> float:
        """How often what was chosen fits into what it is compared with."""
        return self.compared_s / self.seconds


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    square = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * square) if square else 0.0


def good_links() -> Scenario:
    """A transatlantic link, and a relay over links that are as good."""
    return Scenario.from_classes(
        {(SOURCE, TARGET): "transatlantic", (SOURCE, RELAY): "same-continent", (RELAY, TARGET): "transatlantic"}
    )


def thin_direct() -> Scenario:
    """A thin direct link, and a relay at 2 Gb/s. So thin (a provider's global network has 0.1) that
    it is the links and not busy cores that decide."""
    box = WanBox(up_gbps=2, down_gbps=2)
    return Scenario(
        boxes={SOURCE: box, TARGET: box, RELAY: box},
        pairs={
            (SOURCE, TARGET): WanPair(rtt_ms=90, gbps=THIN_GBPS),
            (SOURCE, RELAY): WanPair(rtt_ms=10),
            (RELAY, TARGET): WanPair(rtt_ms=80),
        },
    )


def _choose(network: KVNetwork, frames: int, relays: frozenset[str] | None = None) -> PathChoice:
    return choose(PathQuery(source=SOURCE, target=TARGET, bytes=frames * FRAME_BYTES, relays=relays), network.known())


def _move(network: KVNetwork, paths: Sequence[KVPath], frames: int, *, warm: bool = False) -> Moved:
    with network.connect(SOURCE, TARGET, paths) as transfers:
        if warm:
            transfers.move([WARM_UP])
            transfers.forget()
        return transfers.move([frames])


def many_streams(network: KVNetwork) -> PathCase:
    """(a) n streams against one over the same long link, both warm."""
    frames = 100
    choice = _choose(network, frames, frozenset())
    one = _move(network, [KVPath(SOURCE, TARGET, None, 1, 0.0)], frames, warm=True)
    many = _move(network, choice.paths, frames, warm=True)
    return _case(
        network,
        ("a", f"transatlantic: {choice.paths[0].streams} streams against one", f"{TIMES_FASTER:g}x faster"),
        choice,
        many,
        ("one stream", one.seconds),
        ok=one.seconds >= TIMES_FASTER * many.seconds,
    )


def relay_wins(network: KVNetwork) -> PathCase:
    """(b) a thin direct link and a fat relay."""
    frames = 16
    choice = _choose(network, frames)
    direct = _move(network, _choose(network, frames, frozenset()).paths, frames)
    chosen = _move(network, choice.paths, frames)
    return _case(
        network,
        ("b", f"direct {THIN_GBPS:g} Gb/s, relay 2 Gb/s", f"relay, {TIMES_FASTER:g}x faster"),
        choice,
        chosen,
        ("direct", direct.seconds),
        ok=RELAY in choice.vias and direct.seconds >= TIMES_FASTER * chosen.seconds,
    )


def no_relay(network: KVNetwork) -> PathCase:
    """(c) a relay that is no better than the direct link."""
    frames = 40
    choice = _choose(network, frames)
    before = network.relayed(RELAY)
    chosen = _move(network, choice.paths, frames)
    relayed = network.relayed(RELAY) - before
    through = next(one for one in choice.why if one.vias == {RELAY})
    relay = _move(network, through.paths, frames)
    return _case(
        network,
        ("c", "direct as good as the relay", "no relay"),
        choice,
        chosen,
        ("relay", relay.seconds),
        ok=choice.vias == {None} and relayed == 0,
        figures={"relayed_bytes": float(relayed)},
    )


def degrades(network: KVNetwork) -> PathCase:
    """(d) the direct link, which is all that is used at first, degrades in mid-transfer."""
    frames = 240
    job = PathQuery(source=SOURCE, target=TARGET, bytes=frames * FRAME_BYTES)
    choice = _choose(network, frames, frozenset())
    controller = PathController(job, choice, now=network.clock())
    changes: list[PathChange] = []
    left_at_fall = 0

    def follow(moved: Moved) -> None:
        nonlocal left_at_fall
        now, by_path = network.clock(), moved.by_path
        acknowledged = sum(by_path.values())
        if not left_at_fall and acknowledged > job.bytes / 4:
            network.wan.set_pair(SOURCE, TARGET, gbps=DEGRADED_GBPS)
            left_at_fall = job.bytes - acknowledged
        for path in controller.choice.paths:
            controller.on_progress(path.via, by_path.get(path.label, 0), job.bytes - acknowledged, now=now)
        change = controller.step(network.known(), now=now)
        if change is not None:
            changes.append(change)
            transfers.set_paths(change.choice.paths)

    before = network.wan.scenario.pair(SOURCE, TARGET)
    try:
        with network.connect(SOURCE, TARGET, choice.paths) as transfers:
            transfers.start([frames])
            moved = transfers.wait(follow)
    finally:
        network.wan.set_pair(SOURCE, TARGET, gbps=before.gbps)
    other = moved.by_path.get(f"via {RELAY}", 0)
    # Nobody waits for a transfer that stays on the thin link: what was left then is added at that rate.
    stayed = moved.seconds + 8e-9 * left_at_fall / DEGRADED_GBPS
    case = _case(
        network,
        ("d", f"direct falls to {DEGRADED_GBPS:g} Gb/s after a quarter", "finishes over the relay"),
        choice,
        moved,
        ("staying, computed", stayed),
        ok=bool(changes) and RELAY in changes[0].choice.vias and other > left_at_fall / 2 > 0,
        figures={"changes": float(len(changes)), "resent_bytes": float(sum(one.resent for one in moved.transfers))},
    )
    told = tuple(line for change in changes for line in ("then: " + change.explain()).splitlines())
    labels = ", then ".join([case.chosen, *(change.choice.taken.label for change in changes)])
    return msgspec.structs.replace(case, chosen=labels, why=case.why + told)


def fair_shares(network: KVNetwork) -> PathCase:
    """(e) 32 transfers at once."""
    frames = 8
    choice = _choose(network, TRANSFERS * frames, frozenset())
    middle: list[Moved] = []

    def look(moved: Moved) -> None:
        if (
            not middle
            and sum(moved.by_path.values()) >= moved.bytes / 2
            and moved.bytes == TRANSFERS * frames * FRAME_BYTES
        ):
            middle.append(moved)

    with network.connect(SOURCE, TARGET, choice.paths) as transfers:
        transfers.start([frames] * TRANSFERS)
        moved = transfers.wait(look)
    shares = [float(one.acknowledged) for one in (middle or [moved])[0].transfers]
    times = sorted(one.seconds for one in moved.transfers)
    fairness, least = jain(shares), min(shares) * len(shares) / sum(shares)
    return _case(
        network,
        ("e", f"{TRANSFERS} transfers at once", f"Jain {FAIR:g}, least share {LEAST_SHARE:g}"),
        choice,
        moved,
        ("median of the 32", times[len(times) // 2]),
        ok=bool(middle) and fairness >= FAIR and least >= LEAST_SHARE,
        figures={"jain_at_half": fairness, "least_share_at_half": least, "first_s": times[0], "last_s": times[-1]},
    )


def _case(
    network: KVNetwork,
    about: tuple[str, str, str],
    choice: PathChoice,
    moved: Moved,
    compared: tuple[str, float],
    *,
    ok: bool,
    figures: dict[str, float] | None = None,
) -> PathCase:
    name, what, target = about
    known = network.known()
    by_via = {None if label == "direct" else label.removeprefix("via "): size for label, size in moved.by_path.items()}
    return PathCase(
        name=name,
        kind=network.wan.kind,
        what=what,
        target=target,
        chosen=choice.taken.label,
        seconds=moved.seconds,
        gbps=moved.gbps,
        compared_with=compared[0],
        compared_s=compared[1],
        usd=transfer_usd(known.boxes, known.links, (SOURCE, TARGET), by_via),
        by_path=moved.by_path,
        figures=figures or {},
        why=tuple(choice.explain().splitlines()),
        ok=ok,
    )


# In this order, so that one network serves for its cases and is measured once.
CASES: dict[str, tuple[Callable[[], Scenario], Callable[[KVNetwork], PathCase]]] = {
    "a": (good_links, many_streams),
    "c": (good_links, no_relay),
    "e": (good_links, fair_shares),
    "d": (good_links, degrades),
    "b": (thin_direct, relay_wins),
}


def run_cases(names: Sequence[str] = tuple(CASES), *, kind: Kind | None = None) -> Iterator[PathCase]:
    """Run the named cases; each is given out when it is done. Raises `WanError`."""
    makers = {CASES[name][0] for name in names}
    for maker in sorted(makers, key=lambda made: made.__name__):
        with KVNetwork(EmulatedWan(maker(), kind=kind), usd_per_gb=USD_PER_GB) as network:
            for a, b in LINKS:
                network.measure(a, b)
            for name, (needs, run) in CASES.items():
                if needs is maker and name in names:
                    yield run(network)


def table(cases: Sequence[PathCase]) -> str:
    """For people: a line for each case, then why."""
    kinds = " and ".join(sorted({case.kind for case in cases}))
    lines = [f"real bytes of made-up KV over an emulated network ({kinds})"]
    lines.append(f"    {'case':<42} {'chosen':<24} seconds   Gb/s  {'compared with':<26} faster  target")
    for case in sorted(cases, key=lambda one: one.name):
        compared = f"{case.compared_with} {case.compared_s:.2f} s"
        figures = f"{case.seconds:7.2f} {case.gbps:6.2f}  {compared:<26} {case.times_faster:5.1f}x"
        verdict = case.target if case.ok else f"MISSED: {case.target}"
        lines.append(f"({case.name}) {case.what:<42} {case.chosen:<24} {figures}  {verdict}")
    for case in sorted(cases, key=lambda one: one.name):
        moved = ", ".join(f"{size / 1e6:.0f} MB {label}" for label, size in case.by_path.items())
        more = "".join(f"; {name} {value:g}" for name, value in case.figures.items())
        lines += ["", f"({case.name}) {moved}, ${case.usd:.4f}{more}", *("    " + line for line in case.why)]
    return "\n".join(lines)
