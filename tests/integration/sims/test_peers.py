"""Ours beside plain TCP and vLLM's pipeline, for real but short; peers that do not start are rows."""

import shutil
import sys
from pathlib import Path

import pytest

from p2pserve.sims.wan import EmulatedWan, Scenario, WanBox, WanPair, unavailable
from p2pserve.sims.wan.peers.changes import MEMBERS, NO_ETCD, RTT_MS, measure_changes
from p2pserve.sims.wan.peers.comparing import PeerComparison, PeerOptions
from p2pserve.sims.wan.peers.environment import PeerEnvironment
from p2pserve.sims.wan.peers.figures import LOOPBACK, MOONCAKE, NIXL, PLAIN_STREAM
from p2pserve.sims.wan.peers.movers import library_contender, our_contender, raw_contender
from p2pserve.sims.wan.peers.pipelines import RTTS_MS, measure_pipelines
from p2pserve.sims.wan.peers.programs import LoopbackSite, PeerFailed, PeerProgram, WanSite
from p2pserve.sims.wan.peers.turns import OURS, take_turns

needs_tun = pytest.mark.skipif(unavailable("tun") is not None, reason=f"no TUN emulation here: {unavailable('tun')}")


def program(code: str) -> PeerProgram:
    return PeerProgram(LoopbackSite(), "send", [sys.executable, "-c", code], {})


@needs_tun
def test_ours_and_plain_streams_move_the_same_bytes_over_an_emulated_link() -> None:
    box = WanBox(up_gbps=0.5, down_gbps=0.5)
    scenario = Scenario(boxes={"paris": box, "nyc": box}, pairs={("paris", "nyc"): WanPair(rtt_ms=20)})
    with EmulatedWan(scenario, kind="tun") as wan:
        site = WanSite(wan, "paris", "nyc")
        contenders = [our_contender(site, 4), raw_contender(site, 4)]
        taken = take_turns(contenders, mib=16, rounds=2, seconds=30.0, say=lambda line: None)
        passed = wan.statistics().lines["paris", "nyc"].bytes
    assert [(turns.failure, sorted(turns.samples)) for turns in taken] == [("", [0, 1])] * 2
    for turns in taken:
        for sample in turns.samples.values():
            assert sample.mib == 16
            assert 0 < sample.gbps < 0.55  # what the link carries, and what its idle time has saved
    assert passed > 2 * 2 * 2 * 16 << 20  # contenders, rounds, warm and timed


def test_over_loopback_peers_that_are_not_installed_are_rows_with_their_reasons(tmp_path: Path) -> None:
    options = PeerOptions(parts=("loopback",), mib=16, rounds=1, seconds=10.0, folder=tmp_path / "x", install=False)
    found = PeerComparison(options, lambda line: None).run()
    verdicts = {row.peer: row.verdict for row in found.links}
    assert set(verdicts) == {PLAIN_STREAM, NIXL, MOONCAKE}
    assert verdicts[NIXL].startswith("did not run: not installed")
    assert verdicts[MOONCAKE].startswith("did not run: not installed")
    (plain,) = (row for row in found.links if row.peer == PLAIN_STREAM)
    assert plain.link == LOOPBACK
    assert plain.ours_over_peer is not None
    used = {row.contender: row.cpu_s_per_gb for row in found.cpu}
    assert (used[OURS] or 0) > 0
    assert (used[PLAIN_STREAM] or 0) > 0


def test_a_library_that_cannot_be_imported_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    peers = PeerEnvironment(tmp_path, install=False)
    contender = library_contender(LoopbackSite(), "mooncake", MOONCAKE, peers, "")
    (turns,) = take_turns([contender], mib=1, rounds=2, seconds=10.0, say=lambda line: None)
    assert turns.samples == {}
    assert turns.failure == "ModuleNotFoundError: No module named 'mooncake'"


def test_a_program_that_ends_is_silent_or_is_not_there_is_a_reason(tmp_path: Path) -> None:
    with program("import sys; sys.exit('no licence')") as ended, pytest.raises(PeerFailed, match=r"^no licence$"):
        ended.answer(30.0)
    with program("raise SystemExit(7)") as failed, pytest.raises(PeerFailed, match=r"^ended with exit code 7$"):
        failed.answer(30.0)
    with program("print('warning: old driver')") as chatty, pytest.raises(PeerFailed, match="no answer: warning"):
        chatty.answer(30.0)
    with program("input()") as silent, pytest.raises(PeerFailed, match=r"^no answer within 0 s$"):
        silent.answer(0.1)
    with pytest.raises(PeerFailed, match="No such file"):
        PeerProgram(LoopbackSite(), "send", [str(tmp_path / "none")], {})


@needs_tun
def test_all_members_know_a_change_after_half_a_round_trip_also_where_there_is_no_etcd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found_program = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "etcd" else found_program(name))
    times = measure_changes(1, lambda line: None)
    assert (times.etcd_ms, times.etcd_failure, times.ours_failure) == ([], NO_ETCD, "")
    assert len(times.ours_ms) == MEMBERS
    assert min(times.ours_ms) >= RTT_MS / 2


@needs_tun
@pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here")
def test_an_etcd_cluster_over_the_same_links_is_timed_as_well() -> None:
    times = measure_changes(1, lambda line: None)
    assert (times.etcd_failure, times.ours_failure) == ("", "")
    assert len(times.etcd_ms) == MEMBERS
    assert min(times.etcd_ms) >= RTT_MS / 2


@needs_tun
def test_both_pipelines_give_the_same_tokens_and_wait_for_the_link() -> None:
    said: list[str] = []
    found = list(measure_pipelines(2, pairs=1, tokens=4, seconds=1.0, say=said.append))
    assert [(turns.rtt_ms, turns.failure) for turns in found] == [(rtt_ms, "") for rtt_ms in RTTS_MS]
    for turns in found:
        (pair,) = turns.pairs
        assert pair.same
        assert min(pair.ours_ms, pair.vllm_ms) >= turns.rtt_ms
    assert said[0] == "2 stages of both are up"
