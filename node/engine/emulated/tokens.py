"""The made-up tokens of an emulated engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import final

__all__ = ["EmulatedAnswer"]


@final
class EmulatedAnswer:
    """Tokens that go on from a prompt: each is a hash of all that came before it and of the seed.

    So an engine that is given the prompt with the first tokens of an answer goes on with the same
    answer. 0 is left out: it is the end of text in many vocabularies.
    """

    def __init__(self, prompt: Sequence[int], vocabulary: int, seed: int = 0) -> None:
        self._hash = blake2b(array("q", prompt).tobytes(), digest_size=8, key=seed.to_bytes(8, "little"))
        self._choices = vocabulary - 1

    def next(self) -> int:
        """The next token, in `[1, vocabulary)`."""
        token = 1 + int.from_bytes(self._hash.digest(), "little") % self._choices
        self.go_on_from(token)
        return token

    def go_on_from(self, token: int) -> None:
        """Another engine has written this one."""
        self._hash.update(array("q", (token,)).tobytes())
