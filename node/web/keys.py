"""API keys: whose they are, and what each may have. No I/O.

A file of keys has one in each line, with what it may have:

    sk-8c1f...   name=alice requests_s=2 concurrent=8 tokens_min=60000
    sk-77ab...   # no limit but those of the gateway

`cache=` names a prefix cache that keys share; without it each has its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final

MAX_KEYS: Final = 512
MIN_KEY_CHARS: Final = 8
_NAME_CHARS: Final = 64


class KeyFault(ValueError):
    """What cannot be an API key. The text is a line for the owner, and does not repeat the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What one key may have; None: as much as the gateway gives. A burst may take what a second, or a minute, gives."""

    requests_s: float | None = None
    concurrent: int | None = None
    tokens_min: int | None = None  # of prompts and answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key. `name` stands for it wherever people look; `cache`: a prefix cache that it shares; "": it shares none."""

    name: str
    secret: str = field(repr=False)
    limits: KeyLimits = field(default_factory=KeyLimits)
    cache: str = ""


def parse_keys(lines: Iterable[str], what: str = "line") -> tuple[ApiKey, ...]:
    """The keys of these lines, each name once; `what` each is called. Raises KeyFault naming the line and the fix."""
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        key = _parse_key(words, f"{what} {number}")
        if key.name in keys:
            raise KeyFault(f"{what} {number}: the name {key.name} is taken already; give each key another one")
        keys[key.name] = key
    if len(keys) > MAX_KEYS:
        raise KeyFault(f"{len(keys)} keys; at most {MAX_KEYS} can be held")
    return tuple(keys.values())


def _parse_key(words: list[str], where: str) -> ApiKey:
    secret, *facts = words
    if len(secret) < MIN_KEY_CHARS or not secret.isascii() or not secret.isprintable():
        raise KeyFault(f"{where}: a key has at least {MIN_KEY_CHARS} printable ASCII characters and no spaces")
    key = ApiKey(name=f"key-{sha256(secret.encode()).hexdigest()[:8]}", secret=secret)
    for fact in facts:
        name, equals, value = fact.partition("=")
        if name == "name" and value and len(value) <= _NAME_CHARS and value.isprintable():
            key = replace(key, name=value)
        elif name == "cache" and value and len(value) <= _NAME_CHARS and value.isprintable():
            key = replace(key, cache=value)
        elif equals and name in ("requests_s", "concurrent", "tokens_min"):
            limit = _number(value, where, name)
            limits = replace(key.limits, **{name: limit if name == "requests_s" else int(limit)})  # type: ignore[arg-type]
            key = replace(key, limits=limits)
        else:
            raise KeyFault(f"{where}: `{fact[:80]}` is none of name=, cache=, requests_s=, concurrent= and tokens_min=")
    return key


def _number(text: str, where: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e12 or (name != "requests_s" and value != int(value)):
        raise KeyFault(f"{where}: {name}={text[:40]} is not a {'number' if name == 'requests_s' else 'count'} above 0")
    return value
