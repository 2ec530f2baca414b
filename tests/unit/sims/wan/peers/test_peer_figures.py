"""Rows, verdicts and the page of the comparison with peers."""

import json
from pathlib import Path

import pytest

from p2pserve.sims.experiments.page import write_page
from p2pserve.sims.wan.peers import figures
from p2pserve.sims.wan.peers.changes import ChangeTimes
from p2pserve.sims.wan.peers.figures import (
    LOOPBACK,
    LOSSY,
    MOONCAKE,
    NIXL,
    PLAIN_STREAM,
    PLAIN_STREAMS,
    PeerFigures,
    PeerTarget,
    change_row,
    cpu_rows,
    judge,
    make_page,
    missed_lines,
    peer_rows,
    pipeline_row,
)
from p2pserve.sims.wan.peers.pipelines import PipelineTurns, TokenPair, split_layers
from p2pserve.sims.wan.peers.turns import OURS, MoveSample, TurnsTaken


def turns(name: str, *rates: float, cpu_s: float | None = None, failure: str = "") -> TurnsTaken:
    """A round for each rate in MiB/s."""
    found = {number: MoveSample(int(rate), 1.0, cpu_s) for number, rate in enumerate(rates)}
    return TurnsTaken(name, found, "1.0" if rates else "", failure)


@pytest.mark.parametrize(
    ("ratio", "target", "failure", "verdict"),
    [
        (2.0, PeerTarget(1.0, 2.0), "", "reached"),
        (1.99, PeerTarget(1.0, 2.0), "", "MISSED"),
        (5.0, PeerTarget(), "", ""),
        (None, PeerTarget(1.0, 2.0), "", "not measured"),
        (None, PeerTarget(1.0, 2.0), "no module", "did not run: no module"),
    ],
)
def test_a_verdict_is_by_the_target(ratio: float | None, target: PeerTarget, failure: str, verdict: str) -> None:
    assert judge(ratio, target, failure) == verdict


def test_a_peers_row_has_the_median_of_paired_rounds_and_its_target() -> None:
    taken = [turns(OURS, 100, 200, 400), turns(PLAIN_STREAMS, 50, 100, 100), turns(NIXL, failure="pip: no")]
    plain, nixl = peer_rows(LOSSY, taken)
    assert (plain.ours_over_peer, plain.rounds, plain.target, plain.verdict) == (2.0, "2 2 4", ">= 1.3", "reached")
    assert (nixl.ours_over_peer, nixl.peer_gbps, nixl.verdict) == (None, None, "did not run: pip: no")
    assert nixl.ours_gbps == plain.ours_gbps


def test_when_ours_fail_the_peers_rows_say_so() -> None:
    (row,) = peer_rows(LOSSY, [turns(OURS, failure="no connection"), turns(MOONCAKE, 3, 4)])
    assert row.verdict == "did not run: ours did not: no connection"


def test_a_peer_that_failed_later_keeps_the_rounds_it_has() -> None:
    (row,) = peer_rows(LOSSY, [turns(OURS, 100, 100), turns(MOONCAKE, 10, failure="no answer within 30 s")])
    assert (row.ours_over_peer, row.verdict) == (10.0, "reached")


def test_cpu_seconds_have_a_target_for_ours_alone() -> None:
    used = 0.6 * 1000 * (1 << 20) * 1e-9
    ours, plain, nixl = cpu_rows(
        [turns(OURS, 1000, cpu_s=used), turns(PLAIN_STREAM, 1000, cpu_s=used), turns(NIXL, failure="no module")]
    )
    assert (round(ours.cpu_s_per_gb or 0, 6), ours.target, ours.verdict) == (0.6, "<= 0.5", "MISSED")
    assert (plain.target, plain.verdict) == ("", "")
    assert nixl.verdict == "did not run: no module"


def test_a_pipelines_row_says_how_much_faster_and_whether_tokens_agree() -> None:
    pairs = [TokenPair(30.0, 90.0, True), TokenPair(50.0, 100.0, False), TokenPair(40.0, 100.0, True)]
    row = pipeline_row(PipelineTurns(3, 20.0, pairs))
    assert (row.ours_ms, row.vllm_ms, row.vllm_over_ours) == (40.0, 100.0, 2.5)
    assert (row.same_tokens, row.by_hand_before, row.verdict) == ("2 of 3", None, "reached")
    failed = pipeline_row(PipelineTurns(2, 50.0, failure="vLLM's pipeline: no answer within 150 s"))
    assert failed.verdict == "did not run: vLLM's pipeline: no answer within 150 s"
    assert (failed.by_hand_before, failed.target) == (2.9, ">= 2.9")


@pytest.mark.parametrize(("stages", "layers"), [(2, "4,4"), (3, "3,3,2"), (4, "2,2,2,2")])
def test_stages_share_the_layers_evenly(stages: int, layers: str) -> None:
    assert split_layers(stages) == layers


def test_changes_of_ours_and_etcd_are_paired() -> None:
    row = change_row(ChangeTimes([20.0, 40.0, 30.0], [40.0, 120.0, 75.0]))
    assert (row.ours_ms, row.etcd_ms, row.etcd_over_ours, row.verdict) == (30.0, 75.0, 2.5, "")
    assert (row.spread_ours, row.spread_etcd) == ("20-40", "40-120")


def test_without_etcd_ours_are_a_row_all_the_same() -> None:
    row = change_row(ChangeTimes([20.0], etcd_failure="no `etcd` on the PATH"))
    assert (row.ours_ms, row.etcd_ms, row.etcd_over_ours) == (20.0, None, None)
    assert row.verdict == "did not run: no `etcd` on the PATH"
    assert missed_lines(PeerFigures(changes=[row])) == ["etcd did not run: no `etcd` on the PATH."]
    assert change_row(ChangeTimes([], [50.0], "no port")).verdict == "did not run: ours did not: no port"


def measured() -> PeerFigures:
    slow = [turns(OURS, 100, cpu_s=0.2), turns(PLAIN_STREAM, 200, cpu_s=0.1), turns(NIXL, failure="no UCX")]
    return PeerFigures(
        links=peer_rows(LOOPBACK, slow),
        cpu=cpu_rows(slow),
        pipelines=[pipeline_row(PipelineTurns(2, 20.0, [TokenPair(50.0, 55.0, True)]))],
        circumstances=("Two cores.",),
    )


def test_what_was_missed_and_what_did_not_run_is_listed() -> None:
    assert missed_lines(measured()) == [
        "Missed: loopback, one connection, one plain TCP stream: 0.50 times its rate, target >= 0.7.",
        "Missed: CPU seconds per GB of ours: 1.91, target <= 0.5.",
        "Missed: 2 stages, 20 ms: 1.10 times as fast, target >= 2.3.",
        "NIXL did not run: no UCX.",
    ]


def test_the_page_says_what_is_emulated_what_was_missed_and_how_to_make_it_again(tmp_path: Path) -> None:
    page = make_page(measured())
    text = page.markdown()
    assert "\n    python -m p2pserve.sims.wan peers\n" in text
    assert "Links are emulated" in " ".join(text.split())
    assert "Two cores." in text
    assert "- Missed: CPU seconds per GB of ours" in text
    assert "| loopback, one connection | NIXL |  | 0 |  | 0.839 |  |  | 0.78 | >= 1.1 | did not run: no UCX |" in text
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("|"))
    write_page(page, tmp_path)
    tables = json.loads((tmp_path / "peers.json").read_text())["tables"]
    assert tables["Bytes over a link"][1]["ours_over_peer"] is None
    assert tables["Pipelines"][0]["vllm_over_ours"] == pytest.approx(1.1)


def test_a_part_that_was_not_asked_for_has_no_table() -> None:
    page = make_page(PeerFigures(pipelines=measured().pipelines))
    assert [table.title for table in page.tables] == ["Pipelines"]
    assert "- No target was missed." in make_page(PeerFigures(circumstances=("Nothing ran.",))).markdown()


def test_every_target_is_for_a_link_and_peer_that_are_compared() -> None:
    links = {figures.LOSSY, figures.LOSSLESS, figures.LOOPBACK}
    peers = {figures.NIXL, figures.MOONCAKE, figures.PLAIN_STREAM, figures.PLAIN_STREAMS}
    assert {link for link, _ in figures.TARGETS} == links
    assert {peer for _, peer in figures.TARGETS} == peers
