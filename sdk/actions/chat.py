"""`p2pserve chat`: a conversation in the terminal, over a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Protocol

from ..client import Client
from ..errors import ClientError
from ..printing import printable
from .network import client_of

PROMPT = "> "
HELP = "an empty line or Ctrl-D ends it; /new begins another conversation"


class Answers(Protocol):
    """What answers a conversation."""

    def __call__(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The answer's text, piece by piece. Raises ClientError."""


def converse(
    read: Callable[[str], str],
    write: Callable[[str], None],
    answers: Answers,
    system: str | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Turn by turn, until the end of input or an empty line. A turn that fails is told, and not kept: the next one can
    be asked as if it had not been. `as_json`: a line for each turn, with the answer as a message or the error."""

    def tell(text: str, turn: dict[str, str] | None = None) -> None:
        if not as_json:
            write(text)
        elif turn is not None:
            write(f"{json.dumps(turn)}\n")

    begin = [{"role": "system", "content": system}] if system else []
    messages = list(begin)
    while True:
        try:
            said = read(PROMPT).strip()
        except EOFError:
            tell("\n")
            return
        if not said:
            return
        if said == "/new":
            messages = list(begin)
            continue
        asked = [*messages, {"role": "user", "content": said}]
        answer = ""
        try:
            for piece in answers(asked):
                answer += piece
                tell(piece)
        except ClientError as error:
            tell(f"\nno answer: {printable(str(error))}\n", {"error": str(error)})
            continue
        tell("\n", {"role": "assistant", "content": answer})
        messages = [*asked, {"role": "assistant", "content": answer}]


def chat(arguments: SimpleNamespace) -> int:
    """`p2pserve chat`."""
    with client_of(arguments) as client:
        if sys.stdin.isatty():
            print(HELP, file=sys.stderr)
        as_json = arguments.format == "json"
        converse(
            _read_line,
            _write_text,
            lambda messages: _stream(client, messages, arguments),
            arguments.system,
            as_json=as_json,
        )
    return 0


def _stream(client: Client, messages: list[dict[str, str]], arguments: SimpleNamespace) -> Iterator[str]:
    options = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature, "service": arguments.service}
    with client.generate(messages=messages, stream=True, **options) as stream:
        for delta in stream:
            yield delta.text


def _read_line(prompt: str) -> str:
    return input(prompt if sys.stdin.isatty() else "")


def _write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
