"""`p2pserve provision`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2pserve.sdk.cli import main
from p2pserve.sdk.options.provision import slowdowns

QUICK = ["provision", "--model", "llama2-70b", "--workload", "coding", "--seconds", "10"]
RATE = ["--rate", "20"]


def test_the_cheapest_clusters_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *RATE, "--design", "HA", "--design", "baseH"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == ("llama2-70b, coding: the least cost at 20 requests/s; simulated, 10 s of arrivals, seed 0")
    assert "times measured, prices by table1, slowdowns below ttft 2/3/6, tbt 1.25/1.5/5, e2e 1.25/1.5/5" in lines[1]
    assert lines[2].split()[:3] == ["design", "machines", "requests/s"]
    assert lines[3].startswith("HA")
    assert "P, " in lines[3]
    assert lines[4].startswith("baseH")
    assert "HA: " in err, "what is being simulated is told meanwhile"


def test_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*QUICK, *RATE, "--design", "HH", "--goal", "power", "--cost-ratio", "table5", "--format", "json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert (found["simulated"], found["goal"], found["cost_ratio"], found["seconds"]) == (True, "power", "table5", 10.0)
    (design,) = found["designs"]
    cluster = design["found"]
    machines = cluster["prompt_machines"], cluster["token_machines"]
    assert cluster["kw"] == pytest.approx(sum(machines) * 5.6)
    assert cluster["usd_per_h"] == pytest.approx(17.6 * (2.35 * machines[0] + 2.5 * machines[1]))
    assert all(cluster["slowdowns"][f"ttft_p{p}"] < limit for p, limit in zip((50, 90, 99), (2, 3, 6), strict=True))
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_the_highest_rate_within_a_budget_and_looser_slos(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*QUICK, "--goal", "throughput", "--max-kw", "34", "--rate-step", "10", "--design", "HH"]
    rates = []
    for slo in ([], ["--slo", "ttft=9/9/9,tbt=9/9/9,e2e=9/9/9"]):
        assert main([*arguments, *slo, "--format", "json"]) == 0
        (design,) = json.loads(capsys.readouterr().out)["designs"]
        assert design["found"]["kw"] <= 34.0
        rates.append(design["found"]["requests_s"])
    assert 0.0 < rates[0] < rates[1]


def test_cards_of_the_gpu_table_with_lengths_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt,output\n300,20\n600,50\n")
    arguments = ["provision", "--model", "llama-7b", "--workload", str(lengths), "--rate", "4", "--seconds", "20"]
    loose = ["--slo", "ttft=30/40/60,tbt=20/20/30,e2e=20/20/30", "--design", "1xA40/1xA6000", "--design", "1xA40"]
    assert main([*arguments, *loose]) == 0
    out = capsys.readouterr().out
    assert "lengths.csv" in out
    assert "\n1xA40/1xA6000  1P, 1T" in out
    assert main([*arguments, "--design", "1xT4"]) == 1, "nothing was found"
    assert "1xT4: no cluster within the limits meets every SLO at 4 requests/s; the largest misses " in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["provision"], "model: give --model and --workload"),
        (QUICK, "rate: the goal cost needs --rate, the requests/s to be served"),
        ([*QUICK, *RATE, "--workload", "chat"], "workload: 'chat' is neither a file nor one of coding, conversation"),
        ([*QUICK, *RATE, "--model", "gpt-5"], "model 'gpt-5' is not known"),
        ([*QUICK, *RATE, "--model", "llama-30b"], "machine A: perf_model.csv has no llama-30b"),
        ([*QUICK, *RATE, "--design", "HZ"], "design: 'HZ' is none of baseA"),
        ([*QUICK, "--rate", "1e8"], "rate: 1e+08 requests/s for 10 s are more than 200,000 requests"),
        ([*QUICK, *RATE, "--seconds", "99999"], "seconds: 99999 is more than 3600"),
        ([*QUICK, *RATE, "--slo", "tbt=fast"], "'tbt=fast' is not like tbt=1.25/1.5/5"),
        ([*QUICK, *RATE, *(f"--design={cards}xA40" for cards in range(1, 17)),
          *(f"--design=H/{cards}xA40" for cards in range(4, 17))], "design: 29 of them; give at most 24"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


@pytest.mark.parametrize("text", ["", "tbt", "tbt=1/2", "tbt=1/2/x", "tbt=1/2/nan", "tbt=0/1/2", "tpot=1/2/3"])
def test_slos_that_are_none(text: str) -> None:
    with pytest.raises(Exception, match="is not like tbt="):
        slowdowns(text)


def test_slos_are_read() -> None:
    assert slowdowns("tbt=1.5/2/5, ttft=3/4/9") == {"tbt": (1.5, 2.0, 5.0), "ttft": (3.0, 4.0, 9.0)}
    with pytest.raises(Exception, match="tbt is there twice"):
        slowdowns("tbt=1/2/3,tbt=1/2/3")
