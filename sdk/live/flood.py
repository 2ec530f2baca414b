"""A client that asks for far more than its part, in a process of its own: see `overload`.

Prints a line when it has joined, begins when it reads one, and ends with its input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

import trio

from ..client import AsyncClient
from ..errors import ClientError

DEADLINE_S: Final = 600.0


async def flood(requests: int, prompt: str, max_tokens: int) -> None:
    """Ask all at once; what is refused is asked again when the gateway says, as clients do."""
    async with AsyncClient() as client, trio.open_nursery() as nursery:

        async def ask() -> None:
            try:
                await client.generate(prompt, max_tokens=max_tokens, deadline_s=DEADLINE_S)
            except ClientError:
                pass  # refused for good, as it may be meant to be

        print("joined", flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        for _ in range(requests):
            nursery.start_soon(ask)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """The network is the one of the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("requests", "words", "max-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--word", required=True)
    given = parser.parse_args(argv)
    trio.run(flood, given.requests, given.word * given.words, given.max_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
