"""What moves bytes over a link: ours, plain TCP streams, NIXL, Mooncake and rsync, as contenders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from .environment import PeerEnvironment, last_line
from .programs import START_S, PeerFailed, PeerProgram, PeerSite
from .turns import OURS, Contender, Mover, MoveSample

RSYNC_PORT: Final = 8730
MEMORY: Final = Path("/dev/shm")
DAEMON_S: Final = 5.0
RETRY_S: Final = 0.2


class EndPair:
    """Both ends of a contender that obeys `peer_end`'s orders."""

    def __init__(self, sender: PeerProgram, receiver: PeerProgram, version: str) -> None:
        self._sender = sender
        self._receiver = receiver
        self._moves = 0
        self.version = version

    def move(self, mib: int, seconds: float) -> MoveSample:
        """From the sender's start until both call it done."""
        self._moves += 1
        self._receiver.tell({"op": "expect", "mib": mib, "number": self._moves})
        self._sender.tell({"op": "move", "mib": mib, "number": self._moves})
        until = time.monotonic() + seconds
        sent = self._sender.answer(seconds)
        received = self._receiver.answer(max(0.0, until - time.monotonic()))
        ended = max(sent["ended"], received["ended"])
        return MoveSample(mib, ended - sent["began"], sent["cpu_s"] + received["cpu_s"])


@contextmanager
def open_ends(
    site: PeerSite, command: Sequence[str], what: str, mib: int, streams: int, extra: Mapping[str, str]
) -> Iterator[Mover]:
    """Start both ends, and let the sender connect."""
    with ExitStack() as stack:
        receiver, sender = (
            stack.enter_context(
                PeerProgram(site, role, [*command, what, role, site.address(role), str(mib), str(streams)], extra)
            )
            for role in ("receive", "send")
        )
        about = receiver.answer(START_S)
        sender.answer(START_S)
        sender.tell({"op": "open", "peer": {**about, "host": site.address("receive")}})
        sender.answer(START_S)
        yield EndPair(sender, receiver, about["version"])


class RsyncPair:
    """A daemon in the receiver's box, and a client for each move: what is timed is all of the client's life."""

    def __init__(self, site: PeerSite, program: str, folder: Path, version: str) -> None:
        self._site = site
        self._program = program
        self._file = folder / "from" / "kv"
        self.version = version

    def move(self, mib: int, seconds: float) -> MoveSample:
        """A file of random bytes, in memory at both ends where there is a file system in memory."""
        with self._file.open("wb") as file:
            for _ in range(mib):
                file.write(os.urandom(1 << 20))
        url = f"rsync://{self._site.address('receive')}:{RSYNC_PORT}/kv/"
        argv = [self._program, "--whole-file", "--inplace", "--ignore-times", str(self._file), url]
        first = time.monotonic()
        until = first + seconds
        while True:
            began = time.monotonic()
            with self._site.popen("send", argv, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as client:
                try:
                    _, errors = client.communicate(timeout=max(0.1, until - began))
                except subprocess.TimeoutExpired:
                    client.kill()
                    raise PeerFailed(f"{mib} MiB were not moved within {seconds:.0f} s") from None
            if client.returncode == 0:
                return MoveSample(mib, time.monotonic() - began)
            if time.monotonic() - first > DAEMON_S:
                raise PeerFailed(last_line(errors.decode(errors="replace")))
            time.sleep(RETRY_S)  # the daemon does not listen yet


@contextmanager
def open_rsync(site: PeerSite, program: str, mib: int) -> Iterator[Mover]:
    """A daemon with an empty folder."""
    memory = str(MEMORY) if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="p2pserve-rsync-", dir=memory, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for each in ("from", "to"):
            (folder / each).mkdir()
        # A box has no name server, which the daemon would ask for the client's name for ten seconds.
        lines = [f"address = {site.address('receive')}", f"port = {RSYNC_PORT}", "reverse lookup = no"]
        lines += [
            "[kv]",
            "use chroot = no",
            f"path = {folder / 'to'}",
            "read only = no",
            f"uid = {os.getuid()}",
            f"gid = {os.getgid()}",
        ]
        (folder / "conf").write_text("\n".join(lines) + "\n")
        argv = [program, "--daemon", "--no-detach", f"--config={folder / 'conf'}", "--log-file=/dev/null"]
        daemon = site.popen("receive", argv, stdin=subprocess.DEVNULL)
        try:
            yield RsyncPair(site, program, folder, _rsync_version(program))
        finally:
            daemon.terminate()
            daemon.wait()


def _rsync_version(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.split()
    return said[2] if len(said) > 2 else ""


def our_contender(site: PeerSite, streams: int, name: str = OURS) -> Contender:
    """`kvtransport` over so many streams."""
    command = [sys.executable, "-m", f"{__package__}.our_end"]
    return Contender(name, lambda mib: open_ends(site, command, OURS, mib, streams, {}))


def raw_contender(site: PeerSite, streams: int) -> Contender:
    """Plain TCP, unencrypted."""
    name = f"{streams} plain TCP streams" if streams > 1 else "one plain TCP stream"
    command = _as_file(sys.executable)
    return Contender(name, lambda mib: open_ends(site, command, "raw", mib, streams, {}))


def library_contender(site: PeerSite, what: str, name: str, peers: PeerEnvironment, failure: str) -> Contender:
    """NIXL or Mooncake over TCP, as the environment has it."""
    extra = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": site.device, "MC_FORCE_TCP": "1"}
    command = _as_file(peers.python)
    return Contender(name, lambda mib: open_ends(site, command, what, mib, 1, extra), failure)


def rsync_contender(site: PeerSite) -> Contender:
    """rsync to a daemon, if there is one on the PATH."""
    program = shutil.which("rsync")
    failure = "" if program else "no `rsync` on the PATH (Debian, Ubuntu: apt-get install rsync)"
    return Contender("rsync", lambda mib: open_rsync(site, program or "rsync", mib), failure)


def _as_file(python: str) -> list[str]:
    """`peer_end` under a Python that has nothing of this project."""
    return [python, "-P", str(Path(__file__).with_name("peer_end.py"))]
