"""`p2pserve topology --watch`: the topology in the terminal, as it changes.

Asks the network once per interval, on a thread, and shows what it has said last while it does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, final

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from ...kvtransport.routing.paths import PathNetwork
from ...node.messages import Status
from ..actions.links_view import network_of
from ..errors import ClientError, UsageError
from .topology import Topology, build_topology, fold, labels_of, select
from .topology_view import (
    MAX_FLOWS,
    METRICS,
    boxes_table,
    flows_table,
    headline,
    link_lines,
    matrix_nodes,
    matrix_parts,
    plan_line,
)

MARGIN: Final = 4  # columns that the frame takes


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """What is shown, and how often it is asked for."""

    interval_s: float = 2.0
    sites: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    folded: bool = False
    metric: str = "rate"


@final
class TopologyApp(App[None]):
    """`look` asks the network; it may take seconds and raise ClientError. `clock` has unix seconds."""

    TITLE = "p2pserve topology"
    CSS = "Static { height: auto; padding: 0 1; } #detail { height: 9; border-top: solid $accent; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("m", "metric", "Figure"),
        Binding("f", "fold", "Fold sites"),
        Binding("space", "pause", "Pause"),
        Binding("r", "look", "Now"),
        Binding("up", "move(-1, 0)", "Link", show=False, priority=True),
        Binding("down", "move(1, 0)", "Link", show=False, priority=True),
        Binding("left", "move(0, -1)", "Link", show=False, priority=True),
        Binding("right", "move(0, 1)", "Link", show=False, priority=True),
    ]

    def __init__(self, look: Callable[[], Status], clock: Callable[[], float], options: WatchOptions) -> None:
        super().__init__()
        self._look = look
        self._clock = clock
        self._options = options
        self._metric = options.metric
        self._folded = options.folded
        self._paused = False
        self._before: tuple[Status, float] | None = None
        self._now: tuple[Status, float] | None = None
        self._problem = ""
        self._at = (0, 1)  # row and column of the chosen link

    def compose(self) -> ComposeResult:
        """Headline, boxes, matrix and flows in one column, and the chosen link below."""
        yield Static(Text("asking the network..."), id="head")
        with VerticalScroll():
            yield Static(id="boxes")
            yield Static(id="matrix")
            yield Static(id="flows")
        yield Static(id="detail")
        yield Footer()

    def on_mount(self) -> None:
        """Look now, and from then on."""
        self.action_look()
        self.set_interval(self._options.interval_s, self._tick)

    def on_resize(self) -> None:
        """The matrix fits the width."""
        self._show()

    def action_look(self) -> None:
        """Ask the network now."""
        self.run_worker(self._ask, thread=True, exclusive=True, group="look")

    def action_metric(self) -> None:
        """Another figure in the matrix."""
        self._metric = METRICS[(METRICS.index(self._metric) + 1) % len(METRICS)]
        self._show()

    def action_fold(self) -> None:
        """Sites in place of boxes, or back."""
        self._folded = not self._folded
        self._show()

    def action_pause(self) -> None:
        """Keep what is shown, or go on."""
        self._paused = not self._paused
        self._show()

    def action_move(self, rows: int, columns: int) -> None:
        """Choose another link."""
        count = max(1, len(matrix_nodes(topology))) if (topology := self._topology()) is not None else 1
        self._at = (self._at[0] + rows) % count, (self._at[1] + columns) % count
        self._show()

    def take(self, status: Status | None, problem: str) -> None:
        """What the network has said, or why it has said nothing."""
        self._problem = problem
        if status is not None:
            self._before, self._now = self._now, (status, self._clock())
        self._show()

    def _tick(self) -> None:
        if not self._paused:
            self.action_look()

    def _ask(self) -> None:
        try:
            found, problem = self._look(), ""
        except ClientError as error:
            found, problem = None, str(error)
        self.call_from_thread(partial(self.take, found, problem))

    def _topology(self) -> Topology | None:
        if self._now is None:
            return None
        topology = build_topology(*self._now, before=self._before)
        try:
            topology = select(topology, self._options.sites, self._options.boxes)
        except UsageError as error:  # the boxes that were chosen have gone
            self._problem = str(error)
        return fold(topology) if self._folded else topology

    def _show(self) -> None:
        topology = self._topology()
        if topology is None or self._now is None:
            if self._problem:
                self._put("head", Text(self._problem, style="bold red"))
            return
        nodes, width = matrix_nodes(topology), max(40, self.size.width - MARGIN)
        row, column = (min(at, max(0, len(nodes) - 1)) for at in self._at)
        chosen = (nodes[row].id, nodes[column].id) if nodes else None
        state = self._problem or ("paused" if self._paused else "")
        head = Text(headline(topology), style="bold").append(f"  {state}" if state else "", style="bold red")
        self._put("head", Group(head, *(Text(line) for line in plan_line(topology))))
        self._put("boxes", boxes_table(topology, self.size.width))
        self._put("matrix", Group(*matrix_parts(topology, width, self._metric, chosen)))
        self._put("flows", self._flows(topology, None if topology.folded else network_of(self._now[0])))
        self._put("detail", self._detail(topology, chosen))

    def _flows(self, topology: Topology, network: PathNetwork | None) -> Group | Text:
        flows = list(topology.flows)[:MAX_FLOWS]
        return Group(flows_table(topology, flows, network)) if flows else Text("no KV flows", style="dim")

    def _detail(self, topology: Topology, chosen: tuple[str, str] | None) -> Text:
        link = topology.links.get(chosen) if chosen is not None else None
        name_of = labels_of(topology)
        if link is None or chosen is None:
            names = " -> ".join(map(name_of, chosen)) if chosen is not None else ""
            return Text(f"{names}: nothing is known of it; arrows choose another link", style="dim")
        return Text("\n".join(link_lines(link, *map(name_of, chosen))))

    def _put(self, name: str, what: Group | Text | object) -> None:
        self.query_one(f"#{name}", Static).update(what)  # type: ignore[arg-type]
