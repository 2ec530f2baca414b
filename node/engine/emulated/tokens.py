"""The made-up tokens of an emulated engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import final


@final
class EmulatedAnswer:
    """Tokens that go on from a prompt: each a hash of the seed and all before it, so that an engine
    given the first of them goes on with the same answer. 0, often end of text, is left out."""

    def __init__(self, prompt: Sequence[int], vocabulary: int, seed: int = 0) -> None:
        self._hash = blake2b(array("q", prompt).tobytes(), digest_size=8, key=seed.to_bytes(8, "little"))
        self._choices = vocabulary - 1

    def next(self) -> int:
        """The next token, in `[1, vocabulary)`."""
        token = 1 + int.from_bytes(self._hash.digest(), "little") % self._choices
        self.go_on_from(token)
        return token

    def go_on_from(self, token: int) -> None:
        """Another engine has generated this one."""
        self._hash.update(array("q", (token,)).tobytes())
