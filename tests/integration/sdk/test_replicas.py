"""One `join` that runs two nodes, as processes with emulated engines: asked, killed, drained, and told to leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from p2pserve import Client
from p2pserve.node.box.home import running_pid
from p2pserve.node.messages import NodeStatus
from p2pserve.sdk.cli import main

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

WAIT_S = 120.0
JOIN = ("--emulate", "4xA40", "--model", "llama-7b", "--listen", "127.0.0.1:0", "--replicas", "2", "--format", "json")


class Command:
    """A running `p2pserve`; what it prints goes to files."""

    def __init__(self, folder: Path, *arguments: str, token: str = "") -> None:
        self.out, self.err = folder / f"{arguments[0]}.out", folder / f"{arguments[0]}.err"
        environment = {**os.environ, "P2PSERVE_CONFIG": os.devnull, **({"P2PSERVE_BOOTSTRAP": token} if token else {})}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "p2pserve.sdk.cli", *arguments],
                stdout=out, stderr=err, env=environment, start_new_session=True,
            )  # fmt: skip

    def greetings(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def wait_until(holds: Callable[[], bool], command: Command) -> None:
    give_up = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < give_up, command.err.read_text()
        assert command.process.poll() is None, command.err.read_text()
        time.sleep(0.1)


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Those of a network that runs."""
    first = Command(tmp_path, "bootstrap", "--home", str(tmp_path / "b"), "--listen", "127.0.0.1:0", "--format", "json")
    try:
        wait_until(lambda: bool(first.greetings()), first)
        yield first.greetings()[0]["tokens"]
    finally:
        first.end()


def ready(client: Client) -> list[NodeStatus]:
    """Nodes with an engine that serves."""
    return [
        node
        for node in client.status().nodes
        if node.state == "alive" and node.advert is not None and node.advert.engine is not None
        and node.advert.engine.state == "ready"
    ]  # fmt: skip


def test_two_nodes_of_a_box_serve_are_started_again_and_leave_together(
    tmp_path: Path, tokens: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "n"
    box = Command(
        tmp_path, "join", "--home", str(home), "--http", "127.0.0.1:0", "--drain-s", "5", *JOIN, token=tokens["worker"]
    )
    try:
        wait_until(lambda: len(box.greetings()) == 2, box)
        one, two = box.greetings()
        assert (one["node"], two["node"]) == ("node", "node-2")
        assert ("http" in one, "http" in two) == (True, False)
        with closing(Client(tokens["client"])) as client:
            wait_until(lambda: len(ready(client)) == 2, box)
            nodes = ready(client)
            assert {node.peer for node in nodes} == {one["peer"], two["peer"]}
            assert [len(node.advert.hardware.gpus) for node in nodes if node.advert is not None] == [2, 2]
            assert client.generate("def fibonacci(n):", max_tokens=4).text

            killed = running_pid(home / "node-2")
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: len(box.greetings()) == 3, box)
            assert box.greetings()[2]["peer"] == two["peer"]  # the same folder, so the same node
            assert "node-2 | ended by signal 9; starts again in 1 s" in box.err.read_text()
            wait_until(lambda: len(ready(client)) == 2, box)

            assert main(["drain", "--home", str(home), "--format", "json"]) == 0
            drained = json.loads(capsys.readouterr().out)
            assert [each["draining"] for each in drained["nodes"]] == [True, True]
            assert main(["drain", "--home", str(home), "--undo"]) == 0
        assert main(["leave", "--home", str(home)]) == 0
        assert "node, node-2 of this box have left their network" in capsys.readouterr().out
        assert box.process.wait(30) == 0
        assert running_pid(home / "node") is None
        assert running_pid(home / "node-2") is None
    finally:
        box.end()


def test_a_signal_lets_all_nodes_leave_and_so_does_the_end_of_their_parent(
    tmp_path: Path, tokens: dict[str, str]
) -> None:
    home = tmp_path / "n"
    for number in (signal.SIGINT, signal.SIGKILL):
        box = Command(tmp_path, "join", "--home", str(home), *JOIN, token=tokens["worker"])
        try:
            wait_until(lambda box=box: len(box.greetings()) == 2, box)  # type: ignore[misc]
            box.process.send_signal(number)
            assert box.process.wait(60) == (0 if number is signal.SIGINT else -signal.SIGKILL)
            give_up = time.monotonic() + WAIT_S
            while running_pid(home / "node") is not None or running_pid(home / "node-2") is not None:
                assert time.monotonic() < give_up
                time.sleep(0.1)
        finally:
            box.end()


def test_what_is_wrong_with_all_is_said_once_with_its_exit_code(tmp_path: Path, tokens: dict[str, str]) -> None:
    options = ["--emulate", "2xA40", "--model", "nonesuch", "--replicas", "2", "--home", str(tmp_path / "n")]
    box = Command(tmp_path, "join", *options, token=tokens["worker"])
    try:
        assert box.process.wait(60) == 2
        said = [line for line in box.err.read_text().splitlines() if "nonesuch" in line]
        assert len(said) == 1
        assert said[0].startswith("p2pserve: error: node: emulated model 'nonesuch' is not known")
    finally:
        box.end()
