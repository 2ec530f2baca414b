"""One request as a Chrome trace, by the rules that Perfetto goes by, and as text."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from p2pserve.node.observing.values import BoxClock, RequestTrace, TraceSpan
from p2pserve.sdk.errors import UsageError
from p2pserve.sdk.seeing.request_trace import share_out, trace_document, write_trace
from p2pserve.sdk.seeing.trace_view import draw_bar, seconds_text, trace_lines

GATEWAY, PREFILL, DECODE = "gateway", "prefill", "decode"
LAYERS = tuple(
    TraceSpan(name="kv.layers", node=PREFILL, begin=100.2 + n / 100, end=100.3 + n / 50, attempt=1,
              facts={"first": n, "last": n + 1, "wire_bytes": 10})
    for n in range(8)
)  # fmt: skip
KV: dict[str, Any] = {
    "target": DECODE,
    "raw_bytes": 4_000_000,
    "wire_bytes": 1_000_000,
    "hidden_fraction": 0.75,
    "mode": "layerwise",
}
TRACE = RequestTrace(
    id="5f" * 12,
    gateway=GATEWAY,
    client="client",
    outcome="length",
    spans=(
        TraceSpan(name="queue", node=GATEWAY, begin=100.0, end=100.1),
        TraceSpan(name="wait", node=DECODE, begin=100.1, end=100.6, attempt=1),
        TraceSpan(name="prefill", node=PREFILL, begin=100.15, end=100.5, attempt=1),
        TraceSpan(name="kv", node=PREFILL, begin=100.2, end=100.55, attempt=1, facts={**KV}),
        *LAYERS,
        TraceSpan(name="decode", node=DECODE, begin=100.6, end=None, attempt=1),
        TraceSpan(
            name="replay", node=GATEWAY, begin=100.7, end=100.7, attempt=2, facts={"type": "decode", "why": "lost"}
        ),
        TraceSpan(name="answer", node=GATEWAY, begin=100.5, end=101.0),
    ),
    boxes=(BoxClock(node=GATEWAY, error_s=0.0), BoxClock(node=PREFILL, offset_s=0.0012, error_s=0.0004)),
    missing={"gone": "no answer"},
    facts={"prompt_tokens": 10, "completion_tokens": 5, "ttft_s": 0.5},
)


def events(phase: str) -> list[dict[str, Any]]:
    found = json.loads(json.dumps(trace_document(TRACE)))["traceEvents"]
    return [each for each in found if each["ph"] == phase]


def test_slices_of_a_thread_do_not_overlap() -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for each in events("X"):
        assert isinstance(each["pid"], int)
        assert isinstance(each["tid"], int)
        assert each["ts"] >= 0.0
        assert each["dur"] >= 0.0
        threads.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
    for slices in threads.values():
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(sorted(slices)))
    assert len(threads) > 6  # the layers have several


def test_every_process_and_thread_has_a_name() -> None:
    named = {(each["pid"], each["tid"]) for each in events("M") if each["name"] == "thread_name"}
    assert {(each["pid"], each["tid"]) for each in [*events("X"), *events("i")]} <= named
    names = [each["args"]["name"] for each in events("M") if each["name"] == "process_name"]
    assert names == ["gateway (gateway)", "decode", "prefill"]


def test_an_arrow_leads_from_the_transfer_to_who_waits_for_it() -> None:
    (start,), (end,) = events("s"), events("f")
    (transfer,) = [each for each in events("X") if each["cat"] == "kv"]
    (wait,) = [each for each in events("X") if each["cat"] == "wait"]
    assert start["id"] == end["id"]
    assert end["bp"] == "e"
    assert (start["pid"], start["tid"]) == (transfer["pid"], transfer["tid"])
    assert transfer["ts"] <= start["ts"] <= transfer["ts"] + transfer["dur"]
    assert (end["pid"], end["tid"]) == (wait["pid"], wait["tid"])
    assert wait["ts"] <= end["ts"] <= wait["ts"] + wait["dur"]


def test_times_are_microseconds_since_the_request_came() -> None:
    (queue,) = [each for each in events("X") if each["cat"] == "queue"]
    assert (queue["ts"], queue["dur"]) == (0.0, pytest.approx(1e5, abs=1.0))
    (decode,) = [each for each in events("X") if each["cat"] == "decode"]
    assert decode["args"]["state"] == "running"
    assert decode["dur"] == pytest.approx(4e5, abs=1.0)
    (replay,) = events("i")
    assert replay["args"]["why"] == "lost"


def test_lanes_are_as_few_as_can_be() -> None:
    assert share_out([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (3.0, 5.0)]) == [0, 1, 0, 1]
    rng = random.Random(2)
    spans = sorted((begin, begin + rng.uniform(0.0, 3.0)) for begin in (rng.uniform(0.0, 20.0) for _ in range(200)))
    lanes = share_out(spans)
    for lane in set(lanes):
        own = [span for span, at in zip(spans, lanes, strict=True) if at == lane]
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    busiest = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
    assert len(set(lanes)) == busiest


def test_a_trace_is_written_or_the_file_named(tmp_path: Path) -> None:
    write_trace(TRACE, tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["otherData"]["request"] == TRACE.id
    with pytest.raises(UsageError, match=r"trace: .* cannot be written"):
        write_trace(TRACE, tmp_path / "no" / "t.json")


def test_a_request_as_text_fits_eighty_columns() -> None:
    lines = "\n".join(trace_lines(TRACE, str)).splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "4.00 MB sent as 1.00 MB to decode, layerwise, 75% hidden behind prefill" in text
    assert "missing: gone: no answer" in text
    assert "+1.2 ms, give or take 0.4" in text
    assert "decode: lost" in text
    assert "layers up to 8" in text
    assert "layer 3" not in text
    assert "layer 3" in "\n".join(trace_lines(TRACE, str, with_layers=True))


def test_one_that_nothing_is_known_of_can_be_shown() -> None:
    empty = RequestTrace(id="r")
    assert trace_document(empty)["traceEvents"]
    assert "request r: running" in "\n".join(trace_lines(empty, str))


def test_bars_lie_where_they_should() -> None:
    assert draw_bar(0.0, 1.0, 1.0, 4) == "####"
    assert draw_bar(0.5, 0.75, 1.0, 4) == "  # "
    assert draw_bar(1.0, 1.0, 1.0, 4) == "   #"
    assert draw_bar(0.0, 0.0, 0.0, 4) == "#   "
    assert seconds_text(0.0123) == "12.3 ms"
    assert seconds_text(900.0) == "15 min"
