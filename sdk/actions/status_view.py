"""`p2pserve status` for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...bootstrap import PeerId, Role
from ...coordinator import Phase, Plan
from ...coordinator.names import count_of, name_of, with_names
from ...coordinator.regrouping.refusals import describe_refusal
from ...coordinator.regrouping.steps import describe_boxes
from ...coordinator.repair.ending import is_planned_without
from ...coordinator.services.hosting import HostingOffer
from ...node.adverts import find_beside, find_fault, join_faults, parts_of, plans_of
from ...node.messages import Advert, NodeStatus, Status
from ...node.observing.ages import describe_age
from ...node.replica.place import Place
from ..printing import printable

COLUMNS = (
    "node", "role", "phase", "state", "address", "rtt", "hardware", "engine", "model", "load", "req/s", "tok/s", "$/h",
)  # fmt: skip
NARROW = ("node", "phase", "state", "hardware", "reqs", "tok/s", "$/h")
"""What fits 80 columns; `reqs`: running and waiting."""

NUMBERS = frozenset({"reqs", "req/s", "tok/s", "$/h"})
GONE = frozenset({"dead", "left"})

SPEED_AT = (8, 256)
"""Requests and their length at which engines are compared."""

FAULT_CHARACTERS = 80  # of why a box does not host something; `models show` has all of it
REAL_GPUS = ("GPU-", "MIG-")  # so NVML's UUIDs begin
MOST_SHARED_GPUS = 3  # lines: what others say of their GPUs is their word
CLIENT = Role.CLIENT.value
WIDE = 200  # columns for a table that goes to a file: nothing is cut off


class PlainConsole(Console):
    """A console that lets a closed pipe be an error (by default it ends the process on the spot), and through which no
    other box steers the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """What any text goes through: some are other boxes'."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Called in the handler of that error."""
        raise  # noqa: PLE0704 (rich calls this while it handles the error)


def open_console(*, stderr: bool = False, wide: bool = False) -> Console:
    """A console that prints text as it is; what goes to a file is not cut off, nor what is `wide` in a terminal, which
    breaks its lines."""
    console = PlainConsole(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal or (wide and console.width < WIDE):
        console = PlainConsole(stderr=stderr, highlight=False, markup=False, soft_wrap=True, width=WIDE)
    return console


def keep_whole(table: Table, *headers: str) -> Table:
    """The table, once it is filled, with these columns never cut or wrapped: what is in them is typed back. Others give
    way."""
    for column in table.columns:
        if column.header in headers:
            column.no_wrap = True
            column.min_width = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
    return table


def print_prose(lines: Iterable[str], console: Console) -> None:
    """Lines of sentences: in a terminal broken between words, with what follows a break further in."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        if console.is_terminal and len(line) > console.width:
            pieces = wrap(line, console.width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
            line = "\n".join(pieces)
        console.print(line)


def print_status(status: Status, console: Console | None = None, *, wide: bool = False) -> None:
    """Print the table of nodes, the coordinator and the plan."""
    console = console or open_console()
    console.print(status_table(status, COLUMNS if wide else NARROW))
    boxes = (*gone_lines(status), *ending_lines(status), *closed_lines(status), *engine_lines(status))
    boxes += (*shared_gpu_lines(status), *hosting_lines(status), *unplaced_lines(status))
    speeds = speed_lines(status) if wide else []
    print_prose((*boxes, *speeds, *plan_lines(status), *worth_lines(status), *key_lines(status)), console)


def status_table(status: Status, columns: Sequence[str] = COLUMNS) -> Table:
    """One line for each node that is here, with these of COLUMNS or NARROW; clients come and go, and are only
    counted."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    for node in status.nodes:
        if node.role != CLIENT and node.state not in GONE:
            cells = dict(zip(COLUMNS, node_row(node, status), strict=True)) | _short(node.advert, columns)
            table.add_row(*(cells[column] for column in columns))
    return keep_whole(table, "node", "address", "model")


def gone_lines(status: Status) -> list[str]:
    """One line for each node that has died or left lately."""
    gone = [node for node in status.nodes if node.role != CLIENT and node.state in GONE]
    ages = [f", {describe_age(node.gone_s)} ago" if node.gone_s is not None else "" for node in gone]
    return [f"{node.state}: {name_of(node.peer)}{age}, at {node.address}" for node, age in zip(gone, ages, strict=True)]


def ending_lines(status: Status) -> list[str]:
    """One line for each box that has said when it ends, the first of them first."""
    told = [(node.advert.ends_in_s, node.peer) for node in status.nodes if node.advert is not None]
    ends = sorted((ends_in_s, peer) for ends_in_s, peer in told if ends_in_s is not None)
    return [
        f"ends: {name_of(peer)} in {describe_age(ends_in_s)}"
        + ", no plan uses it any more" * is_planned_without(ends_in_s)
        for ends_in_s, peer in ends
    ]


def hosting_lines(status: Status) -> list[str]:
    """One line for each box that has several nodes in one engine process, and each that makes ready what it is to host,
    or waits for that."""
    lines = []
    offers, adverts = _offers_of(status), _adverts_of(status)
    for node in status.nodes:
        offer = offers.get(node.peer)
        here = _find_here(node.peer, adverts)
        if len(here) > 1 and here[0] == node.peer:
            hosts = filter(None, (_describe_hosted(adverts[PeerId(peer)]) for peer in here))
            names = " and ".join(name_of(peer) for peer in here)
            lines.append(f"shared: {names} are one box: {' and '.join(hosts) or 'nothing yet'}")
        if offer is not None and offer.detail:
            what = f"makes {offer.prepares} ready: " if offer.prepares else ""
            lines.append(f"hosting: {name_of(node.peer)} {what}{offer.detail}")
    return lines


def unplaced_lines(status: Status) -> list[str]:
    """One line for each entry of the catalogue that no box has, with what boxes say of it."""
    adverts = [node.advert for node in status.nodes if node.advert is not None and node.state not in GONE]
    models = [advert.model for advert in adverts if advert.model is not None]
    lines = []
    for entry in status.catalogue.entries if status.catalogue is not None else ():
        if not any(entry.model_name in (model.name, model.service) for model in models):
            faults = hosting_faults(status, entry.name)
            why = join_faults(f"{name_of(peer)}: {fault[:FAULT_CHARACTERS]}" for peer, fault in faults.items())
            lines.append(f"not hosted: {entry.name}{f' ({why})' if why else ''}")
    return lines


def hosting_faults(status: Status, name: str) -> dict[str, str]:
    """By box, why those that host what they are given cannot host an entry alone, for people."""
    offers = _offers_of(status)
    found = {}
    for peer, offer in offers.items():
        model = offer.models.get(name)
        if model is not None and model.fault:
            found[peer] = model.fault
        elif model is not None and model.fits < model.layers:
            found[peer] = f"has room for {model.fits} of {count_of(model.layers, 'layer')}"
        elif model is not None and not offer.hosts and (lacking := _lacking_beside(offers, offer, name)):
            found[peer] = lacking
    return found


def _offers_of(status: Status) -> dict[str, HostingOffer]:
    """By node, what those say that host what they are given; `beside` has those of its box that are here."""
    adverts = _adverts_of(status)
    told = {str(peer): advert.hosting for peer, advert in adverts.items() if advert.hosting is not None}
    return {peer: replace(offer, beside=_find_here(peer, adverts)) for peer, offer in told.items()}


def _adverts_of(status: Status) -> dict[PeerId, Advert]:
    """Of nodes that are here."""
    nodes = (node for node in status.nodes if node.advert is not None and node.state not in GONE)
    return {PeerId(node.peer): node.advert for node in nodes if node.advert is not None}


def _find_here(peer: str, adverts: Mapping[PeerId, Advert]) -> tuple[str, ...]:
    """The nodes of a box that are here, where several share an engine process."""
    beside = find_beside(peer, adverts) if peer in adverts else ()
    return tuple(each for each in beside if each in adverts)


def _describe_hosted(advert: Advert) -> str:
    """What a node serves: an entry of the catalogue, or the model that it was started with."""
    if advert.hosting is not None:
        return advert.hosting.hosts
    return advert.model.name if advert.model is not None else ""


def _lacking_beside(offers: Mapping[str, HostingOffer], offer: HostingOffer, name: str) -> str:
    """Why a node cannot host an entry beside what the others of its box do; "" where it can."""
    beside = {offers[peer].hosts for peer in offer.beside} - {"", name}
    sizes = [offer.models[each].weight_bytes for each in {*beside, name} if each in offer.models]
    if not beside or sum(sizes) <= offer.room_bytes:
        return ""
    gib = 1 << 30
    wanted, room = f"{sum(sizes) / gib:.1f} GiB", f"{offer.room_bytes / gib:.1f}"
    return f"no room beside {' and '.join(sorted(beside))}: {wanted} of weights, and there is room for {room}"


def _short(advert: Advert | None, columns: Sequence[str]) -> dict[str, str]:
    """Cells that a narrow table has shorter."""
    if columns != NARROW or advert is None:
        return {"reqs": "-"}
    hardware = advert.hardware.summary().replace("NVIDIA ", "").replace("GeForce ", "")
    stats = advert.stats
    return {
        "hardware": hardware.partition(" (")[0],
        "reqs": f"{stats.running}+{stats.waiting}" if stats is not None else "-",
    }


def closed_lines(status: Status) -> list[str]:
    """Which boxes nobody can dial."""
    closed = [name_of(node.peer) for node in status.nodes if node.closed and node.state == "alive"]
    return [f"nobody can dial {', '.join(closed)}: they dial the others, or are relayed"] if closed else []


def shared_gpu_lines(status: Status) -> list[str]:
    """Which nodes were started apart on one GPU, which is counted for each of them."""
    adverts = _adverts_of(status)
    owners: defaultdict[str, dict[tuple[str, ...], str]] = defaultdict(dict)  # by GPU: of nodes of one process, one
    for peer, advert in sorted(adverts.items()):
        for gpu in advert.hardware.gpus:
            if gpu.uuid.startswith(REAL_GPUS):
                owners[gpu.uuid].setdefault(find_beside(peer, adverts) or (peer,), name_of(peer))
    groups = sorted({tuple(nodes.values()) for nodes in owners.values() if len(nodes) > 1})[:MOST_SHARED_GPUS]
    return [
        f"on one GPU: {', '.join(names)}: plans count it for each; one `join` with several --model shares it"
        for names in groups
    ]


def engine_lines(status: Status) -> list[str]:
    """One line for each engine that does not serve, with the reason."""
    engines = [(node.peer, node.advert.engine) for node in status.nodes if node.advert is not None]
    return [
        f"engine of {name_of(peer)}: {engine.state}" + (f", {engine.detail}" if engine.detail else "")
        for peer, engine in engines
        if engine is not None and engine.state != "ready"
    ]


def node_row(node: NodeStatus, status: Status) -> tuple[str, ...]:
    """The cells of a node, in the order of COLUMNS."""
    phase = next(filter(None, (plan.phase_of(node.peer) for plan in plans_of(status))), None)
    marks = "*" if node.peer == status.coordinator else ""
    rtt = "here" if node.peer == status.answered_by else "-" if node.rtt_s is None else f"{node.rtt_s * 1000:.1f} ms"
    advert = node.advert
    if advert is None:
        return (name_of(node.peer) + marks, node.role, "-", node.state, node.address, rtt, *["-"] * 7)
    state = "draining" if advert.draining and node.state == "alive" else node.state
    return (
        name_of(node.peer) + marks,
        node.role,
        _phase(phase, advert.phase),
        state,
        node.address,
        rtt,
        advert.hardware.summary(),
        _engine(advert, node.peer),
        advert.model.service if advert.model is not None else "-",
        _load(advert),
        f"{advert.demand.requests_s:.2f}" if advert.demand is not None else "-",
        f"{node.tokens_s:.1f}" if node.tokens_s is not None else "-",
        f"{advert.usd_per_hour:.2f}" if advert.usd_per_hour else "-",
    )


def plan_lines(status: Status) -> list[str]:
    """Coordinator, and of each service the plan, its pairings and the reasons for them."""
    if status.coordinator is None:
        lines = ["coordinator: none is elected"]
    else:
        lines = [f"coordinator*: {name_of(status.coordinator)} (epoch {status.epoch})"]
    clients = sum(node.role == CLIENT and node.state == "alive" for node in status.nodes)
    lines.append(f"clients of the answering node: {clients}")
    lines.append(now_line(status))
    plans = plans_of(status)
    planned = {plan.service for plan in plans}
    offered = {node.advert.model.service for node in status.nodes if node.advert is not None and node.advert.model}
    lines += [line for plan in plans for line in _plan_lines(status, plan)]
    lines += [f"plan: none yet for {service}" for service in sorted(offered - planned)] if plans else []
    return lines if plans else [*lines, "plan: none yet"]


def _plan_lines(status: Status, plan: Plan) -> list[str]:
    lines = [f"plan {plan.epoch}.{plan.version} for {plan.service}, KV as {plan.codec}"]
    lines += _regrouping_lines(status, plan)
    faults = plan_faults(status, plan)
    lines += [f"  not serving: {fault}" for fault in dict.fromkeys(faults.values())]
    if len(faults) == len(plan.replicas):  # nothing of what it was to do is so, or will be soon
        return [*lines, "  none of its replicas serves: no request can be answered now"]
    for replica in plan.replicas:
        if len(replica.stages) > 1:
            spans = ", ".join(str(Place(replica.stages, i)) + f" on {name_of(p)}" for i, p in enumerate(replica.peers))
            lines.append(f"  replica {name_of(replica.id)} spans boxes: {spans}")
    for pair in plan.pairings:
        not_now = ", not now" * bool({pair.prefill, pair.decode} & faults.keys())
        if pair.prefill == pair.decode:
            lines.append(f"  {pair.weight:4.0%} of requests on {name_of(pair.decode)}{not_now}")
        else:
            lines.append(
                f"  {pair.weight:4.0%} of requests prefill{_part(pair.prefill_share)} on {name_of(pair.prefill)}, "
                f"decode on {name_of(pair.decode)}{not_now}"
            )
    lines += [f"  {describe_refusal(each)}" for each in plan.refused]
    why = "why, when it was made" if faults else "why"
    return [*lines, *(f"  {why}: {shortened(reason, plan.peers)}" for reason in plan.why)]


def regrouping_lines(status: Status) -> list[str]:
    """What boxes are on their way to, how far each is, and what that is expected to give."""
    return [line for plan in plans_of(status) for line in _regrouping_lines(status, plan)]


def _regrouping_lines(status: Status, plan: Plan) -> list[str]:
    regrouping = plan.regrouping
    if regrouping is None:
        return []
    if regrouping.undoes:
        first = f"  regrouping is undone: {regrouping.undoes}"
    else:
        steps = regrouping.done + len(regrouping.steps)
        first = (
            f"  regrouping, step {regrouping.done + 1} of {steps}, some {regrouping.reload_s:.0f} s each: expected "
            f"{regrouping.before:.3g} -> {regrouping.after:.3g} requests/s in time"
        )
    adverts = {PeerId(node.peer): node.advert for node in status.nodes if node.advert is not None}
    boxes = describe_boxes(regrouping, parts_of(adverts))
    return [first, *(f"    {name_of(peer)}: {how_far}" for peer, how_far in boxes)]


def plan_faults(status: Status, plan: Plan) -> dict[str, str]:
    """By id, the replicas of a plan that take no requests now, and why. Of a large network not all that boxes say is
    in a status: those of which nothing is known are taken to serve."""
    adverts = {PeerId(node.peer): node.advert for node in status.nodes if node.advert is not None}
    dead = {PeerId(node.peer) for node in status.nodes if node.state == "dead"}
    unknown = {node.peer for node in status.nodes if node.state not in GONE and node.advert is None}
    known = [replica for replica in plan.replicas if unknown.isdisjoint(replica.peers)]
    faults = {replica.id: find_fault(replica, plan.service, adverts, dead) for replica in known}
    return {replica: fault for replica, fault in faults.items() if fault}


def now_line(status: Status) -> str:
    """What the network does now, all boxes together, and what they cost."""
    here = [node for node in status.nodes if node.state == "alive"]
    adverts = [node.advert for node in here if node.advert is not None]
    requests_s = sum(advert.demand.requests_s for advert in adverts if advert.demand is not None)
    rates = [node.tokens_s for node in here if node.tokens_s is not None]
    parts = [f"{requests_s:.2f} requests/s"]
    refused_s = sum(advert.served.refused_s for advert in adverts if advert.served is not None)
    if refused_s:
        parts.append(f"{refused_s:.2g}/s refused for want of a place")
    if rates:
        parts.append(f"{sum(rates):.1f} tokens/s")
    usd = sum(advert.usd_per_hour for advert in adverts)
    if usd:
        parts.append(f"${usd:.2f}/h")
    return f"now: {', '.join(parts)}"


def speed_lines(status: Status) -> list[str]:
    """One line for each box whose engine has told what its steps take."""
    found = []
    for node in status.nodes:
        profile = node.advert.profile if node.advert is not None else None
        fits = {"prefill": profile.prefill, "decode": profile.decode} if profile is not None else {}
        parts = [
            f"{phase} {_seconds(fit.cost.seconds(*SPEED_AT))} (fitted to {fit.samples} steps, {fit.error:.0%} off)"
            for phase, fit in fits.items()
            if fit is not None
        ]
        if parts:
            at = f"a step of {SPEED_AT[0]} requests of {SPEED_AT[1]} tokens"
            found.append(f"speed of {name_of(node.peer)}, {at}: {', '.join(parts)}")
    return found


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{1e3 * value:.3g} ms"


def worth_lines(status: Status) -> list[str]:
    """One line for each box that has a price, those first that are not worth it."""
    found = sorted(status.worth.values(), key=lambda worth: (not worth.faults, -worth.usd_per_mtok))
    return [f"worth: {name_of(worth.peer)}{', not as it should be' * bool(worth.faults)}: {worth}" for worth in found]


def key_lines(status: Status) -> list[str]:
    """One line for each API key of the answering node that has cost anything, the dearest first."""
    spent = sorted(((usd, key) for key, usd in status.key_usd.items() if usd > 0.0), reverse=True)
    return [f"spent by {f'key {key}' if key else 'who has no key'}: ${usd:.4g}" for usd, key in spent]


def shortened(text: str, peers: Iterable[str]) -> str:
    """A text with these peers' ids as tables show them."""
    return with_names(text, peers)


def _phase(phase: Phase | None, pinned: Phase | None) -> str:
    """What a node does, and what its owner wants it to."""
    if pinned is None:
        return phase.value if phase is not None else "-"
    if phase is pinned:
        return f"{phase.value}, pinned"
    return f"{phase.value if phase is not None else '-'}, pinned to {pinned.value}"


def _engine(advert: Advert, peer: str) -> str:
    engine = advert.engine
    if engine is None:
        return "-"
    place = next((Place(engine.stages, i) for i, stage in enumerate(engine.stages) if stage.peer == peer), None)
    parts = [
        engine.state,
        f"stage {place}" if place else "",
        f"{engine.engine} on {engine.device}" if engine.engine else "",
        engine.detail,
    ]
    return ", ".join(part for part in parts if part)


def _part(prefill_share: float) -> str:
    return "" if prefill_share == 1.0 else f" the first {prefill_share:.0%} of the prompt"


def _load(advert: Advert) -> str:
    stats = advert.stats
    if stats is None:
        return "-"
    quota = f" (may have {stats.kv_quota:.0%})" if stats.kv_quota < 1.0 else ""
    return f"{stats.running} running, {stats.waiting} waiting, KV {min(1.0, stats.kv_usage):.0%}{quota}"
