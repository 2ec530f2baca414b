"""The scripts that rent and start boxes, run by a shell with programs that only note what they are told."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from p2pserve.sdk.cli import main
from p2pserve.sdk.rent import launch

pytestmark = pytest.mark.beside

OFFERS = Path(__file__).parents[1] / "unit" / "coordinator" / "data" / "vast_offers.json"
ONSTART = Path(launch.__file__).with_name("onstart.sh")


def shell(script: Path, programs: Path, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment: Mapping[str, str] = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), **variables}
    return subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("script", [ONSTART])
def test_bash_reads_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.stat().st_size < 4000  # vast.ai takes no longer ones


def test_a_box_starts_its_node(tmp_path: Path) -> None:
    program(tmp_path / "bin", "p2pserve", 'echo "$* model=$P2PSERVE_JOIN_MODEL home=$P2PSERVE_HOME"')
    ran = shell(
        ONSTART, tmp_path / "bin", tmp_path, P2PSERVE_BOOTSTRAP="p2p_worker_x", P2PSERVE_JOIN_MODEL="Qwen/Qwen3-8B",
        P2PSERVE_HOME=str(tmp_path / "kept"),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"join --port 4001 model=Qwen/Qwen3-8B home={tmp_path / 'kept'}\n"


@pytest.mark.parametrize("code", [2, 4])
def test_what_no_second_try_mends_ends_it(tmp_path: Path, code: int) -> None:
    program(tmp_path / "bin", "p2pserve", f"echo once; exit {code}")
    ran = shell(ONSTART, tmp_path / "bin", tmp_path, P2PSERVE_BOOTSTRAP="p2p_worker_x")
    assert (ran.returncode, ran.stdout) == (code, "once\n")


def test_a_node_that_fails_is_started_again(tmp_path: Path) -> None:
    program(tmp_path / "bin", "sleep", "true")  # no waiting here
    program(tmp_path / "bin", "p2pserve", f"echo try >>{tmp_path}/tries; [ $(wc -l <{tmp_path}/tries) -ge 3 ]")
    ran = shell(ONSTART, tmp_path / "bin", tmp_path, P2PSERVE_BOOTSTRAP="p2p_worker_x")
    assert ran.returncode == 0
    assert "again in 10 s" in ran.stderr


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, "P2PSERVE_BOOTSTRAP is not set"),
        ({"P2PSERVE_BOOTSTRAP": "x", "P2PSERVE_PORT": "70000"}, "P2PSERVE_PORT is '70000'"),
        ({"P2PSERVE_BOOTSTRAP": "x", "P2PSERVE_PORT": "$(id)"}, "P2PSERVE_PORT is '$(id)'"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, variables: dict[str, str], why: str) -> None:
    ran = shell(ONSTART, tmp_path, tmp_path, **variables)
    assert ran.returncode == 2
    assert why in ran.stderr


def test_the_token_is_in_no_argument_and_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    program(tmp_path / "bin", "p2pserve", "touch started")
    ran = shell(ONSTART, tmp_path / "bin", tmp_path, P2PSERVE_BOOTSTRAP="p2p_worker_secret", P2PSERVE_DRY_RUN="1")
    assert "would run: " in ran.stderr
    assert "secret" not in ran.stderr + ran.stdout
    assert not (tmp_path / "started").exists()


def test_renting_gives_each_box_a_token_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--budget", "3/h", "--model", "llama-30b", "--slo", "ttft=4s,tpot=150ms", "--plans", "8"]
    folder = tmp_path / "rented"
    assert main(["rent", "--offers", str(OFFERS), *asked, "--format", "json", "--scripts", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    note = tmp_path / "noted"
    program(tmp_path / "bin", "vastai", f'printf "%s\\n" "$@" >>{note}')
    told = """'{"token": "p2p_worker_%d"}'"""
    program(tmp_path / "bin", "p2pserve", f"echo x >>{tmp_path}/n; printf {told} $(wc -l <{tmp_path}/n)")
    ran = shell(folder / "rent.sh", tmp_path / "bin", tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = note.read_text()
    for number, box in enumerate(found["best"]["boxes"], start=1):
        assert f"\n{box['offer']}\n" in told
        assert f"-e P2PSERVE_BOOTSTRAP=p2p_worker_{number} -e P2PSERVE_JOIN_MODEL=llama-30b" in told
