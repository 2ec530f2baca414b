"""`p2pserve rent` as its user sees it: answers, 80 columns, JSON, scripts, and one line for what is wrong."""

import json
import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from p2pserve.sdk.cli import main

DATA = Path(__file__).parents[2] / "coordinator" / "data"
VAST = str(DATA / "vast_offers.json")
DEADLINES = ("--slo", "ttft=4s,tpot=150ms")
ASKED = ("--budget", "3/h", "--model", "llama-30b", *DEADLINES, "--plans", "5", "--workload", "coding")


@pytest.fixture(scope="module")
def table() -> str:
    with redirect_stdout(StringIO()) as out:
        assert main(["rent", "--offers", VAST, *ASKED, "--hosted-usd-per-mtok", "0.6/2.4"]) == 0
    return out.getvalue()


def test_it_says_what_to_rent_and_how(table: str) -> None:
    assert "best within $3/h" in table
    assert "requests/s in time; links at their worst" in table
    assert "the API at $0.6/2.4 takes $" in table
    assert "Estimates: no box has been measured" in table
    offers = {str(record["id"]) for record in json.loads(Path(VAST).read_bytes())}
    rented = re.findall(r"^vastai create instance (\S+) ", table, re.MULTILINE)
    assert rented
    assert set(rented) <= offers


def test_all_but_the_commands_fits_80_columns(table: str) -> None:
    text = table.partition("\nto rent ")[0]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_broken_records_are_named(table: str) -> None:
    for line in ("record 34: gpu_ram: Expected", "record 48: dph_base: Expected", "record 42: num_gpus: Expected"):
        assert f"  broken: {line}" in table


def test_json_has_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = [*ASKED, "--rate", "0.2", "--format", "json", "--scripts", str(tmp_path / "out"), "--image", "me/p2pserve"]
    assert main(["rent", "--offers", VAST, *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budget_usd_per_hour"] == 3.0
    assert found["best"]["usd_per_hour"] <= 3.0
    assert set(found["best"]["plans"]) == {"pessimistic", "expected", "optimistic"}
    assert found["cheapest"]["usd_per_hour"] <= found["best"]["usd_per_hour"]
    assert found["best"]["usd_per_million_output"] > 0.0
    script = (tmp_path / "out" / "rent.sh").read_text()
    for box in found["cheapest"]["boxes"]:
        assert f"vastai create instance {box['offer']} --image me/p2pserve " in script
    assert (tmp_path / "out" / "onstart.sh").stat().st_mode & 0o100


def test_types_of_runpod_become_pods(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rent", "--offers", str(DATA / "runpod_gpu_types.json"), *ASKED]) == 0
    (line, *_) = re.findall(r"^runpodctl create pod .*$", capsys.readouterr().out, re.MULTILINE)
    words = shlex.split(line)
    assert words[words.index("--ports") + 1] == "4001/tcp"
    assert words[words.index("--args") + 1] == "join --port 4001"
    assert words[words.index("--gpuType") + 1].startswith("NVIDIA ")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--budget", "3/h", "--model", "llama-30b"], "offers: give --offers"),
        (["--offers", VAST], "budget: give --budget and --model"),
        (["--offers", "/no/such.json", *ASKED], "offers: /no/such.json cannot be read: No such file"),
        (["--offers", "/tmp", *ASKED], "offers: /tmp cannot be read: Is a directory"),
        (["--offers", VAST, *ASKED, "--budget", "3/week"], "'3/week' is no budget; write dollars per hour or per day"),
        (["--offers", VAST, *ASKED, "--budget", "0.01"], "budget: no offer costs at most $0.01/h; the cheapest is $"),
        (["--offers", VAST, *ASKED, "--slo", "ttft=1parsec"], "slo: 'ttft=1parsec' is neither like 5x nor like"),
        (["--offers", VAST, *ASKED, "--hosted-usd-per-mtok", "cheap"], "'cheap' is no price; write dollars per"),
        (["--offers", VAST, *ASKED, "--model", "llama-31b"], "llama-31b"),
        (["--offers", VAST, *ASKED, "--rate", "0"], "0 is not a number above 0"),
        (["--offers", VAST, *ASKED, "--min-reliability", "2"], "2 is not a share from 0 to 1"),
        (["--offers", VAST, *ASKED, "--cuda", "99"], "offers: none of "),
    ],
)
def test_what_is_wrong_is_one_line(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rent", *words]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1
