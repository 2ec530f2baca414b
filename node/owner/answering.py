"""Answers the owner of this box over the socket in its home: `questions` says what there is to ask."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
import trio

from .questions import MAX_LINE, SOCKET, OwnerAnswer, OwnerQuestion, socket_path

ASK_S: Final = 10.0  # for a question to come, and for its answer to be read

Answering = Callable[[OwnerQuestion], Awaitable[OwnerAnswer]]


async def answer_owner(home: Path, answer: Answering, say: Callable[[str], None]) -> None:
    """Until cancelled. Where no socket can be made, that is said once, and the node runs without."""
    try:
        listener = _listen(home)
    except OSError as error:
        say(f"{home / SOCKET}: cannot be made: {error.strerror}; `p2pserve drain` does not reach this node")
        return

    async def serve(stream: trio.SocketStream) -> None:
        with trio.move_on_after(ASK_S):
            try:
                await stream.send_all(msgspec.json.encode(await _answer(stream, answer)) + b"\n")
            except trio.BrokenResourceError:
                return  # whoever asked is gone

    try:
        await trio.serve_listeners(serve, [trio.SocketListener(listener)])
    finally:
        (home / SOCKET).unlink(missing_ok=True)


async def _answer(stream: trio.SocketStream, answer: Answering) -> OwnerAnswer:
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_LINE and (more := await stream.receive_some(MAX_LINE)):
        line += more
    try:
        question = msgspec.json.decode(line, type=OwnerQuestion)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return OwnerAnswer(failed=f"this node does not understand the question: {error}"[:500], fault="failed")
    return await answer(question)


def _listen(home: Path) -> trio.socket.SocketType:
    """The home is locked by this process: a socket that is there was left by one that is gone."""
    (home / SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before it has a name
        with socket_path(home) as path:
            listener.bind(path)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return trio.socket.from_stdlib_socket(listener)
