"""Tokens and their logprobs are cut together."""

import struct

import pytest

from p2pserve.node.engine.sampling import TopTokens
from p2pserve.node.requests.rated_tokens import RatedTokens


def top(*ids: int, width: int = 2) -> TopTokens:
    """A row for each of these: its own id, then 9; its logprob is minus the id."""
    cells = [each for token in ids for each in (token, *[9] * (width - 1))]
    return TopTokens(
        width=width,
        ids=struct.pack(f"<{len(cells)}i", *cells),
        logprobs=struct.pack(f"<{len(cells)}f", *(-float(each) for each in cells)),
        ranks=struct.pack(f"<{len(ids)}i", *ids),
    )


def rated(tokens: RatedTokens) -> list[int]:
    if tokens.logprobs is None:
        return []
    return list(struct.unpack(f"<{tokens.logprobs.rows}i", tokens.logprobs.ranks))


def test_a_slice_has_the_rows_of_its_tokens() -> None:
    tokens = RatedTokens((1, 2, 3, 4), top(1, 2, 3, 4))
    assert (tokens[1:3], rated(tokens[1:3])) == ((2, 3), [2, 3])
    assert (tokens[:1], rated(tokens[:1])) == ((1,), [1])
    assert (tokens[4:], rated(tokens[4:])) == ((), [])
    assert tokens[2] == 3
    assert tokens[:2] == (1, 2)


def test_rows_are_those_of_the_last_tokens() -> None:
    tokens = RatedTokens((1, 2, 3), top(2, 3))  # the first was told, and sampled elsewhere
    assert rated(tokens[1:]) == [2, 3]
    assert rated(tokens[:2]) == [2]
    assert rated(tokens[:1]) == []


def test_more_rows_than_tokens_are_not_looked_at() -> None:
    assert RatedTokens((1,), top(1, 2)).logprobs is None


@pytest.mark.parametrize("changes", [{"ids": b"1234"}, {"logprobs": b""}, {"ranks": b"12345"}, {"width": 3}])
def test_arrays_that_do_not_fit_together_are_no_logprobs(changes: dict[str, object]) -> None:
    fields = {name: getattr(top(1, 2), name) for name in TopTokens.__struct_fields__}
    with pytest.raises(ValueError, match="are no rows of"):
        TopTokens(**{**fields, **changes})
