"""`python -m p2pserve.sims.wan peers`: what it takes, what it refuses, what it writes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pserve.sims.wan.__main__ import main
from p2pserve.sims.wan.peers import comparing
from p2pserve.sims.wan.peers.comparing import PeerComparison, PeerOptions
from p2pserve.sims.wan.peers.figures import LOOPBACK, PeerFigures, peer_rows
from p2pserve.sims.wan.peers.turns import OURS, MoveSample, TurnsTaken


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[PeerOptions]:
    """Options with which a comparison was made, which is not carried out."""
    found: list[PeerOptions] = []

    class QuickComparison:
        def __init__(self, options: PeerOptions, say: Callable[[str], None]) -> None:
            found.append(options)
            say("nixl: ready")

        def run(self) -> PeerFigures:
            ours, plain = TurnsTaken(OURS, {0: MoveSample(8, 1.0)}), TurnsTaken("NIXL", failure="no UCX")
            return PeerFigures(links=peer_rows(LOOPBACK, [ours, plain]), circumstances=("Links are emulated.",))

    monkeypatch.setattr(comparing, "PeerComparison", QuickComparison)
    return found


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--mib", "0"], "--mib 0: it must be from 1 to 4096"),
        (["--rounds", "51"], "--rounds 51: it must be from 1 to 50"),
        (["--seconds", "9"], "--seconds 9: it must be from 10 to 7200"),
        (["--seconds", "nan"], "--seconds nan: it must be from 10 to 7200"),
        (["--stages", "2,x"], "--stages '2,x': write numbers of stages as 2,3,4"),
        (["--stages", "1"], "--stages 1: a pipeline here has 2 to 8 stages"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    options: list[str], complaint: str, asked: list[PeerOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", *options, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"wan: error: {complaint}\n"
    assert asked == []
    assert not (tmp_path / "out").exists()


def test_options_say_what_is_compared(asked: list[PeerOptions], tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    options = ["--only", "links", "--mib", "64", "--rounds", "2", "--seconds", "60", "--stages", "2,4", "--no-install"]
    assert main(["peers", *options, "--folder", str(folder), "--out", str(tmp_path)]) == 0
    assert asked == [
        PeerOptions(
            parts=("links",), mib=64, rounds=2, seconds=60.0, stages=(2, 4), folder=folder, install=False
        )
    ]  # fmt: skip


@pytest.mark.parametrize("shape", ["table", "json"])
def test_a_page_its_rows_and_the_index_are_written(
    shape: str, asked: list[PeerOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", "--out", str(tmp_path), "--format", shape]) == 0
    said = capsys.readouterr()
    assert said.err == "nixl: ready\n"
    if shape == "json":
        assert json.loads(said.out)["experiment"] == "peers"
    else:
        assert "did not run: no UCX" in said.out
        assert "Links are emulated." in said.out
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "peers.md", "peers.json"}
    assert "(peers.md)" in (tmp_path / "README.md").read_text()


def test_a_folder_that_cannot_be_written_is_told_first(
    asked: list[PeerOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["peers", "--out", str(tmp_path / "file" / "results")]) == 1
    assert capsys.readouterr().err.startswith("wan: error: ")
    assert asked == []


def test_without_namespaces_each_row_of_a_link_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(comparing, "unavailable", lambda kind: "needs root")
    options = PeerOptions(parts=("links", "pipelines", "changes"), folder=tmp_path / "none", install=False, stages=(2,))
    said: list[str] = []
    found = PeerComparison(options, said.append).run()
    assert {row.verdict for row in found.links} == {"did not run: no emulated link: needs root"}
    assert [row.peer for row in found.links if "80 ms" in row.link] == [
        "16 plain TCP streams", "NIXL", "Mooncake", "ours over 16 streams", "rsync",
    ]  # fmt: skip
    assert {(row.rtt_ms, row.verdict) for row in found.pipelines} == {
        (20.0, "did not run: no emulated link: needs root"), (50.0, "did not run: no emulated link: needs root"),
    }  # fmt: skip
    assert [row.verdict for row in found.changes] == ["did not run: no emulated link: needs root"]
    assert any(line.startswith("nixl: not installed") for line in said)
