"""What the owner asks a node on its own box: one line of JSON each way, over a Unix socket in the node's home.

Who may open the socket owns the folder: other users of the box cannot. Nobody else can reach it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec

from ...coordinator.bounds import Figure, Name, Text
from ..box.errors import NodeError, NodeUsageError
from ..box.home import running_pid
from ..messages import Label
from .messages import Drained

SOCKET: Final = "node.socket"
MAX_LINE: Final = 1 << 14

Called = Annotated[str, msgspec.Meta(max_length=128)]


class OwnerRefused(NodeError):
    """Another box does not do what it was asked: this node is no admin of its network."""


class OwnerQuestion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Whether a box takes new requests; with `draining`, that it is to take none, or (False) to take them again.
    `box`: another one of the network, as people call it; empty: the node's own, which with `usd_per_hour` costs so much
    from now on. What a later release asks for beside that is refused, not left out."""

    box: Called = ""
    draining: bool | None = None
    usd_per_hour: Figure | None = None


class OwnerAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the box `node` says; or why nothing was done, and whose fault that is: usage, refused or failed.
    `usd_per_hour`: of the node's own box; 0: its owner does not say."""

    node: Name = ""
    drained: Drained | None = None
    usd_per_hour: Figure | None = None
    failed: Text = ""
    fault: Label = ""


@contextmanager
def socket_path(home: Path) -> Iterator[str]:
    """The socket's path while the body runs; a short one, since the kernel takes no long ones. Raises OSError."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


def ask_node(home: Path, question: OwnerQuestion, timeout_s: float = 10.0) -> OwnerAnswer:
    """Ask the node that runs in `home`. Raises NodeError, NodeUsageError or OwnerRefused."""
    if running_pid(home) is None:
        raise NodeError(f"home {home}: no node is running there; give its folder with --home")
    try:
        with socket_path(home) as path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(msgspec.json.encode(question) + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline(MAX_LINE)
    except TimeoutError:
        raise NodeError(f"home {home}: the node there has not answered for {timeout_s:g} s") from None
    except OSError as error:
        raise NodeError(f"home {home}: the node there cannot be asked: {error.strerror}; try again soon") from error
    try:
        answer = msgspec.json.decode(line, type=OwnerAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NodeError(f"home {home}: the node there is of another release; let it leave and join again") from error
    if answer.failed:
        raise {"usage": NodeUsageError, "refused": OwnerRefused}.get(answer.fault, NodeError)(answer.failed)
    return answer
