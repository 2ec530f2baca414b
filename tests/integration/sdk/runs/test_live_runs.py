"""A live run of emulated nodes beside its simulation: everything starts, is asked, harmed, simulated and compared.

How near they are depends on who else wants this machine's cores, so bounds are wide here; `docs/results/live.md` has
the figures of a quiet one.
"""

import json
import logging
from collections.abc import Iterator

import pytest

from p2pserve.sdk.live import comparison
from p2pserve.sdk.live.comparison_command import main

NODES = ["--nodes", "3", "--cards", "2xA40", "4xRTX A5000", "--model", "qwen2.5-32b", "--workload", "coding"]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command switches the log off for its process."""
    yield
    logging.disable(logging.NOTSET)


def test_a_calm_network_does_about_what_is_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "STEADY_REQUESTS", 400)
    main([*NODES, "--slo", "10x", "--load", "0.2", "--requests", "8", "--lead", "2", "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert found["failed"] == 0
    assert found["rate"] > 0.0
    assert "2xA40, 4xRTX A5000" in found["emulated"]
    for name in ("ttft_p50_s", "tpot_p50_s", "e2e_p50_s"):
        assert figures[name]["live"] > 0.4 * figures[name]["simulated"]  # of few requests, some take other routes
        assert figures[name]["live"] < 4.0 * figures[name]["simulated"]
        assert figures[name]["expected"] > 0.0
        assert figures[name]["steady"] > 0.0


def test_a_node_is_lost_and_started_again_in_both(capsys: pytest.CaptureFixture[str]) -> None:
    main([*NODES, "--slo", "10x", "--requests", "10", "--lose", "2@3", "--join", "2@6", "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    assert found["schedule"] == ["lose 2@3", "join 2@6"]
    assert found["plans"] >= 2
    (goodput,) = [figure for figure in found["figures"] if figure["counts"]]
    assert goodput["name"] == "goodput_requests_s"
    assert goodput["live"] > 0.0
    assert 0.5 < goodput["live"] / goodput["simulated"] < 2.0
    assert found["failed"] == 0
