"""Every pair of ways to cut a model on either side: who sends what, and that the numbers arrive."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kernels import codec as codecs
from p2pserve.kernels.codecs import CODECS
from p2pserve.kernels.format import Codec
from p2pserve.kvtransport.errors import FiguresError
from p2pserve.kvtransport.routing.reslice import ShardLayout, ShardRank, ShardTransfer, localise, reslice
from p2pserve.kvtransport.wire.assembly import Assembly
from p2pserve.kvtransport.wire.frames import KVFrame

TPS, HEADS, PPS = (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 3, 4)
CUTS = [(tp, pp) for tp in TPS for pp in PPS]


def check(source: ShardLayout, target: ShardLayout) -> tuple[ShardTransfer, ...]:
    """Everything that must hold of the pieces between two layouts."""
    pieces = reslice(source, target)
    got: Counter[tuple[ShardRank, int, int]] = Counter()
    for piece in pieces:
        for layer, head in product(piece.layers, piece.heads):
            assert layer in source.layers_of(piece.source)
            assert head in source.heads_of(piece.source)
            got[piece.target, layer, head] += 1
    wanted = {
        (rank, layer, head)
        for rank in target.ranks
        for layer, head in product(target.layers_of(rank), target.heads_of(rank))
    }
    assert got.keys() == wanted
    assert set(got.values()) == {1}
    # No fewer pieces would do: one for each different rectangle of the source that a target rank touches.
    touched = {
        (rank, one.stage, source.heads_of(one))
        for rank in target.ranks
        for one in source.ranks
        if set(source.layers_of(one)) & set(target.layers_of(rank))
        and set(source.heads_of(one)) & set(target.heads_of(rank))
    }
    assert len(pieces) == len(touched)
    # Ranks that hold the same differ by one piece at most.
    load: Counter[ShardRank] = Counter()
    for piece in pieces:
        load[piece.source] += piece.size
    largest = {piece.source.stage: 0 for piece in pieces}
    for piece in pieces:
        largest[piece.source.stage] = max(largest[piece.source.stage], piece.size)
    for one, other in product(source.ranks, source.ranks):
        if one.stage == other.stage and source.heads_of(one) == source.heads_of(other):
            assert abs(load[one] - load[other]) <= largest.get(one.stage, 0)
    return pieces


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("layers", [4, 13])
def test_every_pair_of_even_cuts(layers: int, kv_heads: int) -> None:
    layouts = [ShardLayout.even(tp=tp, pp=pp, layers=layers, kv_heads=kv_heads) for tp, pp in CUTS]
    for source, target in product(layouts, layouts):
        check(source, target)


@st.composite
def cut_layers(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """Up to four stages of any sizes."""
    borders = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
    edges = [0, *sorted(borders), layers]
    return tuple(b - a for a, b in pairwise(edges))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 13), st.sampled_from(HEADS), st.data())
def test_every_pair_of_uneven_cuts(layers: int, kv_heads: int, data: st.DataObject) -> None:
    def layout() -> ShardLayout:
        stages = data.draw(cut_layers(layers))
        return ShardLayout(tuple(data.draw(st.sampled_from(TPS)) for _ in stages), stages, kv_heads)

    check(layout(), layout())


def test_equal_layouts_send_each_rank_one_piece() -> None:
    layout = ShardLayout.even(tp=4, pp=2, layers=12, kv_heads=8)
    pieces = reslice(layout, layout)
    assert all(piece.source == piece.target for piece in pieces)
    assert len(pieces) == 8


def test_ranks_that_hold_the_same_heads_share_the_work() -> None:
    many = ShardLayout.uniform(8, (10,), 2)  # four ranks for each head
    pieces = reslice(many, ShardLayout.uniform(1, (3, 3, 2, 2), 2))
    assert len({piece.source for piece in pieces}) == 8


class TestLayout:
    def test_ranks_layers_and_heads(self) -> None:
        layout = ShardLayout.uniform(2, (3, 5), 4)
        assert layout.ranks == (ShardRank(0, 0), ShardRank(0, 1), ShardRank(1, 0), ShardRank(1, 1))
        assert layout.layers_of(ShardRank(1, 0)) == range(3, 8)
        assert layout.heads_of(ShardRank(1, 1)) == range(2, 4)
        mixed = ShardLayout((1, 4), (3, 5), 4)
        assert mixed.ranks == (ShardRank(0, 0), *(ShardRank(1, tp) for tp in range(4)))
        assert (mixed.heads_of(ShardRank(0, 0)), mixed.heads_of(ShardRank(1, 2))) == (range(4), range(2, 3))
        assert ShardLayout.uniform(8, (1,), 2).heads_of(ShardRank(0, 3)) == range(1)
        assert ShardLayout.uniform(8, (1,), 2).heads_of(ShardRank(0, 4)) == range(1, 2)
        assert ShardLayout.even(tp=1, pp=4, layers=13, kv_heads=1).stages == (4, 3, 3, 3)

    @pytest.mark.parametrize(
        ("tp", "stages", "heads", "message"),
        [
            (3, (1,), 8, r"layout\.tp is 3; it must divide the 8"),
            (12, (1,), 8, r"layout\.tp is 12"),
            (0, (1,), 8, r"layout\.tp is 0"),
            (1, (), 8, r"layout\.stages"),
            (1, (1, 0), 8, r"layout\.stages"),
            (1, (1,), 0, r"layout\.kv_heads is 0"),
        ],
    )
    def test_bad_layouts(self, tp: int, stages: tuple[int, ...], heads: int, message: str) -> None:
        with pytest.raises(FiguresError, match=message):
            ShardLayout.uniform(tp, stages, heads)

    def test_other_mistakes(self) -> None:
        layout = ShardLayout.uniform(2, (4,), 2)
        with pytest.raises(FiguresError, match="2 numbers for 1 stages"):
            ShardLayout((1, 1), (4,), 2)
        with pytest.raises(FiguresError, match=r"layout\.pp is 5"):
            ShardLayout.even(tp=1, pp=5, layers=4, kv_heads=1)
        with pytest.raises(FiguresError, match="does not exist"):
            layout.layers_of(ShardRank(1, 0))
        with pytest.raises(FiguresError, match="of the same model"):
            reslice(layout, ShardLayout.uniform(2, (5,), 2))
        with pytest.raises(FiguresError, match="heads that this rank does not hold"):
            localise(KVFrame(0, 0, 2, 0, 1, 0, 0, 64, b"x"), range(1, 2))


TOKENS, HEAD_DIM, LAYERS = 70, 64, 5  # one group of 64 tokens and a tail
MOVES = [
    (ShardLayout.uniform(1, (5,), 4), ShardLayout.uniform(4, (2, 3), 4)),
    (ShardLayout.uniform(2, (4, 1), 4), ShardLayout.uniform(1, (1, 1, 3), 4)),
    (ShardLayout.uniform(8, (5,), 4), ShardLayout.uniform(2, (3, 2), 4)),
    (ShardLayout.uniform(2, (2, 3), 4), ShardLayout.uniform(8, (1, 4), 4)),
]


def made_kv() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a few strong channels and values, `[layers, tokens, heads, head_dim]`."""
    generator = torch.Generator().manual_seed(7)
    k = torch.randn(LAYERS, TOKENS, 4, HEAD_DIM, generator=generator)
    k[..., :3] *= 20.0
    v = torch.randn(LAYERS, TOKENS, 4, HEAD_DIM, generator=generator)
    return k.to(torch.bfloat16), v.to(torch.bfloat16)


def sent(codec: Codec, k: torch.Tensor, v: torch.Tensor, piece: ShardTransfer) -> list[KVFrame]:
    """What the source rank of a piece sends: a frame for each of its layers."""
    heads = slice(piece.heads.start, piece.heads.stop)
    frames = []
    for layer in piece.layers:
        payload = codecs.encode(
            codec, k[layer, :, heads].contiguous(), v[layer, :, heads].contiguous(), start=0, layer=layer
        )
        dtype = codecs.wire_dtype(torch.bfloat16).wire
        frames.append(
            KVFrame(layer, piece.heads.start, piece.heads.stop, 0, TOKENS, codec.wire, dtype, HEAD_DIM, payload)
        )
    return frames


def decoded(codec: Codec, frame: KVFrame) -> tuple[torch.Tensor, torch.Tensor]:
    return codecs.decode(
        codec,
        frame.payload,
        tokens=frame.tokens,
        heads=frame.heads,
        head_dim=frame.head_dim,
        dtype=torch.bfloat16,
        start=frame.start,
        layer=frame.layer,
    )


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_the_numbers_arrive(codec: Codec, source: ShardLayout, target: ShardLayout) -> None:
    k, v = made_kv()
    whole = [
        codecs.decode(
            codec,
            codecs.encode(codec, k[layer], v[layer], start=0, layer=layer),
            tokens=TOKENS,
            heads=4,
            head_dim=HEAD_DIM,
            dtype=torch.bfloat16,
            start=0,
            layer=layer,
        )
        for layer in range(LAYERS)
    ]
    pieces = reslice(source, target)
    for rank in target.ranks:
        layers, heads = target.layers_of(rank), target.heads_of(rank)
        assembly = Assembly(layers, len(heads), TOKENS)
        for piece in pieces:
            if piece.target != rank:
                continue
            for frame in sent(codec, k, v, piece):
                assembly.add(localise(frame, heads))
                got = decoded(codec, frame)
                for part, full in zip(got, whole[frame.layer], strict=True):
                    assert torch.equal(part, full[:, frame.head_first : frame.head_last])
        assert assembly.is_done
        assembly.check_integrity()
