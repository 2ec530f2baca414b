"""`python -m p2pserve.sims.wan` and the traffic programs: what is printed, refused, and the exit codes."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest

from p2pserve.sims.wan import (
    EmulatedWan,
    Kind,
    LineStatistics,
    Scenario,
    ScenarioError,
    WanBox,
    WanError,
    WanPair,
    WanStatistics,
    calibrate,
    traffic,
)
from p2pserve.sims.wan import __main__ as command
from p2pserve.sims.wan.__main__ import main
from p2pserve.sims.wan.control import LineRow
from p2pserve.sims.wan.kv import alpha_beta, paths

TWO = Scenario(boxes={"paris": WanBox(), "nyc": WanBox()}, default=WanPair(rtt_ms=50))
LINE = LineStatistics(
    packets=9, bytes=2_500_000, lost=3, dropped=4, dead=5, waiting_bytes=0, queue_ms_mean=1.25, queue_ms_max=7.5
)


class HeldWan(EmulatedWan):
    """A network that only notes what it is told."""

    told: ClassVar[list[tuple[object, ...]]] = []

    def __init__(self, scenario: Scenario, *, kind: Kind | None = None) -> None:
        super().__init__(scenario, kind=kind)
        self.cannot_show = ("the moon", "the sun")

    def __enter__(self) -> Self:
        self.told.clear()
        return self

    def __exit__(self, *exc: object) -> None:
        self.told.append(("down",))

    def address(self, box: str) -> str:
        return f"at {box}"

    def command(self, box: str, argv: Sequence[str]) -> list[str]:
        return ["enter", box, *argv]

    def set_pair(self, a: str, b: str, *, both: bool = True, **changes: float | None) -> None:
        if "x" in changes:
            raise ScenarioError("WanPair has no field 'x'")
        self.told.append(("pair", a, b, changes))

    def set_box(self, box: str, **changes: float) -> None:
        self.told.append(("box", box, changes))

    def outage(self, a: str, b: str, seconds: float) -> None:
        self.told.append(("outage", a, b, seconds))

    def route(self, a: str, b: str, port: int) -> tuple[str, int]:
        return "127.0.0.1", port + 1

    def statistics(self) -> WanStatistics:
        return WanStatistics(
            kind="tun", elapsed_s=1, cpu_s=2.25, late_ms_mean=0.125, late_ms_max=4.5, strays=0, boxes={},
            rows=[LineRow("paris", "nyc", LINE)],
        )  # fmt: skip

    def popen(self, box: str, argv: Sequence[str], **options: Any) -> Any:
        self.told.append(("popen", box, list(argv)))
        return SimpleNamespace(wait=lambda: 7)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    monkeypatch.setattr(command, "EmulatedWan", HeldWan)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    return HeldWan.told


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "two.json"
    path.write_text(TWO.to_json())
    return str(path)


def run_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scenario: str, *lines: str
) -> list[str]:
    """What `run` answers to these lines of its input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["run", scenario, "--kind", "proxy"]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head == "proxy network of 2 boxes; cannot show:"
    assert rest[:2] == ["- the moon", "- the sun"]
    assert [line.split(":")[0] for line in rest[2:4]] == ["paris", "nyc"]
    return rest[4:]


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("pair paris nyc rtt_ms=200 loss=0.01", ("pair", "paris", "nyc", {"rtt_ms": 200.0, "loss": 0.01})),
        ("box paris up_gbps=0.1", ("box", "paris", {"up_gbps": 0.1})),
        ("outage paris nyc 2.5", ("outage", "paris", "nyc", 2.5)),
    ],
)
def test_a_line_changes_the_network_that_is_held(
    line: str,
    told: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scenario: str,
) -> None:
    assert run_lines(monkeypatch, capsys, scenario, line) == ["done"]
    assert HeldWan.told == [told, ("down",)]


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("", ""),
        ("pair paris nyc", "error: 'pair paris nyc' is no command: pair, box, outage, route, stats, quit (see --help)"),
        ("box paris", "error: 'box paris' is no command"),
        ("outage paris nyc", "error: 'outage paris nyc' is no command"),
        ("outage paris nyc soon", "error: SECONDS: 'soon' is no number"),
        ("pair paris nyc rtt_ms=fast", "error: rtt_ms: 'fast' is no number"),
        ("pair paris nyc rtt_ms", "error: rtt_ms: '' is no number"),
        ("pair paris nyc x=1", "error: WanPair has no field 'x'"),
        ("route paris nyc port", "error: PORT: 'port' is no number"),
        ("route paris nyc 80", "127.0.0.1:81"),
        ("reboot", "error: 'reboot' is no command"),
    ],
)
def test_a_line_that_cannot_be_is_answered_and_the_network_stays(
    line: str, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    first, second = run_lines(monkeypatch, capsys, scenario, line, "outage paris nyc 0")
    assert first.startswith(answer)
    assert second == "done"


@pytest.mark.usefixtures("held")
def test_quit_ends_it_before_the_input_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    assert run_lines(monkeypatch, capsys, scenario, "quit", "outage paris nyc 1") == []
    assert HeldWan.told == [("down",)]


@pytest.mark.usefixtures("held")
def test_stats_have_a_line_for_each_direction(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    _, line, last = run_lines(monkeypatch, capsys, scenario, "stats")
    assert line.split() == ["paris", "->", "nyc", "2.5", "3", "4", "5", "1.2", "7.5"]
    assert last == "late 0.12 ms, at most 4.5; CPU 2.2 s"


@pytest.mark.usefixtures("held")
def test_a_command_in_a_box_ends_with_its_own_exit_code(scenario: str) -> None:
    assert main(["run", scenario, "--in", "nyc", "--", "ping", "--in", "x"]) == 7
    assert HeldWan.told == [("popen", "nyc", ["ping", "--in", "x"]), ("down",)], "what follows -- is not ours to parse"


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("options", [["--in", "nyc"], ["--", "ls"]])
def test_a_box_without_a_command_and_a_command_without_a_box_are_refused(
    options: list[str], scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", scenario, *options]) == 2
    assert capsys.readouterr().err == "wan: error: --in BOX and -- COMMAND go together\n"


def test_a_scenario_that_is_not_there_or_not_right_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{}")
    assert main(["run", str(tmp_path / "bad.json")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("wan: error: the scenario is not right")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("reason", "says"), [(None, "tun: runs here"), ("needs root", "tun: needs root")])
def test_check_says_which_kinds_run_here(
    reason: str | None, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("p2pserve.sims.wan.namespaces.unavailable", lambda: reason)
    assert main(["check"]) == 0
    assert capsys.readouterr().out.splitlines() == [says, "proxy: runs here"]


@pytest.mark.parametrize("link", ["paris-nyc", "paris=transatlantic", "paris-nyc="])
def test_a_sketch_of_something_else_is_refused(link: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sketch", link]) == 2
    assert capsys.readouterr().err == f"wan: error: {link!r} is no link: write it as paris-nyc=transatlantic\n"


def test_classes_are_given_to_programs_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classes", "--format", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["transatlantic"]["rtt_ms"] == 90


@pytest.mark.parametrize(("measured", "code"), [(1.0, 0), (2.0, 1)])
@pytest.mark.parametrize("shape", ["table", "json"])
def test_calibrate_ends_with_1_where_a_figure_is_out_of_its_tolerance(
    measured: float, code: int, shape: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = calibrate.CalibrationRow(what="rate", unit="Gb/s", expected=1.0, measured=measured, tolerance=0.1)
    found = calibrate.Calibration(kind="tun", cannot_show=(), rows=(row,), late_ms_mean=0, late_ms_max=0)
    monkeypatch.setattr(calibrate, "calibrate", lambda kind: found)
    assert main(["calibrate", "--format", shape]) == code
    out = capsys.readouterr().out
    assert (json.loads(out)["ok"] is (code == 0)) if shape == "json" else (("NOT" in out) is (code == 1))


def case(name: str, *, ok: bool) -> paths.PathCase:
    return paths.PathCase(
        name=name, kind="proxy", what="w", target="t", chosen="direct", seconds=1.0, gbps=1.0, compared_with="c",
        compared_s=2.0, usd=0.0, by_path={}, figures={}, why=(), ok=ok,
    )  # fmt: skip


@pytest.mark.parametrize(("second", "code"), [(True, 0), (False, 1)])
def test_paths_tell_of_each_case_as_it_is_done(
    second: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Sequence[str]] = []

    def run_cases(names: Sequence[str], *, kind: Kind | None) -> list[paths.PathCase]:
        asked.append(names)
        return [case("a", ok=True), case("b", ok=second)]

    monkeypatch.setattr(paths, "run_cases", run_cases)
    assert main(["paths", "--format", "json", "--case", "b", "--case", "a"]) == code
    said = capsys.readouterr()
    assert [row["ok"] for row in json.loads(said.out)] == [True, second]
    assert ("(b) w: NOT as it must be" in said.err) is not second
    assert main(["paths"]) == code
    assert asked == [["b", "a"], tuple(paths.CASES)]


@pytest.mark.parametrize("shape", ["table", "json"])
def test_the_alpha_beta_model_is_told_row_by_row_and_becomes_a_page(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    row = alpha_beta.AlphaBetaRow(
        emulated_by="proxy", rtt_ms=90.0, link_gbps=1.0, probed_rtt_ms=90.0, probed_gbps=0.9, streams=7, mib=16,
        prompt_tokens=37, seconds=0.25, estimated_s=0.2, over_estimate=1.25, spread="0.25-0.25",
    )  # fmt: skip
    asked: list[Kind | None] = []

    def measure_links(kind: Kind | None) -> list[alpha_beta.AlphaBetaRow]:
        asked.append(kind)
        return [row]

    monkeypatch.setattr(alpha_beta, "measure_links", measure_links)
    folder = tmp_path / "results"
    assert main(["alpha-beta", "--kind", "proxy", "--out", str(folder), "--format", shape]) == 0
    said = capsys.readouterr()
    assert asked == ["proxy"]
    assert "90 ms, 1 Gb/s, 16 MiB: 0.250 s, 1.25 of the estimate" in said.err
    assert (json.loads(said.out)["experiment"] == "alpha-beta") if shape == "json" else ("| proxy | 90 |" in said.out)
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "alpha-beta.md", "alpha-beta.json", "alpha-beta.png",
    }  # fmt: skip


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alpha_beta, "measure_links", lambda kind: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    assert main(["alpha-beta", "--out", str(tmp_path / "file" / "results")]) == 1
    assert capsys.readouterr().err.startswith("wan: error: ")


def test_what_fails_at_run_time_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(kind: Kind | None) -> calibrate.Calibration:
        raise WanError("the emulator has ended")

    monkeypatch.setattr(calibrate, "calibrate", fail)
    assert main(["calibrate"]) == 1
    assert capsys.readouterr().err == "wan: error: the emulator has ended\n"

    def interrupt(kind: Kind | None) -> calibrate.Calibration:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "calibrate", interrupt)
    assert main(["calibrate"]) == 130


RUNNING = {"p2pwan-5-nyc": (5, "nyc"), "p2pwan-5-paris": (5, "paris"), "p2pwan-8-nyc": (8, "nyc")}


@pytest.mark.parametrize(
    ("running", "box", "says"),
    [
        ({}, "nyc", "there is no box 'nyc' here: no network is running"),
        (RUNNING, "rome", "there is no box 'rome' here: nyc, paris"),
        (RUNNING, "nyc", "`ip netns exec` with one of p2pwan-5-nyc, p2pwan-8-nyc"),
    ],
)
def test_exec_names_the_boxes_there_are(
    running: dict[str, tuple[int, str]],
    box: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("p2pserve.sims.wan.namespaces.running", lambda: running)
    assert main(["exec", box]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("options", "argv"), [(["--", "ls", "-l"], ["ls", "-l"]), ([], ["/bin/fish"])])
def test_exec_runs_the_command_or_a_shell(options: list[str], argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(line: list[str], *, check: bool) -> SimpleNamespace:
        ran.append(line)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr("p2pserve.sims.wan.namespaces.running", lambda: RUNNING)
    monkeypatch.setenv("SHELL", "/bin/fish")
    monkeypatch.setattr("subprocess.run", run)
    assert main(["exec", "paris", *options]) == 3
    assert ran == [["ip", "netns", "exec", "p2pwan-5-paris", *argv]]


@pytest.mark.parametrize(("removed", "says"), [([], "nothing was left\n"), (["a", "b"], "removed a\nremoved b\n")])
def test_clean_says_what_it_removed(
    removed: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("p2pserve.sims.wan.namespaces.sweep", lambda: removed)
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == says


@pytest.mark.parametrize("argv", [[], ["dance"], ["echo", "host"], ["ping", "host", "80", "5", "6"]])
def test_a_traffic_program_without_its_arguments_explains_itself(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert traffic.main(argv) == 2
    assert "traffic ping HOST PORT COUNT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "called"),
    [
        (["receive", "h", "80", "4", "2.5"], ("h", 80, 4, 2.5)),
        (["send", "h", "80", "4", "2.5"], ("h", 80, 4, 2.5)),
        (["echo", "h", "80"], ("h", 80)),
        (["ping", "h", "80", "30"], ("h", 80, 30)),
        (["count", "h", "80"], ("h", 80)),
        (["datagrams", "h", "80", "9"], ("h", 80, 9)),
    ],
)
def test_a_traffic_program_gets_its_arguments_as_what_they_are(
    argv: list[str], called: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    _, kinds = traffic.ROLES[argv[0]]
    monkeypatch.setitem(traffic.ROLES, argv[0], (lambda *given: calls.append(given), kinds))
    assert traffic.main(argv) == 0
    assert calls == [called]
