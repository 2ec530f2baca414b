"""What `status` and `demo` show, as text from plain values."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from p2pserve.coordinator import (
    Demand,
    LatencyProfile,
    Pairing,
    Phase,
    PhaseCost,
    PhaseFit,
    Plan,
    Replica,
    Stage,
)
from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.names import name_of
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.messages import Advert, EngineAdvert, NodeStatus, RequestFigures, Status, TransferFigures
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.observing.values import Served
from p2pserve.sdk.actions.models import list_models, print_models
from p2pserve.sdk.actions.network import figures_line
from p2pserve.sdk.actions.status_view import (
    COLUMNS,
    closed_lines,
    ending_lines,
    gone_lines,
    key_lines,
    node_row,
    now_line,
    open_console,
    plan_lines,
    print_status,
    speed_lines,
)
from p2pserve.sdk.demo.demo import describe_timeout, run_demo
from p2pserve.sdk.demo.report import (
    Asked,
    RequestReport,
    Watcher,
    agreeing,
    covers,
    problems,
    report_request,
    request_table,
)
from p2pserve.sdk.errors import UsageError
from p2pserve.sdk.requests import Generation, describe_unserved

BOOT, FIRST, SECOND = "12D3boot01", "12D3first1", "12D3second"
MODEL = ModelInfo(
    service="m-1",
    shape=ModelShape(name="m", layers=2, hidden=8, heads=1, kv_heads=1, head_dim=4, intermediate=8, vocabulary=9),
    max_model_len=99,
    weights=WeightSizes(layers=(1,) * 2, embeddings=1, head=1),
)


def advert(state: str = "ready", **changes: Any) -> Advert:
    made = Advert(
        hardware=Hardware(cores=8, memory_gib=31.2, processor="x", gpus=(Gpu(name="A40", memory_gib=45, uuid="u"),)),
        draining=False,
        model=MODEL,
        engine=EngineAdvert(state=state, engine="vllm 0.32.0", device="cuda", dtype="float32"),
        stats=EngineStats(1, 2, 0.25, 300),
    )
    return msgspec.structs.replace(made, **changes)


def node(peer: str, role: str = "worker", state: str = "alive", rtt: float | None = 0.0125, **kind: Any) -> NodeStatus:
    return NodeStatus(peer=peer, role=role, state=state, address="1.2.3.4:5", rtt_s=rtt, advert=kind.get("advert"))


def plan(*phases: tuple[str, Phase], version: int = 1) -> Plan:
    replicas = tuple(
        Replica(id=peer, phase=phase, stages=(Stage(peer=peer, tp=1, first_layer=0, last_layer=2),))
        for peer, phase in phases
    )
    pair = Pairing(prefill=phases[0][0], decode=phases[-1][0], weight=1.0)
    return Plan(
        epoch=3, version=version, service="m-1", replicas=replicas, pairings=(pair,), codec="kv4", why=("a reason",)
    )


SPLIT = plan((FIRST, Phase.PREFILL), (SECOND, Phase.DECODE))


def status(*nodes: NodeStatus, plan: Plan | None = None, coordinator: str | None = BOOT) -> Status:
    return Status(answered_by=BOOT, coordinator=coordinator, epoch=3, nodes=nodes, plan=plan)


def test_a_row_has_every_column() -> None:
    found = dict(zip(COLUMNS, node_row(node(FIRST, advert=advert()), status(plan=SPLIT)), strict=True))
    assert found == {
        "node": "solar-deer",
        "role": "worker",
        "phase": "prefill",
        "state": "alive",
        "address": "1.2.3.4:5",
        "rtt": "12.5 ms",
        "hardware": "1x A40 (45 GiB)",
        "engine": "ready, vllm 0.32.0 on cuda",
        "model": "m-1",
        "load": "1 running, 2 waiting, KV 25%",
        "req/s": "-",
        "tok/s": "-",
        "$/h": "-",
    }
    busy = advert(usd_per_hour=0.4, demand=Demand(requests_s=1.5, arrival_cv=1.0, lengths=((10, 20),)))
    row = node_row(msgspec.structs.replace(node(FIRST, advert=busy), tokens_s=31.44), status(plan=SPLIT))
    assert row[-3:] == ("1.50", "31.4", "0.40")


def test_what_the_network_does_now_is_of_all_boxes_that_are_here() -> None:
    asked = Demand(requests_s=1.5, arrival_cv=1.0, lengths=((10, 20),))
    busy = advert(usd_per_hour=0.4, demand=asked)
    boxes = [msgspec.structs.replace(node(peer, advert=busy), tokens_s=10.0) for peer in (FIRST, SECOND)]
    gone = msgspec.structs.replace(node("gone", state="dead", advert=busy), tokens_s=1000.0)
    assert now_line(status(*boxes, gone)) == "now: 3.00 requests/s, 20.0 tokens/s, $0.80/h"
    assert now_line(status(node(BOOT))) == "now: 0.00 requests/s"
    full = msgspec.structs.replace(busy, served=Served(refused_s=2.5))
    assert "3.00 requests/s, 5/s refused for want of a place" in now_line(
        status(*(node(peer, advert=full) for peer in (FIRST, SECOND)))
    )


def test_nodes_that_are_gone_have_a_line_with_their_age() -> None:
    dead = msgspec.structs.replace(node(FIRST, state="dead"), gone_s=130.0)
    found = status(node(BOOT, "admin"), dead, node(SECOND, state="left"), node("c", "client", "dead"))
    assert gone_lines(found) == ["dead: solar-deer, 2 min ago, at 1.2.3.4:5", "left: vast-goat, at 1.2.3.4:5"]
    page = io.StringIO()
    print_status(found, Console(file=page, width=80))
    assert page.getvalue().count("solar-deer") == 1


def test_what_engines_measured_of_themselves_is_shown_with_all_columns() -> None:
    prefill = PhaseFit(cost=PhaseCost(token_s=1e-4, step_s=0.01), samples=17, error=0.04)
    decode = PhaseFit(cost=PhaseCost(request_s=1e-3, step_s=1.0), samples=21, error=0.002)
    measured = node(FIRST, advert=advert(profile=LatencyProfile(prefill=prefill, decode=decode)))
    found = status(measured, node(SECOND, advert=advert(profile=LatencyProfile())), node("third", advert=advert()))
    figures = "prefill 215 ms (fitted to 17 steps, 4% off), decode 1.01 s (fitted to 21 steps, 0% off)"
    assert speed_lines(found) == [f"speed of {name_of(FIRST)}, a step of 8 requests of 256 tokens: {figures}"]
    for wide in (False, True):
        page = io.StringIO()
        print_status(found, Console(file=page, width=300), wide=wide)
        assert ("speed of" in page.getvalue()) == wide


def test_who_would_serve_is_named_with_the_reason_why_not() -> None:
    gone = msgspec.structs.replace(node(SECOND, state="dead"), gone_s=130.0)
    found = status(node(FIRST, advert=advert(draining=True)), gone, node(BOOT, state="left"))
    assert describe_unserved(found, None) == "solar-deer is draining, vast-goat is dead since 2 min"
    assert describe_unserved(found, "m") == "solar-deer is draining, vast-goat is dead since 2 min"
    assert describe_unserved(found, "another") == "vast-goat is dead since 2 min"
    assert describe_unserved(status(node(FIRST, advert=advert())), None) == ""
    failed = status(node(FIRST, advert=advert(engine=EngineAdvert(state="failed", detail="out of memory"))))
    assert describe_unserved(failed, None) == "the engine of solar-deer has failed: out of memory"


def test_the_narrow_table_fits_80_columns_with_long_names_and_many_requests() -> None:
    real = Gpu(name="NVIDIA GeForce RTX 4090", memory_gib=24, uuid="u")
    modelled = Gpu(name="A40-48GB", memory_gib=45, uuid="u")
    box = Hardware(cores=8, memory_gib=31.2, processor="x")
    eight = msgspec.structs.replace(box, gpus=(real,) * 8)
    emulated = msgspec.structs.replace(box, gpus=(modelled,), emulated_as=Specs.DENSE)
    busy = advert(draining=True, usd_per_hour=12.5, stats=EngineStats(64, 12, 0.25, 300))
    adverts = {
        FIRST: msgspec.structs.replace(busy, hardware=eight),
        SECOND: msgspec.structs.replace(busy, hardware=emulated),
    }
    rows = [msgspec.structs.replace(node(peer, advert=each), tokens_s=1234.5) for peer, each in adverts.items()]
    page = io.StringIO()
    print_status(status(*rows, plan=SPLIT), Console(file=page, width=80))
    table = page.getvalue().splitlines()[:3]
    assert max(map(len, table)) <= 80
    assert [line.split()[0] for line in table] == ["node", "solar-deer", "vast-goat"]
    assert "8x RTX 4090" in table[1]
    assert "emulated 1x A40-48GB" in table[2]
    assert table[1].split()[-3:] == ["64+12", "1234.5", "12.50"]


@pytest.mark.parametrize(
    ("pinned", "shown"), [(Phase.PREFILL, "prefill, pinned"), (Phase.DECODE, "prefill, pinned to decode")]
)
def test_a_pinned_node_is_shown_as_such(pinned: Phase, shown: str) -> None:
    assert node_row(node(FIRST, advert=advert(phase=pinned)), status(plan=SPLIT))[2] == shown


def test_rows_of_nodes_that_say_little() -> None:
    coordinator = node_row(node(BOOT, "admin", rtt=None), status())
    assert coordinator[0] == "silent-boar*"
    assert coordinator[5] == "here"
    leaving = advert(draining=True, model=None, engine=None, stats=None)
    assert node_row(node(FIRST, advert=leaving), status(plan=SPLIT))[3] == "draining"
    broken = advert(engine=EngineAdvert(state="failed", detail="no memory"))
    assert node_row(node(FIRST, advert=broken), status())[7] == "failed, no memory"


def test_the_page_shows_plan_pairings_and_reasons() -> None:
    page = io.StringIO()
    clients = (node("one client", "client"), node("another", "client", "suspect"))
    boxes = (node(FIRST, advert=advert()), node(SECOND, advert=advert()))
    shown = status(node(BOOT, "admin"), *boxes, *clients, plan=SPLIT)
    print_status(shown, Console(file=page, width=200))
    text = page.getvalue()
    for part in ("coordinator*: silent-boar (epoch 3)", "plan 3.1 for m-1, KV as kv4", "why: a reason"):
        assert part in text
    assert "100% of requests prefill on solar-deer, decode on vast-goat" in text
    assert "clients of the answering node: 1\n" in text
    assert "..client" not in text
    lines = plan_lines(status(coordinator=None))
    assert (lines[0], lines[-1]) == ("coordinator: none is elected", "plan: none yet")
    assert "  100% of requests on solar-deer" in plan_lines(status(node(FIRST), plan=plan((FIRST, Phase.MIXED))))
    why = msgspec.structs.replace(SPLIT, why=(f"{FIRST} takes prefill from {SECOND}",))
    assert plan_lines(status(*boxes, plan=why))[-1] == "  why: solar-deer takes prefill from vast-goat"


def test_a_plan_whose_only_box_has_failed_says_so_and_expects_nothing() -> None:
    why = ("100.0% of 2 requests/s are expected to be in time",)
    alone = msgspec.structs.replace(plan((FIRST, Phase.MIXED)), why=why)
    failed = advert(engine=EngineAdvert(state="failed", detail="gave up after 6 failures, at last: out of memory"))
    lines = plan_lines(status(node(FIRST, advert=failed), plan=alone))
    assert (
        "  not serving: the engine of solar-deer has failed: gave up after 6 failures, at last: out of memory" in lines
    )
    assert "no request can be answered now" in lines[-1]
    assert not any("100" in line for line in lines)
    assert any("100.0%" in line for line in plan_lines(status(node(FIRST, advert=advert()), plan=alone)))


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (node(SECOND, state="dead"), "vast-goat is dead"),
        (node("another"), "vast-goat is not here"),
        (node(SECOND, advert=advert(draining=True)), "vast-goat is draining"),
        (node(SECOND, advert=advert("restarting")), "the engine of vast-goat is restarting"),
    ],
)
def test_a_replica_that_does_not_serve_now_is_named_with_the_reason(second: NodeStatus, fault: str) -> None:
    lines = plan_lines(status(node(FIRST, advert=advert()), second, plan=SPLIT))
    assert f"  not serving: {fault}" in lines
    assert "  100% of requests prefill on solar-deer, decode on vast-goat, not now" in lines
    assert lines[-1] == "  why, when it was made: a reason"


def test_boxes_that_end_are_listed_the_first_of_them_first() -> None:
    boxes = (node(BOOT, advert=advert()), node(FIRST, advert=advert(ends_in_s=7200.0)))
    assert ending_lines(status(*boxes, node(SECOND, advert=advert(ends_in_s=40.0)))) == [
        "ends: vast-goat in 40 s, no plan uses it any more",
        "ends: solar-deer in 2 h",
    ]


def test_keys_that_have_cost_something_are_shown_the_dearest_first() -> None:
    told = msgspec.structs.replace(status(), key_usd={"alice": 0.25, "bob": 1.5, "idle": 0.0, "": 0.125})
    assert key_lines(told) == ["spent by key bob: $1.5", "spent by key alice: $0.25", "spent by who has no key: $0.125"]
    page = io.StringIO()
    print_status(told, Console(file=page, width=200))
    assert "spent by key bob: $1.5" in page.getvalue()


def test_a_replica_that_spans_boxes_is_shown_with_its_stages() -> None:
    stages = (
        Stage(peer=FIRST, tp=1, first_layer=0, last_layer=10),
        Stage(peer=SECOND, tp=1, first_layer=10, last_layer=22),
        Stage(peer=BOOT, tp=1, first_layer=22, last_layer=32),
    )
    engine = EngineAdvert(state="loading", detail="downloads a.safetensors: 45 % of 3.1 GB", stages=stages)
    row = node_row(node(SECOND, advert=advert(engine=engine)), status())
    assert row[7] == "loading, stage 2/3 layers 10-21, downloads a.safetensors: 45 % of 3.1 GB"
    replica = Replica(id=FIRST, phase=Phase.MIXED, stages=stages)
    pair = Pairing(prefill=FIRST, decode=FIRST, weight=1.0)
    spread = Plan(epoch=3, version=1, service="m-1", replicas=(replica,), pairings=(pair,), codec="kv4", why=())
    expected = (
        "  replica solar-deer spans boxes: 1/3 layers 0-9 on solar-deer, 2/3 layers 10-21 on vast-goat, "
        "3/3 layers 22-31 on silent-boar"
    )
    assert expected in plan_lines(status(node(FIRST), node(SECOND), node(BOOT), plan=spread))


def test_a_split_of_prompts_is_shown() -> None:
    pair = Pairing(prefill=FIRST, decode=SECOND, weight=1.0, prefill_share=0.4)
    lines = plan_lines(status(node(FIRST), node(SECOND), plan=msgspec.structs.replace(SPLIT, pairings=(pair,))))
    assert "  100% of requests prefill the first 40% of the prompt on solar-deer, decode on vast-goat" in lines


def test_the_watcher_says_each_thing_once() -> None:
    watcher = Watcher()
    starting = status(node(BOOT, "admin"), node(FIRST, advert=advert("starting")), node("c", "client"))
    assert watcher.on_status(status(node(BOOT, "admin"), coordinator=None)) == [
        "joined: silent-boar at 1.2.3.4:5 (admin)"
    ]
    assert watcher.on_status(starting) == [
        "joined: solar-deer at 1.2.3.4:5 (worker)",
        "coordinator: silent-boar (epoch 3)",
    ]
    assert watcher.on_status(starting) == []
    ready = status(node(BOOT, "admin"), node(FIRST, advert=advert()), plan=plan((FIRST, Phase.MIXED)))
    assert watcher.on_status(ready) == [
        "engine ready: solar-deer runs vllm 0.32.0 on cuda in float32",
        "plan 3.1: solar-deer mixed",
    ]
    lost = status(node(FIRST, advert=advert(engine=EngineAdvert(state="restarting", detail="it died"))))
    assert watcher.on_status(lost) == ["engine restarting: solar-deer it died"]


def test_a_plan_covers_when_all_run_and_nobody_else_is_in_it() -> None:
    both = (node(FIRST, advert=advert()), node(SECOND, advert=advert()))
    assert covers(status(*both, plan=SPLIT), frozenset({FIRST, SECOND}))
    assert not covers(status(*both, plan=None), frozenset({FIRST, SECOND}))
    assert not covers(status(*both, plan=SPLIT), frozenset({FIRST}))
    starting = (node(FIRST, advert=advert()), node(SECOND, advert=advert("starting")))
    assert not covers(status(*starting, plan=SPLIT), frozenset({FIRST, SECOND}))


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [((), (), 0), ((1, 2), (1, 2), 2), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((2, 1), (1, 1), 0)],
)
def test_agreement_ends_where_two_answers_part(one: tuple[int, ...], other: tuple[int, ...], shared: int) -> None:
    assert agreeing(one, other) == shared


FIGURES = RequestFigures(
    prompt_tokens=100,
    completion_tokens=3,
    ttft_s=0.5,
    tpot_s=0.01,
    e2e_s=0.52,
    prefill_node=FIRST,
    decode_node=SECOND,
    codec="kv4",
    attempts=1,
    recovered=(),
    cached_tokens=99,
    transfer=TransferFigures(
        raw_bytes=6400, wire_bytes=900, frames=4, span_s=0.2, visible_s=0.05, hidden_fraction=0.75
    ),
)
assert FIGURES.transfer is not None
AT_ONCE = msgspec.structs.replace(FIGURES.transfer, mode="serialised", visible_s=0.2, hidden_fraction=0.0)
ASKED = Asked(name="code", prompt="x", messages=None, tokens=(1,))


def reported(single: tuple[int, ...], **changes: Any) -> RequestReport:
    figures = msgspec.structs.replace(FIGURES, **changes)
    return report_request(ASKED, Generation("abc", (1, 2, 3), "length", figures), single, MODEL, "float32")


def test_a_request_is_reported_with_its_bits_per_element() -> None:
    report = reported((1, 2, 9))
    assert report.kv_bits_per_element == pytest.approx(900 * 8 / 1600)
    assert (report.identical_to_single_engine, report.tokens_agreeing) == (False, 2)
    assert reported((1, 2, 3)).identical_to_single_engine
    assert reported((1, 2, 3), transfer=None).kv_bits_per_element is None


def test_problems_are_named() -> None:
    assert problems((reported((1, 2, 3)),), nodes=2, codec="raw") == ()
    assert problems((reported((9,)),), nodes=2, codec="kv4") == ()
    assert problems((reported((9,)),), nodes=2, codec="raw") == ("code: parts from the single engine after 0 tokens",)
    unsplit = reported((1, 2, 3), prefill_node=None, transfer=None)
    assert problems((unsplit,), nodes=1, codec="raw") == ()
    assert "was not split" in problems((unsplit,), nodes=2, codec="raw")[0]
    assert "no KV arrived" in problems((reported((1, 2, 3), transfer=None),), nodes=2, codec="raw")[0]
    assert "needed 2 attempts: x" in problems((reported((), recovered=("x",), attempts=2),), nodes=2, codec="kv4")[0]
    empty = reported((), completion_tokens=0)
    assert "ended with 'length' after 0 tokens" in problems((empty,), nodes=2, codec="kv4")[0]


def test_the_table_and_the_line_have_the_figures() -> None:
    page = io.StringIO()
    reports = (reported((1, 2, 3)), reported((), transfer=None), reported((1, 2, 3), transfer=AT_ONCE))
    Console(file=page, width=80).print(request_table(reports))
    for part in ("500 ms", "10.0 ms", "solar-deer", "vast-goat", "0.01 MB", "4.50", "75%", "50 ms", "3 of 3 tokens"):
        assert part in page.getvalue()
    assert page.getvalue().count("layer by layer") == 1
    assert page.getvalue().count("all at once") == 1
    line = figures_line(FIGURES)
    assert "prefill on solar-deer, decode on vast-goat" in line
    assert "75% of it hidden" in line
    assert "all at once in 200 ms after prefill" in figures_line(msgspec.structs.replace(FIGURES, transfer=AT_ONCE))
    alone = msgspec.structs.replace(FIGURES, prefill_node=None, transfer=None, recovered=("a death",))
    assert "computed on vast-goat; recovered: a death" in figures_line(alone)


def test_the_demo_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    arguments = SimpleNamespace(
        nodes=0,
        prompt=None,
        codec="raw",
        max_tokens=1,
        model=str(tmp_path),
        timeout_s=1.0,
        format="json",
        debug=True,
    )
    with pytest.raises(UsageError, match="nodes: 0"):
        run_demo(arguments)


LONG = "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B-Instruct-AWQ-emulated"


def box(number: int) -> NodeStatus:
    """One of a dozen, with a long model's name and a card's."""
    shape = msgspec.structs.replace(MODEL.shape, name=LONG.removesuffix("-emulated"))
    found = advert(model=msgspec.structs.replace(MODEL, service=LONG, shape=shape))
    return node(f"12D3KooW{'x' * 38}{number:06d}", advert=found)


@pytest.mark.parametrize("width", [80, 200])
def test_a_dozen_boxes_fit_and_no_name_is_cut(width: int) -> None:
    """Names are typed back: other columns give way to them."""
    of = status(*map(box, range(12)))
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False, soft_wrap=True)
    print_status(of, console)
    print_models(list_models(of), console)
    lines = out.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines if not line.startswith(("coordinator", "  why", "engine"))) <= width
    for each in of.nodes:
        assert any(line.split()[0].rstrip("*") == name_of(each.peer) for line in lines if line.strip())
    assert any(LONG in line.split() for line in lines)


def test_all_columns_cut_no_model_and_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a terminal of 80 columns, which breaks the lines."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = open_console(wide=True)
    console.file = io.StringIO()
    print_status(status(box(0)), console, wide=True)
    assert {LONG, "1.2.3.4:5"} <= set(console.file.getvalue().split())


def test_a_demo_that_was_not_done_in_time_says_how_to_give_it_more() -> None:
    line = describe_timeout(120.0, "the engines start")
    assert line.startswith("not done after 120 s, while the engines start; ")
    assert line.endswith("`p2pserve demo --timeout-s 240`")


def test_boxes_that_nobody_can_dial_are_named() -> None:
    inner = msgspec.structs.replace(node(FIRST), closed=True)
    gone = msgspec.structs.replace(node(SECOND, state="dead"), closed=True)
    assert closed_lines(status(inner, gone)) == [
        f"nobody can dial {name_of(FIRST)}: they dial the others, or are relayed"
    ]
    assert closed_lines(status(node(FIRST))) == []
