"""What `p2pserve bench` asks, and what it makes of the answers."""

from io import StringIO
from math import isnan
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from p2pserve.coordinator.planning.model.workload import Slo
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import Advert, NodeStatus, RequestFigures, Status, TransferFigures
from p2pserve.node.models import open_model
from p2pserve.sdk.bench.load import BenchLoad, check_options, plan_load, read_deadlines, read_trace
from p2pserve.sdk.bench.report import BenchReport, Ended, print_report, summarise_run
from p2pserve.sdk.errors import NotReady, UsageError
from p2pserve.sdk.requests import Generation
from p2pserve.sims.records import Trace

from ..commands.parsing import parse

INFO = open_model("bundled").info


def status(*services: str) -> Status:
    box = Hardware(cores=2, memory_gib=8.0, processor="x")
    nodes = [
        NodeStatus(
            peer=name,
            role="worker",
            state="alive",
            address="x:1",
            rtt_s=None,
            advert=Advert(hardware=box, draining=False, model=msgspec.structs.replace(INFO, service=name)),
        )
        for name in services
    ]
    return Status(answered_by="a", coordinator=None, epoch=1, nodes=tuple(nodes), plan=None)


def load_of(*options: str, services: tuple[str, ...] = ("one",)) -> BenchLoad:
    arguments = parse(["bench", *options])
    check_options(arguments)
    return plan_load(arguments, read_trace(arguments), read_deadlines(arguments.slo), status(*services))


def test_the_same_seed_asks_the_same_and_no_prompt_begins_as_another() -> None:
    options = ("--rate", "5", "--requests", "20", "--prompt-tokens", "64", "--max-tokens", "8", "--seed")
    first, again, other = load_of(*options, "3"), load_of(*options, "3"), load_of(*options, "4")
    assert np.array_equal(first.trace.arrival_s, again.trace.arrival_s)
    assert not np.array_equal(first.trace.arrival_s, other.trace.arrival_s)
    prompts = [first.prompt(row) for row in range(20)]
    assert prompts == [again.prompt(row) for row in range(20)]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20
    assert {len(prompt) for prompt in prompts} == {64}
    assert all(0 <= token < INFO.shape.vocabulary for prompt in prompts for token in prompt)


def test_open_or_closed() -> None:
    assert load_of().concurrency == 8
    assert load_of("--concurrency", "3").concurrency == 3
    assert load_of("--rate", "3").concurrency is None
    assert len(load_of().trace) == 100


def test_a_trace_begins_at_once_and_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("arrival,prompt,output\n7,10,2\n8,11,3\n9,12,4\n")
    load = load_of("--trace", str(path), "--requests", "2")
    assert load.trace.arrival_s.tolist() == [0.0, 1.0]
    assert load.trace.output.tolist() == [2, 3]
    assert load.concurrency is None
    assert load_of("--trace", str(path), "--concurrency", "2").concurrency == 2


@pytest.mark.parametrize(
    ("options", "services", "says"),
    [
        (("--rate", "1", "--concurrency", "1"), ("one",), "rate: give either"),
        (("--trace", "x", "--max-tokens", "4"), ("one",), "max-tokens: the requests of --trace"),
        (("--slo", "3x"), ("one",), "slo: '3x' is a multiple"),
        (("--trace", "/nowhere"), ("one",), "trace: /nowhere"),
        (("--prompt-tokens", "9000000"), ("one",), "prompt-tokens: request 0 has"),
        ((), ("one", "two"), "service: the network serves several models, choose one with --service: one, two"),
        (("--service", "three"), ("one",), "service: nobody serves three"),
    ],
)
def test_what_cannot_be_asked(options: tuple[str, ...], services: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load_of(*options, services=services)


def test_nobody_serves() -> None:
    with pytest.raises(NotReady, match="p2pserve join"):
        load_of(services=())


def load(slo: Slo | None, *, emulated: tuple[str, ...] = ()) -> BenchLoad:
    trace = Trace(
        ids=np.arange(5),
        arrival_s=np.arange(5, dtype=np.float64),
        prompt=np.full(5, 100),
        output=np.full(5, 11),
        lengths="100 + 11 tokens",
        arrivals="Poisson, 1 requests/s",
    )
    return BenchLoad(service="m", vocabulary=9, trace=trace, concurrency=None, seed=0, slo=slo, emulated=emulated)


ENDED = (
    Ended(row=2, failure="Busy", reason="all are busy"),
    Ended(row=0, ttft_s=1.0, e2e_s=2.0, tokens=11, raw_bytes=800, wire_bytes=220, usd=0.001),
    Ended(row=1, ttft_s=3.0, e2e_s=3.0, tokens=1, replays=2),
)


def report(slo: Slo | None = None, ended: tuple[Ended, ...] = ENDED) -> BenchReport:
    return summarise_run(load(slo, emulated=("emulated 1x L4",)), ended, sent=4, span_s=10.0, interrupted=True)


def test_the_figures() -> None:
    found = report()
    assert (found.requests, found.answered, found.failed, found.unfinished) == (5, 2, 1, 1)
    assert (found.requests_s, found.output_tokens_s, found.prompt_tokens_s) == (0.2, 1.2, 20.0)
    assert found.ttft_s is not None
    assert found.tpot_s is not None
    assert found.ttft_s.p50 == 2.0
    assert found.ttft_s.p99 == pytest.approx(2.98)
    assert found.tpot_s.mean == pytest.approx(0.1)  # of the only answer that has several tokens
    assert (found.replayed, found.replays, found.kv_raw_bytes, found.kv_wire_bytes) == (1, 2, 800, 220)
    assert found.usd_per_million_tokens == pytest.approx(0.001 / 12 * 1e6)
    assert (found.attainment, found.goodput_s, found.slo) == (None, None, None)


def test_what_failed_was_not_in_time() -> None:
    found = report(Slo(ttft_s=2.0, tpot_s=0.2))
    assert found.attainment == pytest.approx(1 / 3)
    assert found.goodput_s == pytest.approx(0.1)
    assert found.slo == {"ttft": 2.0, "tpot": 0.2}
    assert report(Slo(tpot_s=0.05)).attainment == pytest.approx(1 / 3)  # the one of a single token


def test_nothing_has_ended_and_json_has_no_nan() -> None:
    found = report(Slo(ttft_s=2.0), ended=())
    assert (found.ttft_s, found.attainment, found.usd_per_million_tokens) == (None, None, None)
    assert b"NaN" not in msgspec.json.encode(found)


def test_failures_by_reason() -> None:
    more = [Ended(row=3, failure="Gone", reason="x"), Ended(row=4, failure="Busy", reason="later")]
    failures = report(ended=(*ENDED, *more)).failures
    assert [(each.kind, each.count, each.first) for each in failures] == [("Busy", 2, "all are busy"), ("Gone", 1, "x")]


def test_it_is_printed_within_80_columns() -> None:
    out = StringIO()
    print_report(report(Slo(ttft_s=2.0)), Console(file=out, width=80))
    text = out.getvalue()
    for line in (
        "engines are emulated (emulated 1x L4)",
        "2 of 5 requests answered in 10.0 s, 1 failed, interrupted, 1 unfinished",
        "in time (ttft 2.00 s): 33.3%, goodput 0.10 requests/s",
        "failed, Busy: 1, the first: all are busy",
        "1 requests were begun again elsewhere, 2 times in all",
        "$0.001000, $83.33 per million new tokens",
    ):
        assert line in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_answer_tells_its_replays_bytes_and_cost() -> None:
    transfer = TransferFigures(raw_bytes=9, wire_bytes=3, frames=1, span_s=1.0, visible_s=0.5, hidden_fraction=0.5)
    figures = RequestFigures(
        prompt_tokens=1, completion_tokens=2, ttft_s=0.1, tpot_s=0.1, e2e_s=0.3, prefill_node="a", decode_node="b",
        codec="kv4", attempts=3, recovered=(), cached_tokens=0, transfer=transfer, usd=0.5,
    )  # fmt: skip
    found = Ended.of(7, Generation("", (1, 2), "length", figures), 0.2, 0.4)
    assert (found.row, found.tokens, found.replays, found.raw_bytes, found.wire_bytes, found.usd) == (
        7,
        2,
        2,
        9,
        3,
        0.5,
    )
    plain = Ended.of(7, Generation("", (1, 2), "length", None), 0.2, 0.4)
    assert (plain.replays, plain.wire_bytes, plain.ttft_s) == (0, 0, 0.2)
    assert isnan(Ended(row=1).ttft_s)
