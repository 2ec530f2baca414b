"""`p2pserve chat`: a conversation in the terminal, over a network."""

from __future__ import annotations

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
    read: Callable[[str], str], write: Callable[[str], None], answers: Answers, system: str | None = None
) -> None:
    """Turn by turn, until the end of input or an empty line. A turn that fails is told, and not kept: the next one can
    be asked as if it had not been."""
    begin = [{"role": "system", "content": system}] if system else []
    messages = list(begin)
    while True:
        try:
            said = read(PROMPT).strip()
        except EOFError:
            write("\n")
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
                write(piece)
        except ClientError as error:
            write(f"\nno answer: {printable(str(error))}\n")
            continue
        write("\n")
        messages = [*asked, {"role": "assistant", "content": answer}]


def chat(arguments: SimpleNamespace) -> int:
    """`p2pserve chat`."""
    with client_of(arguments) as client:
        if sys.stdin.isatty():
            print(HELP, file=sys.stderr)
        converse(_read_line, _write_text, lambda messages: _stream(client, messages, arguments), arguments.system)
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
