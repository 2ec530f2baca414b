"""Nodes as processes on the boxes of an `Internet`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .routers import Internet

ROOT = Path(__file__).resolve().parents[4]
COMMAND = (sys.executable, "-m", "p2pserve.sdk.cli")
WAIT_LIMIT_S = 120.0  # for what takes seconds, unless the machine is very busy
EMULATED = ("--emulate", "2xL4", "--model", "qwen2-7b")


class Nodes:
    """A network of processes; `start` begins with the box that makes it, all end with the block."""

    def __init__(self, internet: Internet, home: Path) -> None:
        self.internet = internet
        self._home = home
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.tokens: dict[str, str] = {}

    def bootstrap(self, box: str, *options: str) -> None:
        """Make the network on a box."""
        greeting = self.start(box, "bootstrap", *options)
        self.tokens = greeting["tokens"]

    def join(self, box: str, *options: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
        """A box that emulates an engine joins; returns its greeting."""
        token = self.tokens["worker"]
        return self.start(box, "join", "--bootstrap", token, *EMULATED, *options, environ=environ)

    def start(self, box: str, command: str, *options: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
        """Run a node until the end; returns its greeting."""
        arguments = (command, "--format", "json", "--home", str(self._home / box), *options)
        with (self._home / f"{box}.out").open("wb") as out, (self._home / f"{box}.err").open("wb") as err:
            self._running[box] = subprocess.Popen(
                self.internet.command(box, [*COMMAND, *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env=_environment() | (environ or {}),
            )
        self.until(lambda: b"\n" in (self._home / f"{box}.out").read_bytes() or self._has_ended(box))
        said = (self._home / f"{box}.out").read_bytes()
        assert said, self.said(box)
        found: dict[str, Any] = json.loads(said)
        return found

    def said(self, box: str) -> str:
        """What its owner has been told."""
        return (self._home / f"{box}.err").read_text()

    def ask(self, box: str, *arguments: str, environ: dict[str, str] | None = None) -> Any:
        """What a command of a client on a box prints, as JSON."""
        command = [*COMMAND, *arguments, "--format", "json", "--bootstrap", self.tokens["client"]]
        own = {"P2PSERVE_HOME": str(self._home / f"client-{box}"), **(environ or {})}
        done = subprocess.run(
            self.internet.command(box, command),
            capture_output=True,
            cwd=ROOT,
            env=_environment() | own,
            timeout=WAIT_LIMIT_S,
            check=False,
        )
        assert done.stdout, done.stderr.decode()
        return json.loads(done.stdout)

    def addresses(self, box: str) -> dict[str, str]:
        """Where a client on a box sees the members: peer -> address."""
        return {node["peer"]: node["address"] for node in self.ask(box, "status")["nodes"]}

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds, which takes seconds."""
        give_up = time.monotonic() + WAIT_LIMIT_S
        while not condition():
            assert time.monotonic() < give_up, {box: self.said(box) for box in self._running}
            time.sleep(0.1)

    def stop(self) -> None:
        """End all of them."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(WAIT_LIMIT_S / 4)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _has_ended(self, box: str) -> bool:
        return self._running[box].poll() is not None


@contextmanager
def open_nodes(internet: Internet, home: Path) -> Iterator[Nodes]:
    """No nodes yet."""
    nodes = Nodes(internet, home)
    try:
        yield nodes
    finally:
        nodes.stop()


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("P2PSERVE_")}
