"""`p2pserve status` and `models` for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...bootstrap import Role
from ...coordinator import Phase
from ...coordinator.names import name_of, with_names
from ...node.messages import Advert, NodeStatus, Status
from ...node.replica.place import Place
from ..printing import printable

COLUMNS = ("node", "role", "phase", "state", "address", "rtt", "hardware", "engine", "model", "load")
NARROW = ("node", "phase", "state", "hardware", "load")
"""What fits 80 columns."""

MODEL_COLUMNS = ("model", "name", "boxes", "ready", "tokens", "KV tokens")
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


def open_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is; what goes to a file is not cut off."""
    console = PlainConsole(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console = PlainConsole(stderr=stderr, highlight=False, markup=False, soft_wrap=True, width=WIDE)
    return console


def print_status(status: Status, console: Console | None = None, *, wide: bool = False) -> None:
    """Print the table of nodes, the coordinator and the plan."""
    console = console or open_console()
    console.print(status_table(status, COLUMNS if wide else NARROW))
    for line in (*engine_lines(status), *plan_lines(status), *worth_lines(status), *key_lines(status)):
        console.print(line)


def status_table(status: Status, columns: Sequence[str] = COLUMNS) -> Table:
    """One line for each node, with these of COLUMNS; clients come and go, and are only counted."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for node in status.nodes:
        if node.role != CLIENT:
            cells = dict(zip(COLUMNS, node_row(node, status), strict=True))
            table.add_row(*(cells[column] for column in columns))
    return table


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
    phase = status.plan.phase_of(node.peer) if status.plan is not None else None
    marks = "*" if node.peer == status.coordinator else ""
    rtt = "here" if node.peer == status.answered_by else "-" if node.rtt_s is None else f"{node.rtt_s * 1000:.1f} ms"
    advert = node.advert
    if advert is None:
        return (name_of(node.peer) + marks, node.role, "-", node.state, node.address, rtt, "-", "-", "-", "-")
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
    )


def plan_lines(status: Status) -> list[str]:
    """Coordinator, plan, pairings and the reasons for them."""
    if status.coordinator is None:
        lines = ["coordinator: none is elected"]
    else:
        lines = [f"coordinator*: {status.coordinator} (epoch {status.epoch})"]
    clients = sum(node.role == CLIENT and node.state == "alive" for node in status.nodes)
    lines.append(f"clients of the answering node: {clients}")
    prices = [node.advert.usd_per_hour for node in status.nodes if node.advert is not None and node.state == "alive"]
    if any(prices):
        lines.append(f"cost: ${sum(prices):.2f}/h")
    plan = status.plan
    if plan is None:
        return [*lines, "plan: none yet"]
    lines.append(f"plan {plan.epoch}.{plan.version} for {plan.service}, KV as {plan.codec}")
    for replica in plan.replicas:
        if len(replica.stages) > 1:
            spans = ", ".join(str(Place(replica.stages, i)) + f" on {name_of(p)}" for i, p in enumerate(replica.peers))
            lines.append(f"  replica {name_of(replica.id)} spans boxes: {spans}")
    for pair in plan.pairings:
        if pair.prefill == pair.decode:
            lines.append(f"  {pair.weight:4.0%} of requests on {name_of(pair.decode)}")
        else:
            lines.append(
                f"  {pair.weight:4.0%} of requests prefill{_part(pair.prefill_share)} on {name_of(pair.prefill)}, "
                f"decode on {name_of(pair.decode)}"
            )
    return [*lines, *(f"  why: {shortened(reason, plan.peers)}" for reason in plan.why)]


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
    return f"{stats.running} running, {stats.waiting} waiting, KV {stats.kv_usage:.0%}"


class OfferedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that boxes of a network offer. `service` is what a request calls it, or `name`; `longest`: tokens of a
    prompt with its answer; `kv_tokens`: that fit on all ready boxes together."""

    service: str
    name: str
    boxes: int
    ready: int
    longest: int
    kv_tokens: int


def list_models(status: Status) -> list[OfferedModel]:
    """The models of all living boxes, in order of name."""
    adverts = [
        node.advert
        for node in status.nodes
        if node.role != CLIENT and node.state == "alive" and node.advert is not None and node.advert.model is not None
    ]
    found = []
    for service in sorted({advert.model.service for advert in adverts if advert.model is not None}):
        offers = [advert for advert in adverts if advert.model is not None and advert.model.service == service]
        engines = [each.engine for each in offers if each.engine is not None and each.engine.state == "ready"]
        first = offers[0].model
        assert first is not None
        found.append(
            OfferedModel(
                service=service,
                name=first.name,
                boxes=len(offers),
                ready=len(engines),
                longest=max((engine.max_model_len for engine in engines), default=0),
                kv_tokens=sum(engine.kv_tokens for engine in engines),
            )
        )
    return found


def print_models(models: Sequence[OfferedModel], console: Console) -> None:
    """One line for each, or that there is none."""
    if not models:
        console.print("models: no box of this network offers one; start one with `p2pserve join --model ...`")
        return
    table = Table(*MODEL_COLUMNS, box=None, pad_edge=False, header_style="bold")
    for each in models:
        figures = (str(value) if value else "-" for value in (each.longest, each.kv_tokens))
        table.add_row(each.service, each.name, str(each.boxes), str(each.ready), *figures)
    console.print(table)
