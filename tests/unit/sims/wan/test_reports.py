"""What calibration and the cases of path choice say of figures that are right, and of those that are not."""

import json

import msgspec
import pytest

from p2pserve.sims.wan import calibrate
from p2pserve.sims.wan.__main__ import main
from p2pserve.sims.wan.kv import paths
from p2pserve.sims.wan.kv.kvnetwork import Moved
from p2pserve.sims.wan.kv.orders import TransferState


def row(measured: float) -> calibrate.CalibrationRow:
    return calibrate.CalibrationRow(what="one stream", unit="Gb/s", expected=0.225, measured=measured, tolerance=0.15)


@pytest.mark.parametrize(("measured", "ok"), [(0.225, True), (0.195, True), (0.25, True), (0.19, False), (0.26, False)])
def test_a_figure_is_right_within_its_tolerance(measured: float, ok: bool) -> None:
    calibration = calibrate.Calibration(
        kind="tun", cannot_show=("the moon",), rows=(row(0.225), row(measured)), late_ms_mean=0.1, late_ms_max=3.0
    )
    assert calibration.ok is ok
    text = calibrate.table(calibration)
    assert ("NOT within 15%" in text) is not ok
    assert "emulated by: tun" in text
    assert "- the moon" in text
    document = json.loads(calibration.to_json())
    assert document["ok"] is ok
    assert [one["ok"] for one in document["rows"]] == [True, ok]


def state(seconds: float, by_path: dict[str, int], name: str = "delivered") -> TransferState:
    size = sum(by_path.values())
    return TransferState(
        state=name, reason="", seconds=seconds, bytes=size, acknowledged=size, resent=0, by_path=by_path
    )


def test_what_has_moved_is_added_up() -> None:
    moved = Moved((state(1.0, {"direct": 5_000_000}), state(2.0, {"direct": 1_000_000, "via london": 4_000_000})))
    assert (moved.seconds, moved.bytes) == (2.0, 10_000_000)
    assert moved.gbps == pytest.approx(0.04)
    assert moved.by_path == {"direct": 6_000_000, "via london": 4_000_000}
    assert moved.delivered
    assert not Moved((state(1.0, {}), state(1.0, {}, "open"))).delivered


def case(name: str, *, ok: bool) -> paths.PathCase:
    return paths.PathCase(
        name=name,
        kind="proxy",
        what="direct 0.1 Gb/s",
        target="3x faster",
        chosen="via london",
        seconds=0.5,
        gbps=1.0,
        compared_with="direct",
        compared_s=2.0,
        usd=0.002,
        by_path={"via london": 62_500_000},
        figures={"changes": 2.0},
        why=("via london taken", "direct slower"),
        ok=ok,
    )


def test_the_table_of_cases_says_what_missed_its_target_and_why_a_path_was_taken() -> None:
    text = paths.table([case("d", ok=False), case("b", ok=True)])
    first, _, b, d, *rest = text.splitlines()
    assert "emulated network (proxy)" in first
    assert b.startswith("(b)")
    assert "4.0x  3x faster" in b
    assert "MISSED: 3x faster" in d
    assert "(d) 62 MB via london, $0.0020; changes 2" in rest
    assert "    direct slower" in rest
    read = msgspec.json.decode(msgspec.json.encode([case("b", ok=True)]), type=list[paths.PathCase])
    assert read[0].times_faster == 4


def test_both_networks_of_the_cases_have_what_the_cases_need() -> None:
    good, thin = paths.good_links(), paths.thin_direct()
    for scenario in (good, thin):
        assert set(scenario.boxes) == {paths.SOURCE, paths.TARGET, paths.RELAY}
    assert good.pair(paths.SOURCE, paths.TARGET).gbps == good.pair(paths.RELAY, paths.TARGET).gbps == 1.5
    assert thin.pair(paths.SOURCE, paths.TARGET).gbps == 0.03
    assert thin.pair(paths.SOURCE, paths.RELAY).gbps is None
    assert {box.up_gbps for box in thin.boxes.values()} == {2.0}
    assert set(paths.CASES) == set("abcde")


def test_a_sketch_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sketch", "paris-nyc=transatlantic"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][0]["rtt_ms"] == 90
    assert main(["sketch", "paris-nyc"]) == 2
    assert capsys.readouterr().err == "wan: error: 'paris-nyc' is no link: write it as paris-nyc=transatlantic\n"
    assert main(["classes"]) == 0
    assert "transatlantic" in capsys.readouterr().out
