"""What the demo reports: values, a table, and lines while it runs. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import msgspec
from rich.table import Table

from ...coordinator.names import name_of
from ...node.messages import NodeStatus, RequestFigures, Status
from ...node.models import ModelInfo
from ..requests import Generation

SEND_MODES = {"layerwise": "layer by layer", "serialised": "all at once"}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node with an engine. `role` is its phase in the plan."""

    peer_id: str
    role: str
    address: str
    engine: str
    device: str
    dtype: str


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One request over the network and on a single engine. KV figures None if none travelled. `kv_visible_s`: from the
    end of prefill until the decode box had all of it."""

    name: str
    prompt_tokens: int
    completion_tokens: int
    text: str
    finish: str
    ttft_s: float
    tpot_s: float
    prefill_node: str | None
    decode_node: str
    attempts: int
    recovered: tuple[str, ...]
    codec: str
    kv_bytes_raw: int | None
    kv_bytes_wire: int | None
    kv_bits_per_element: float | None
    kv_send_mode: str | None
    kv_hidden_fraction: float | None
    kv_visible_s: float | None
    kv_span_s: float | None
    identical_to_single_engine: bool
    tokens_agreeing: int


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run of the demo found out."""

    ok: bool
    problems: tuple[str, ...]
    bootstrap: str
    nodes: tuple[NodeReport, ...]
    coordinator: str | None
    plan: dict[str, Any]
    requests: tuple[RequestReport, ...]
    model: str
    model_bits_per_byte: float | None
    model_bits_per_byte_source: str
    engines_ready_s: float
    elapsed_s: float
    peak_memory_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request of the demo: its name, a prompt or messages, and their tokens."""

    name: str
    prompt: str | None
    messages: list[dict[str, str]] | None
    tokens: tuple[int, ...]


def agreeing(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two answers share before they part: after that they answer different texts."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def covers(status: Status, peers: frozenset[str]) -> bool:
    """Whether all these engines run and are in the plan, and the plan has nobody else."""
    ready = {node.peer for node in status.nodes if _state(node) == "ready"}
    return status.plan is not None and peers <= ready and frozenset(status.plan.peers) == peers


def node_reports(status: Status, peers: frozenset[str]) -> tuple[NodeReport, ...]:
    """The nodes with engines, in the order of the status."""
    found = []
    for node in status.nodes:
        engine = node.advert.engine if node.advert is not None else None
        if node.peer not in peers or engine is None or status.plan is None:
            continue
        phase = status.plan.phase_of(node.peer)
        found.append(
            NodeReport(
                peer_id=node.peer,
                role=phase.value if phase is not None else "",
                address=node.address,
                engine=engine.engine,
                device=engine.device,
                dtype=engine.dtype,
            )
        )
    return tuple(found)


def report_request(
    asked: Asked, answer: Generation, single: tuple[int, ...], model: ModelInfo, dtype: str
) -> RequestReport:
    """Put an answer beside that of the single engine."""
    figures = answer.figures
    assert figures is not None  # a gateway sends them with the end of every answer it has routed
    transfer = figures.transfer
    bits = None
    if transfer is not None and transfer.raw_bytes:
        bits = transfer.wire_bytes * 8 / (transfer.raw_bytes / ITEM_BYTES.get(dtype, 2))
    return RequestReport(
        name=asked.name,
        prompt_tokens=figures.prompt_tokens,
        completion_tokens=figures.completion_tokens,
        text=answer.text,
        finish=answer.finish,
        ttft_s=figures.ttft_s,
        tpot_s=figures.tpot_s,
        prefill_node=figures.prefill_node,
        decode_node=figures.decode_node,
        attempts=figures.attempts,
        recovered=figures.recovered,
        codec=figures.codec,
        kv_bytes_raw=transfer.raw_bytes if transfer is not None else None,
        kv_bytes_wire=transfer.wire_bytes if transfer is not None else None,
        kv_bits_per_element=bits,
        kv_send_mode=transfer.mode if transfer is not None else None,
        kv_hidden_fraction=transfer.hidden_fraction if transfer is not None else None,
        kv_visible_s=transfer.visible_s if transfer is not None else None,
        kv_span_s=transfer.span_s if transfer is not None else None,
        identical_to_single_engine=answer.tokens == single,
        tokens_agreeing=agreeing(answer.tokens, single),
    )


def problems(reports: tuple[RequestReport, ...], *, nodes: int, codec: str) -> tuple[str, ...]:
    """What did not go as it should have."""
    found = []
    for report in reports:
        if report.recovered:
            found.append(f"{report.name}: needed {report.attempts} attempts: {'; '.join(report.recovered)}")
        if report.finish not in ("stop", "length") or not report.completion_tokens:
            found.append(f"{report.name}: ended with {report.finish!r} after {report.completion_tokens} tokens")
        if nodes > 1 and report.prefill_node is None:
            found.append(f"{report.name}: was not split between a prefill and a decode node")
        elif nodes > 1 and report.kv_bytes_wire is None:
            found.append(f"{report.name}: no KV arrived")
        if codec == "raw" and not report.identical_to_single_engine:
            found.append(f"{report.name}: parts from the single engine after {report.tokens_agreeing} tokens")
    return tuple(found)


def request_table(reports: tuple[RequestReport, ...]) -> Table:
    """The figures, one column for each request."""
    table = Table("", *(report.name for report in reports), box=None, pad_edge=False, header_style="bold")
    rows: list[tuple[str, list[str]]] = [
        ("tokens in + out", [f"{r.prompt_tokens} + {r.completion_tokens}" for r in reports]),
        ("prefill", ["-" if r.prefill_node is None else name_of(r.prefill_node) for r in reports]),
        ("decode", [name_of(r.decode_node) for r in reports]),
        ("first token (TTFT)", [_milliseconds(r.ttft_s) for r in reports]),
        ("each next (TPOT)", [f"{r.tpot_s * 1000:.1f} ms" for r in reports]),
        ("KV in the engine", [_size(r.kv_bytes_raw) for r in reports]),
        ("KV on the wire", [_size(r.kv_bytes_wire) for r in reports]),
        ("bits per element", [_number(r.kv_bits_per_element, "{:.2f}") for r in reports]),
        ("KV leaves", [SEND_MODES.get(r.kv_send_mode or "", "-") for r in reports]),
        ("hidden behind prefill", [_number(r.kv_hidden_fraction, "{:.0%}") for r in reports]),
        ("visible after prefill", [_milliseconds(r.kv_visible_s) for r in reports]),
        ("as a single engine", [f"{r.tokens_agreeing} of {r.completion_tokens} tokens" for r in reports]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _size(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.2f} MB"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _state(node: NodeStatus) -> str:
    return node.advert.engine.state if node.advert is not None and node.advert.engine is not None else ""


@final
class Watcher:
    """Turns successive states of a network into lines about what has changed."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._coordinator: tuple[str, int] | None = None
        self._plan: tuple[int, int] | None = None

    def on_status(self, status: Status) -> list[str]:
        """What is new."""
        lines = []
        for node in status.nodes:
            if node.role == "client" or node.state != "alive":
                continue
            if node.peer not in self._known:
                self._known[node.peer] = ""
                lines.append(f"joined: {name_of(node.peer)} at {node.address} ({node.role})")
            state = _state(node)
            if state != self._known[node.peer]:
                self._known[node.peer] = state
                lines += _engine_lines(node, state)
        leader = (status.coordinator, status.epoch) if status.coordinator is not None else None
        if leader is not None and leader != self._coordinator:
            self._coordinator = leader
            lines.append(f"coordinator: {name_of(leader[0])} (epoch {leader[1]})")
        plan = status.plan
        if plan is not None and plan.number != self._plan:
            self._plan = plan.number
            roles = ", ".join(f"{name_of(replica.head)} {replica.phase.value}" for replica in plan.replicas)
            lines.append(f"plan {plan.epoch}.{plan.version}: {roles}")
        return lines


def _engine_lines(node: NodeStatus, state: str) -> list[str]:
    engine = node.advert.engine if node.advert is not None else None
    if engine is None or state == "starting":
        return []
    if state == "ready":
        return [f"engine ready: {name_of(node.peer)} runs {engine.engine} on {engine.device} in {engine.dtype}"]
    return [f"engine {state}: {name_of(node.peer)} {engine.detail}"]


def figures_of(figures: RequestFigures) -> str:
    """A word about a finished request, for the running log."""
    return f"{figures.completion_tokens} tokens, first after {figures.ttft_s * 1000:.0f} ms"
