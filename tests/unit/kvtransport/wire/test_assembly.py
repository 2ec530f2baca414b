"""Which positions of which layers and heads have come."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import KVProtocolError
from p2pserve.kvtransport.wire.assembly import Assembly
from p2pserve.kvtransport.wire.frames import KVFrame


def frame(layer: int = 0, heads: tuple[int, int] = (0, 1), tokens: tuple[int, int] = (0, 1)) -> KVFrame:
    return KVFrame(layer, *heads, tokens[0], tokens[1] - tokens[0], 0, 0, 64, b"x")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_against_a_plain_array(data: st.DataObject) -> None:
    layers = range(data.draw(st.integers(0, 3)), data.draw(st.integers(4, 6)))
    heads, tokens, first = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(0, 5)))
    assembly = Assembly(layers, heads, tokens, first=first)
    naive = np.zeros((len(layers), heads, tokens), dtype=bool)
    for _ in range(data.draw(st.integers(0, 40))):
        layer = data.draw(st.integers(0, 6))
        head = data.draw(st.integers(0, heads))
        start = data.draw(st.integers(0, first + tokens))
        last_head = head + data.draw(st.integers(1, heads))
        piece = frame(layer, (head, last_head), (start, start + data.draw(st.integers(1, tokens))))
        inside = layer in layers and last_head <= heads and first <= start and piece.end <= first + tokens
        at = (layer - layers.start, slice(head, last_head), slice(start - first, piece.end - first))
        if inside and not naive[at].any():
            assembly.add(piece)
            naive[at] = True
        else:
            with pytest.raises(KVProtocolError):
                assembly.add(piece)
        assembly.check_integrity()
        whole = naive.all(axis=(0, 1))
        assert assembly.complete_tokens() == (tokens if whole.all() else int(whole.argmin()))
        assert assembly.is_done == bool(naive.all())


@pytest.mark.parametrize("seed", range(5))
def test_shards_of_heads_in_any_order(seed: int) -> None:
    pieces = [
        frame(layer, heads, tokens)
        for layer in range(2, 6)
        for heads in ((0, 2), (2, 3), (3, 8))
        for tokens in ((0, 512), (512, 600), (600, 601))
    ]
    random.Random(seed).shuffle(pieces)
    assembly = Assembly(range(2, 6), 8, 601)
    for piece in pieces:
        assert not assembly.is_done
        assembly.add(piece)
    assert assembly.is_done
    assert assembly.complete_tokens() == 601


def test_the_valid_prefix_of_a_broken_transfer() -> None:
    assembly = Assembly(range(2), 1, 100)
    assembly.add(frame(0, tokens=(0, 64)))
    assembly.add(frame(0, tokens=(64, 100)))
    assembly.add(frame(1, tokens=(0, 64)))
    assert assembly.complete_tokens() == 64
    assert repr(assembly) == "<Assembly 164/200, complete prefix 64 tokens>"


def test_a_refused_frame_changes_nothing() -> None:
    assembly = Assembly(range(1), 2, 10)
    assembly.add(frame(heads=(1, 2), tokens=(5, 6)))
    with pytest.raises(KVProtocolError, match=r"repeats positions 5\.\.5 of head 1"):
        assembly.add(frame(heads=(0, 2), tokens=(0, 10)))
    assembly.check_integrity()
    assembly.add(frame(heads=(0, 1), tokens=(0, 10)))


@pytest.mark.parametrize("arguments", [(range(0), 1, 1), (range(1), 0, 1), (range(1), 1, 0)])
def test_nothing_to_assemble(arguments: tuple[range, int, int]) -> None:
    with pytest.raises(ValueError, match="nothing to assemble"):
        Assembly(*arguments)


def test_intervals_that_touch_become_one_and_how_much_is_there_is_known() -> None:
    assembly = Assembly(range(1), 1, 10, first=5)
    for begin, end, complete, fraction in ((8, 10, 0, 0.2), (10, 12, 0, 0.4), (12, 15, 0, 0.7), (5, 8, 10, 1.0)):
        assert not assembly.is_done
        assembly.add(frame(tokens=(begin, end)))
        assembly.check_integrity()
        assert assembly.complete_tokens() == complete
        assert assembly.fraction == pytest.approx(fraction)
    assert assembly.is_done


@pytest.mark.parametrize(
    ("layers", "heads", "tokens", "first"),
    [(range(0), 1, 1, 0), (range(3, 0, -1), 1, 1, 0), (range(1), 0, 1, 0), (range(1), 1, 0, 0), (range(1), 1, 1, -1)],
)
def test_there_must_be_something_to_assemble(layers: range, heads: int, tokens: int, first: int) -> None:
    with pytest.raises(ValueError, match="nothing to assemble"):
        Assembly(layers, heads, tokens, first=first)
    assert Assembly(range(1), 1, 1, first=0).complete_tokens() == 0
