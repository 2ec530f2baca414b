"""The same seed gives the same plan, however Python hashes strings: sets and dicts are gone through in that order."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 300.0
CLUSTER = {
    "name": "four",
    "boxes": [{"id": "a40", "gpu": "A40", "gpus": 2}, {"id": "ti", "gpu": "RTX 3090 Ti", "gpus": 2}],
    "default": {"gbps": 20},
}


def plan(cluster: Path, hash_seed: str) -> subprocess.Popen[bytes]:
    asked = ["--cluster", str(cluster), "--model", "llama-7b", "--workload", "coding", "--rate", "4"]
    return subprocess.Popen(
        [sys.executable, "-m", "p2pserve.sdk.cli", "plan", *asked, "--trials", "1", "--format", "json"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
    )


def test_the_same_seed_gives_the_same_plan_under_any_hash_seed(tmp_path: Path) -> None:
    cluster = tmp_path / "four.json"
    cluster.write_text(json.dumps(CLUSTER), encoding="utf-8")
    found: list[dict[str, Any]] = []
    for planning in [plan(cluster, seed) for seed in ("0", "1")]:
        said, _ = planning.communicate(timeout=LIMIT_S)
        assert planning.returncode == 0
        found.append(json.loads(said))
    assert all(each.pop("seconds") > 0.0 for each in found)
    assert found[0] == found[1]
    assert len(found[0]["services"][0]["plan"]["replicas"]) >= 2
