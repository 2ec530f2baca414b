"""What requests lose while groups change: how it is counted, and which figure decides."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator import Plan
from p2pserve.coordinator.costs.model_shape import MODELS
from p2pserve.coordinator.plan import BoxRecut, Deadlines
from p2pserve.coordinator.regrouping.divisions import BoxDivision, CutOffer
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import Advert, NodeStatus, Status
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.sdk.errors import DemoFailed
from p2pserve.sdk.live import comparison_command
from p2pserve.sdk.live.comparison_command import main
from p2pserve.sdk.live.network import Say
from p2pserve.sdk.live.nodes import LiveSettings
from p2pserve.sdk.live.regroup_bench import (
    CutChange,
    RegroupBench,
    RegroupPair,
    compare_runs,
    make_groups,
    nodes_of_box,
    summarise_pairs,
)
from p2pserve.sims.records import Outcomes, Trace

from .runs import TRACE, plan

SECOND = Deadlines(ttft_s=1.0)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command switches the log off for its process."""
    yield
    logging.disable(logging.NOTSET)


def answered(*ttft_s: float) -> Outcomes:
    """Each of the trace's requests had its first token after so long; NaN: never."""
    first = np.array(ttft_s)
    return Outcomes(trace=TRACE, ttft_s=first, e2e_s=first + 1.0)


def pair(kept: int, changed: int) -> RegroupPair:
    return RegroupPair(
        change="join", change_s=20.0, asked=20, kept=kept, changed=changed, all_asked=40, all_kept=30,
        all_changed=29, moved=1, failed=0,
    )  # fmt: skip


def test_requests_that_come_during_the_change_count() -> None:
    """The trace's come after 1, 2, 4 and 5 seconds."""
    found = compare_runs(
        "join", answered(0.5, 0.5, 0.5, 0.5), answered(2.0, 0.5, 2.0, np.nan), SECOND, (1.5, 4.5), moved=2
    )
    assert (found.asked, found.kept, found.changed, found.ratio) == (2, 2, 1, 0.5)
    assert (found.all_asked, found.all_kept, found.all_changed) == (4, 4, 1)
    assert (found.change_s, found.moved, found.failed) == (3.0, 2, 1)


def test_where_the_kept_plan_serves_none_there_is_none_to_lose() -> None:
    late = answered(2.0, 2.0, 2.0, 2.0)
    assert compare_runs("part", late, late, SECOND, (0.0, 9.0), moved=0).ratio == 1.0


@pytest.mark.parametrize(
    ("pairs", "ratio", "middle", "is_ok"),
    [
        ([pair(20, 19)], 0.95, 0.95, True),
        ([pair(20, 18), pair(10, 10)], 28 / 30, 0.95, False),  # over all requests, not over pairs
        ([pair(10, 8), pair(20, 21), pair(20, 20)], 0.98, 1.0, True),
        ([pair(0, 0)], 1.0, 1.0, False),  # nothing was measured
    ],
)
def test_the_target_is_a_share_of_all_requests(
    pairs: list[RegroupPair], ratio: float, middle: float, is_ok: bool
) -> None:
    found = summarise_pairs(pairs, "two nodes", TRACE)
    assert (found.median_ratio, found.ok) == (middle, is_ok)
    assert found.ratio == pytest.approx(ratio)


def test_two_boxes_become_halves_of_the_model_or_each_holds_all_of_it() -> None:
    (together,) = make_groups(plan(), "q", "p", joins=True)
    assert [(stage.peer, stage.first_layer, stage.last_layer) for stage in together] == [("q", 0, 14), ("p", 14, 28)]
    assert [group[0].layers for group in make_groups(plan(), "p", "q", joins=False)] == [28, 28]
    with pytest.raises(DemoFailed, match="has no part in the plan"):
        make_groups(plan(), "p", "z", joins=True)


@pytest.mark.parametrize(("changed", "code"), [(20, 0), (18, 1)])
def test_the_exit_code_says_whether_enough_was_served(
    changed: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[tuple[LiveSettings, int, str]] = []

    def run(settings: LiveSettings, traces: Sequence[Trace], say: Say, kind: str) -> RegroupBench:
        taken.append((settings, len(traces), kind))
        return summarise_pairs([pair(20, changed)], "some nodes", traces[0], late=2)

    monkeypatch.setattr(comparison_command, "run_regroup_bench", run)
    assert main(["--regroup", "--pairs", "3", "--format", "json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["pairs"][0]["ratio"], found["target"]) == (code == 0, changed / 20, 0.95)
    assert main(["--regroup", "--load-gb-s", "2"]) == code
    shown = capsys.readouterr().out
    assert f"requests in time during changes: {changed / 20:.3f}" in shown
    assert ("too few" in shown) is (code == 1)
    assert "fell behind their model 2 times" in shown
    assert main(["--regroup", "cut", "--cards", "2xRTX A6000"]) == code
    assert [(settings.load_gb_s, traces, kind) for settings, traces, kind in taken] == [
        (1.0, 3, "pipeline"), (2.0, 2, "pipeline"), (1.0, 2, "cut"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "2"], "nodes: two change"),
        (["--phases", "prefill", "decode"], "phases: emulated stages transfer no KV"),
        (["--lose", "3@20"], "lose: nothing goes wrong"),
        (["--load", "0.5"], "load, lead: with --regroup"),
        (["--pairs", "0"], "pairs: 0 is not above 0"),
        (["--load-gb-s", "nan"], "load-gb-s: nan is not a rate"),
        (["--load-gb-s", "-1"], "load-gb-s: -1.0 is not a rate"),
        (["cut"], "cards: 1xRTX A6000 cannot be divided"),
    ],
)
def test_wrong_input_is_one_line_before_anything_starts(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--regroup", *options]) == 2  # `cut` is its value
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def told(nodes: tuple[str, ...], plan_now: Plan) -> Status:
    """Of a network in which these nodes share a box."""
    offers = tuple(CutOffer(replicas=number, tp=2 // number, longest=512) for number in (1, 2))
    head = BoxDivision(head="p", nodes=nodes, offers=offers)
    division = {node: BoxDivision(head="p") for node in nodes} | {"p": head}
    shape = MODELS["llama3-8b"]
    weights = WeightSizes(layers=(1,) * shape.layers, embeddings=1, head=1)
    info = ModelInfo(service=plan_now.service, shape=shape, max_model_len=512, weights=weights)
    plain = Advert(hardware=Hardware(cores=8, memory_gib=31.2, processor="x"), draining=False, model=info)
    listed = tuple(
        NodeStatus(peer=node, role="worker", state="alive", address="1.2.3.4:5", rtt_s=0.0,
                   advert=msgspec.structs.replace(plain, division=division[node]))
        for node in nodes
    )  # fmt: skip
    return Status(answered_by="p", coordinator="p", epoch=1, nodes=listed, plan=plan_now)


def test_a_cut_is_over_when_the_plan_has_all_nodes_of_the_new_one() -> None:
    now = plan()
    wanted = CutChange("1 -> 2 nodes", BoxRecut(head="p", replicas=2, was=1))
    assert wanted.order("x").recuts == (wanted.recut,)
    assert nodes_of_box(told(("p", "q"), now), "p") == ("p", "q")
    assert nodes_of_box(told(("p", "q"), now), "q") == ()
    assert wanted.is_over(told(("p", "q"), now), now)
    assert not wanted.is_over(told(("p",), now), now)
    assert not wanted.is_over(told(("p", "z"), now), now)
