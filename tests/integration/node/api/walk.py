"""A page of the docs, read from top to bottom: its commands are run in order, as its reader runs them.

What a page says of boxes that nobody has here stands for something on this machine: models for one with an emulated
engine, addresses for loopback, tokens and names for those of a running network.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ....unit.docs.console import ROOT, Example

LIMIT_S = 110.0  # of what takes seconds, on a busy machine
CARD = "1xH100-SXM5-80GB"  # quick with a small model
ROWS, COLUMNS = "40", "100"

STAYS = {
    r"p2pserve (bootstrap|serve) ": r"clients ask with.*\n",
    r"p2pserve join ": r"engine ready[\s\S]*\n(node\S* +\| )?plan .*\n",
    r"p2pserve gateway ": r"OpenAI API at.*\n",
    r"p2pserve status --watch": r"coordinator",
    r"p2pserve topology --watch": r"boxes",
    r"p2pserve events --follow": r"engine\.state",
    r"p2pserve logs --follow": r"\d\d:\d\d:\d\d",
    r"curl -N ": r": following",
}
"""What runs until it is interrupted, and what it has said once it is where the page wants it."""

ENDS_WITH = {"p2pserve doctor ": 1}
"""Exit codes that a page says of its example, where that is not 0."""

ENVIRONMENT = {
    **{f"P2PSERVE_{command}_EMULATE": CARD for command in ("BOOTSTRAP", "SERVE", "JOIN")},
    **{f"P2PSERVE_{command}_LISTEN": "127.0.0.1:0" for command in ("SERVE", "JOIN")},
    **{f"P2PSERVE_{command}_HTTP": "127.0.0.1:0" for command in ("SERVE", "GATEWAY")},
    "P2PSERVE_RENT_PLANS": "1",
    "VAST_TCP_PORT_7000": "40123",  # the provider of the example in running.md
    "PUBLIC_IPADDR": "127.0.0.1",
}
ANY_WORD = re.compile(r"\d|\.\.\.|^[a-z]+-[a-z]+\b|^m?s$|^(ahead|of|behind)$")
"""Words of an output that are others at each run: figures, what is cut short, names of boxes, units, signs."""


def has_shape(shown: str, said: str) -> bool:
    """Whether a line of a page is like one that was said: the same keys, or the same words in the same order."""
    if shown.startswith("{"):
        wanted, given = re.findall(r'"(\w+)":', shown), re.findall(r'"(\w+)":', said)
    else:
        wanted, given = [word for word in shown.split() if not ANY_WORD.search(word)], said.split()
    words = iter(given)
    return all(word in words for word in wanted)


@dataclass(frozen=True)
class Outcome:
    """How a command has ended, and all that it said."""

    code: int
    said: str
    expected: int = 0

    def unlike(self, example: Example) -> list[str]:
        """Lines that the page shows and that nothing said is like."""
        lines = self.said.splitlines()
        return [shown for shown in example.shown if not any(has_shape(shown, line) for line in lines)]


@dataclass
class Place:
    """A network that commands talk to: the home folder of its first box, tokens by the page's words for them, and the
    ids of boxes between which a link was measured."""

    home: Path
    tokens: dict[str, str]
    boxes: list[str] = field(default_factory=lambda: ["", ""])

    @classmethod
    def of(cls, home: Path, said: str) -> Place:
        """From what its first box said."""
        leader, worker = re.findall(r"p2p_worker_[\w-]+", said)[:2]
        client = re.findall(r"p2p_client_[\w-]+", said)[0]
        return cls(home, {"p2p_worker_...": leader, "kpLEs": leader, "kqTAd": worker, "p2p_client_": client})


@dataclass
class Walk:
    """What one page's reader has: a folder, boxes with a home each, an address for OpenAI's clients."""

    folder: Path
    place: Place
    url: str
    request: str
    running: list[tuple[str, subprocess.Popen[bytes], int]] = field(default_factory=list)
    token: str = ""
    token_id: str = ""
    box: Path | None = None
    box_id: str = ""
    owns: bool = False  # its later commands are for the network that it starts

    def run(self, example: Example) -> Outcome:
        """Run it; one that stays is left running."""
        if example.is_python:
            (self.folder / "snippet.py").write_text(self.here(example.text))
            return self._run_to_end("python snippet.py", {})
        line = self.here(example.text)
        command = re.sub(r"^(?:P2PSERVE_\w+=\S+ )+", "", line)
        environment = self._environment(command)
        for begin, ready in STAYS.items():
            if re.match(begin, command):
                return self._start(line, ready, environment)
        return self._run_to_end(line, environment)

    def here(self, text: str) -> str:
        """A command of the page with what stands for its words on this machine."""
        names = self._names(text)
        meant = {
            r"\.venv/bin/p2pserve": "p2pserve",
            r"p2p_worker_\.\.\.|p2p_worker_kpLEs\.\.\.": self.place.tokens["kpLEs"],
            r"p2p_worker_kqTAd\.\.\.": self.place.tokens["kqTAd"],
            r"p2p_worker_ksSom\.\.\.": self.token or self.place.tokens["kqTAd"],
            r"p2p_admin_\w*\.\.\.": self.token,
            r"p2p_client_\w*\.\.\.": self.place.tokens["p2p_client_"],
            r"cat > worker\.token": f"echo {self.place.tokens['kqTAd']} > worker.token",
            r"pass show p2pserve/client": f"echo {self.place.tokens['p2p_client_']}",
            r"\b3f2a\b": self.token_id,
            r"\b5f\w+\.\.\.": self.request,
            r"sk-\.\.\.": "sk-0123456789abcdef",
            r"(curl .*)Qwen/Qwen3[\w.-]+": r"\1bundled",
            r"(doctor .*)Qwen/Qwen3[\w.-]+": r"\1bundled",
            r"(join .*)--model bundled": r"\1--model llama-7b",
            r"Qwen/Qwen3[\w.-]+": "llama-7b",
            r'"Qwen3[\w.-]+"': '"bundled"',
            r"(join .*)--port \d+": r"\1--listen 127.0.0.1:0",
            r"(join .*)--replicas \d+": rf"\1--emulate 2{CARD.removeprefix('1')} --replicas 2",
            r"--listen [\d.]+:\d+": "--listen 127.0.0.1:0",
            r"--http [\d.]+:\d+": "--http 127.0.0.1:0",
            r"http://127\.0\.0\.1:8000|(?<=curl )\.\.\.|(?<=-N \")\.\.\.|(?<=curl \")\.\.\.": self.url,
            r"~/\.local/share/p2pserve": os.fspath(self.place.home),
            r"amber-otter": names[0],
            r"calm-heron": names[-1],
            r'eval "\$\((p2pserve completion \w+)\)"|(p2pserve completion \w+) \| source': r"\1\2",
        }
        for word, ours in meant.items():
            text = re.sub(word, ours, text)
        return text

    def end(self) -> list[str]:
        """Interrupt all that stays, the last first; what does not end in order."""
        ended = [(line, self._interrupt(process, output)) for line, process, output in reversed(self.running)]
        return [f"{line}: {code}" for line, code in ended if code not in (0, 130)]

    def _names(self, text: str) -> list[str]:
        """What `amber-otter` and `calm-heron` stand for: boxes of the network, or the page's own where one is told what
        to do."""
        if "amber-otter" not in text:
            return ["", ""]
        return [self.box_id, ""] if "drain" in text else self.place.boxes

    def _environment(self, line: str) -> dict[str, str]:
        home = self.folder / "client"
        if re.match(r"p2pserve (token|logs|price|drain \w)", line):
            home = self.place.home
        elif re.match(r"p2pserve (bootstrap|serve|join) ", line):
            home = self.folder / f"box-{len(self.running)}"
        elif re.match(r"p2pserve (leave|drain(?! \w))", line) and self.box is not None:
            home = self.box
        return {"P2PSERVE_HOME": os.fspath(home)}

    def _open(self, line: str, environment: dict[str, str], output: int, terminal: bool) -> subprocess.Popen[bytes]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("P2PSERVE_")}
        theirs = {
            "PATH": f"{self.folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.fspath(ROOT),
            "P2PSERVE_BOOTSTRAP": self.place.tokens["p2p_client_"],
            "P2PSERVE_HOME": os.fspath(self.folder / "client"),
            "HOME": os.fspath(self.folder),
            "TERM": "xterm",
            "COLUMNS": COLUMNS,
            "LINES": ROWS,
        }
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder,
            env={**kept, **ENVIRONMENT, **theirs, **environment},
            stdin=output if terminal else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def _run_to_end(self, line: str, environment: dict[str, str]) -> Outcome:
        log = self.folder / "said.txt"
        with log.open("wb") as output:
            process = self._open(line, environment, output.fileno(), terminal=False)
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = -1
        said = log.read_text(errors="replace")
        if created := re.search(r"^token (\w+),[\s\S]*(p2p_(?:worker|admin)_[\w-]+)", said, re.MULTILINE):
            self.token_id, self.token = created.groups()
        if line.startswith("p2pserve leave"):
            joined = next(process for line, process, _ in reversed(self.running) if line.startswith("p2pserve join"))
            joined.wait(LIMIT_S)  # it has left, and its process is about to end
        return Outcome(code, said, next((code for begin, code in ENDS_WITH.items() if line.startswith(begin)), 0))

    def _start(self, line: str, ready: str, environment: dict[str, str]) -> Outcome:
        """Start what stays, and wait until it is there."""
        terminal = "--watch" in line
        ours, theirs = pty.openpty() if terminal else os.pipe()
        process = self._open(line, environment, theirs, terminal)
        os.close(theirs)
        self.running.append((line, process, ours))
        said = b""
        give_up = time.monotonic() + LIMIT_S
        while not re.search(ready, said.decode(errors="replace")):
            readable, _, _ = select.select([ours], [], [], max(0.0, give_up - time.monotonic()))
            data = os.read(ours, 65536) if readable else b""
            if not data:
                self.running.pop()
                return Outcome(self._interrupt(process, ours) or -1, said.decode(errors="replace"))
            said += data
        text = said.decode(errors="replace")
        home = Path(environment["P2PSERVE_HOME"])
        if re.match(r"p2pserve (bootstrap|serve) ", line) and self.owns:
            self.place = Place.of(home, text)
        elif line.startswith("p2pserve join "):
            self.box = home
            self.box_id = re.findall(r"^(?:node\S* +\| )?peer id (\w+)", text, re.MULTILINE)[0]
        elif found := re.search(r"OpenAI API at (\S+)/v1", text):
            self.url = found[1]
        if re.match(r"p2pserve (bootstrap|join|gateway) ", line):
            return Outcome(0, text)  # later commands of the page are for it
        self.running.pop()
        code = self._interrupt(process, ours)
        return Outcome(0 if code in (0, 130, -signal.SIGINT) else code, text)

    @staticmethod
    def _interrupt(process: subprocess.Popen[bytes], output: int) -> int:
        """Ctrl-C; the exit code."""
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        give_up = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < give_up:
            readable, _, _ = select.select([output], [], [], 0.1)
            try:
                if readable and not os.read(output, 65536):
                    process.wait(LIMIT_S)
            except OSError:  # the terminal's other side is closed
                process.wait(LIMIT_S)
        os.close(output)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def write_programs(folder: Path) -> None:
    """What a shell finds as `p2pserve` and `python`: those of this environment."""
    folder.mkdir()
    for name, command in (("p2pserve", '-m p2pserve.sdk.cli "$@"'), ("python", '"$@"')):
        program = folder / name
        program.write_text(f"#!/bin/sh\nexec {sys.executable} {command}\n")
        program.chmod(0o755)


@contextmanager
def open_network(folder: Path, url: str) -> Iterator[Walk]:
    """A network of two boxes with emulated engines, which has answered one request."""
    folder.mkdir()
    nowhere = Place(folder, {"kpLEs": "", "kqTAd": "", "p2p_client_": ""})
    walk = Walk(folder, nowhere, url, "", owns=True)
    with ExitStack() as stack:
        stack.callback(walk.end)
        lines = (
            "p2pserve bootstrap --listen 0.0.0.0:4001 --model llama-7b --usd-per-hour 0.4",
            "p2pserve join --bootstrap p2p_worker_kpLEs... --model llama-7b --usd-per-hour 0.4",
            "p2pserve generate 'def fibonacci(n):' --max-tokens 4",
        )
        said = []
        for line in lines:
            outcome = walk.run(Example("", line))
            said.append(outcome.said)
            assert outcome.code == 0, outcome.said
        walk.request = re.findall(r"request (\w+)", said[-1])[0]
        walk.place.boxes = re.findall(r"^peer id (\w+)", "".join(said), re.MULTILINE)
        wait_link(walk)
        yield walk


def wait_link(walk: Walk) -> None:
    """Wait until its boxes have measured their link."""
    give_up = time.monotonic() + LIMIT_S
    while (outcome := walk.run(Example("", "p2pserve path amber-otter calm-heron"))).code:
        assert time.monotonic() < give_up, outcome.said
