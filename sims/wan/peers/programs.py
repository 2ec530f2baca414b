"""Programs of ours and of peers that run in boxes, told what to do by JSON lines; and where they run."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, Self

from ..emulated import EmulatedWan, environment
from ..namespaces import DEVICE
from .environment import last_line

START_S: Final = 60.0


class PeerFailed(RuntimeError):
    """A program did not start, or did not do what it was told: the reason, in one line for a table."""


class PeerSite(Protocol):
    """Two ends and a link between them. Roles: `send` and `receive`."""

    device: str
    """Of the network, as UCX is told it."""

    def address(self, role: str) -> str: ...

    def popen(self, role: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]: ...


class LoopbackSite:
    """Both ends on this machine, without any emulation."""

    device = "lo"

    def address(self, role: str) -> str:
        """Of either."""
        return "127.0.0.1"

    def popen(self, role: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """A process of this machine."""
        return subprocess.Popen(argv, **options)


class WanSite:
    """Two boxes of an emulated network that are namespaces."""

    device = DEVICE

    def __init__(self, wan: EmulatedWan, sender: str, receiver: str) -> None:
        self._wan = wan
        self._boxes = {"send": sender, "receive": receiver}

    def address(self, role: str) -> str:
        """Of that box."""
        return self._wan.address(self._boxes[role])

    def popen(self, role: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """A process in that box."""
        return self._wan.popen(self._boxes[role], argv, **options)


class PeerProgram:
    """A process that answers JSON lines; a context manager, at whose end it is killed with all that it has started."""

    def __init__(self, site: PeerSite, role: str, argv: Sequence[str], extra: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `__exit__`)
        try:
            self._process = site.popen(
                role,
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**environment(), **extra},
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise PeerFailed(f"{argv[0]}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._errors.close()

    def tell(self, order: Mapping[str, Any]) -> None:
        """Give it an order."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self, seconds: float) -> dict[str, Any]:
        """What it says next. Raises PeerFailed if it says nothing for that long, that it failed, or has ended."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise PeerFailed(f"no answer within {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise PeerFailed(f"no answer: {last_line(line.decode(errors='replace'))}") from None
        if found.get("error"):
            raise PeerFailed(last_line(str(found["error"])))
        return found

    def pause(self) -> None:
        """Let it and what it has started compute nothing until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """The end of a pause."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ended(self) -> PeerFailed:
        code = self._process.wait()
        self._errors.seek(0)
        said = last_line(self._errors.read().decode(errors="replace"))
        return PeerFailed(said or f"ended with exit code {code}")
