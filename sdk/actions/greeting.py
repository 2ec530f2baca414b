"""What a node that has been admitted prints: for programs one object, for people lines that say what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ...coordinator.names import name_of

if TYPE_CHECKING:
    from ...node.agent import Started

_GREETINGS: Final = (  # those that lead keep the network going when this box is lost
    ("leader", "trusted boxes join with:", "join --bootstrap {token}"),
    ("worker", "other boxes join with:", "join --bootstrap {token}"),
    ("client", "clients ask with:", 'generate --bootstrap {token} "def fibonacci(n):"'),
)


def greeting_of(started: Started) -> dict[str, Any]:
    """For programs."""
    who = {"peer": started.peer, "name": name_of(started.peer)}
    greeting: dict[str, Any] = {**who, "address": str(started.address), "tokens": started.tokens}
    if started.http is not None:
        greeting["http"] = f"http://{started.http}"
    return greeting


def describe_greeting(greeting: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"node {greeting['name']} at {greeting['address']}"
    yield f"peer id {greeting['peer']}"
    if "http" in greeting:
        yield f"{'OpenAI clients ask at:':<27}{greeting['http']}/v1"
    for word, who, command in _GREETINGS:
        token = greeting["tokens"].get(word)
        if token is not None:
            yield f"{who:<27}p2pserve {command.format(token=token)}"
