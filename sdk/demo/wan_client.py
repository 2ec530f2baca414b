"""The client of `p2pserve demo --wan`, a process on a box of its own: it asks, and prints what it sees, one JSON
document per line.

The network is the one of its environment. It looks at the network's status from the start; a line
`ask` on its input begins the stream of requests, `stop` ends it, and the end of the input ends the
client. Times are of the machine's steady clock, which all its processes share.
"""

from __future__ import annotations

import os
import sys
import time
from hashlib import sha256
from typing import Final

import msgspec
import trio

from ...node.messages import Status
from ..client import AsyncClient
from ..errors import ClientError
from ..requests import new_request_id

WORD: Final = " x"  # one token of the bundled tokenizer, however often it is repeated
LOOK_S: Final = 0.25
DEADLINE_S: Final = 60.0
DIRECT: Final = "direct"  # as a KV path is called that leads through no other box
ASK, STOP = b"ask", b"stop"


class ClientOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked: a prompt and an answer of so many tokens, every `every_s`."""

    prompt: int
    output: int
    every_s: float


class WanLook(msgspec.Struct, frozen=True, kw_only=True, tag="looked"):
    """The network as its nearest node saw it at `at`."""

    at: float
    status: Status


class AnsweredRequest(msgspec.Struct, frozen=True, kw_only=True, tag="answered"):
    """An answer that came to its end. `digest`: of its tokens; `relayed`: its KV went through a third box; `attempts`
    beyond 1 and what was `recovered`: boxes failed it, and others went on."""

    asked_at: float
    first_at: float
    last_at: float
    tokens: int
    prefill: str | None
    decode: str
    attempts: int
    recovered: tuple[str, ...] = ()
    relayed: bool = False
    digest: str = ""


class LostRequest(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """A request whose answer did not come to its end."""

    asked_at: float
    error: str


class ClientStopped(msgspec.Struct, frozen=True, kw_only=True, tag="stopped"):
    """All requests have ended, and no more will come."""


ClientLine = WanLook | AnsweredRequest | LostRequest | ClientStopped


def say(seen: ClientLine) -> None:
    """Print a line. In one write, so that lines of several tasks do not mix."""
    sys.stdout.buffer.write(msgspec.json.encode(seen) + b"\n")
    sys.stdout.buffer.flush()


async def _look(client: AsyncClient) -> None:
    while True:
        with trio.move_on_after(DEADLINE_S):
            try:
                status = await client.status()
                say(WanLook(at=time.monotonic(), status=status))
            except ClientError:
                pass  # its gateway was lost: the next look finds another one
        await trio.sleep(LOOK_S)


async def _ask_one(client: AsyncClient, orders: ClientOrders) -> None:
    asked_at = time.monotonic()
    first_at = last_at = asked_at
    tokens = 0
    try:
        # All prompts are alike; none is to be found in a cache, since what is shown is KV under way.
        salt = new_request_id()
        stream = client.generate(
            WORD * orders.prompt, stream=True, max_tokens=orders.output, deadline_s=DEADLINE_S, cache_salt=salt
        )
        async with stream:
            async for delta in stream:
                if delta.tokens:
                    last_at = time.monotonic()
                    first_at = first_at if tokens else last_at
                    tokens += len(delta.tokens)
            figures = stream.result.figures
    except ClientError as error:
        say(LostRequest(asked_at=asked_at, error=str(error)))
        return
    if figures is None or tokens != orders.output:
        say(LostRequest(asked_at=asked_at, error=f"{tokens} of {orders.output} tokens came"))
        return
    say(
        AnsweredRequest(
            asked_at=asked_at,
            first_at=first_at,
            last_at=last_at,
            tokens=tokens,
            prefill=figures.prefill_node,
            decode=figures.decode_node,
            attempts=figures.attempts,
            recovered=figures.recovered,
            relayed=figures.transfer is not None and not figures.transfer.paths.keys() <= {DIRECT},
            digest=sha256(repr(stream.result.tokens).encode()).hexdigest(),
        )
    )


async def _ask_on(client: AsyncClient, orders: ClientOrders, stopped: trio.Event) -> None:
    async with trio.open_nursery() as nursery:
        due = trio.current_time()
        while not stopped.is_set():
            nursery.start_soon(_ask_one, client, orders)
            due += orders.every_s
            with trio.move_on_at(due):
                await stopped.wait()
    say(ClientStopped())


async def run(orders: ClientOrders) -> None:
    """Do as the input says, until its end."""
    stopped = trio.Event()
    async with AsyncClient() as client, trio.open_nursery() as nursery:
        nursery.start_soon(_look, client)
        rest = b""
        async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as source:
            async for data in source:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line == ASK:
                        nursery.start_soon(_ask_on, client, orders, stopped)
                    elif line == STOP:
                        stopped.set()
        nursery.cancel_scope.cancel()


def main(arguments: list[str]) -> int:
    """Run the client with orders in JSON."""
    trio.run(run, msgspec.json.decode(arguments[0], type=ClientOrders))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
