"""`p2pserve demo --models`: one box, one process, two models, and nothing of it stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pserve.node.models import open_model

from ..test_demo import ROOT, environment, left_behind

pytestmark = pytest.mark.timeout(400)

COMMAND = [sys.executable, "-m", "p2pserve.sdk.cli", "demo", "--models", "--max-tokens", "24", "--format", "json"]


def test_two_models_of_one_process_answer_as_their_own_engines_do(tmp_path: Path) -> None:
    command = [*COMMAND, "--timeout-s", "200"]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env=environment(tmp_path), timeout=300, check=False)
    events = done.stderr.decode()
    assert done.returncode == 0, events
    report = json.loads(done.stdout)
    assert (report["ok"], report["problems"]) == (True, [])
    assert report["services"] == {name: open_model(name).info.service for name in ("bundled", "bundled-prose")}
    (pid,) = report["engine_pids"]
    assert pid != os.getpid()
    assert [(each["client"], each["model"]) for each in report["answers"]] == [
        (1, "bundled"),
        (1, "bundled"),
        (2, "bundled-prose"),
        (2, "bundled-prose"),
    ]
    for answer in report["answers"]:
        assert answer["identical_to_own_engine"]
        assert answer["tokens_agreeing"] == answer["completion_tokens"] > 0
        assert answer["prompt_tokens"] > 100
        assert answer["ttft_s"] > 0.0 < answer["tpot_s"]
    assert len({each["text"] for each in report["answers"]}) == 4
    assert f"both engines are in one process, {pid}" in events
    assert left_behind(tmp_path) == []
