"""What the workers of two replicas transfer to each other: each part of the KV once, between those that hold it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.kvtransport.wire.tickets import TransferTicket
from p2pserve.node.engine.protocol import KvSlice, WorkerRank
from p2pserve.node.messages import RankSlice, TicketedSlice
from p2pserve.node.replica.place import Place, PlaceError, check_sends, find_place, slices_between


def stages(name: str, *layers: int, tp: int = 1) -> tuple[Stage, ...]:
    """Boxes called after the replica, each with so many layers on `tp` GPUs."""
    return unequal(name, layers, (tp,) * len(layers))


def unequal(name: str, layers: tuple[int, ...], widths: tuple[int, ...]) -> tuple[Stage, ...]:
    """The same, on so many GPUs each."""
    ends = [sum(layers[: i + 1]) for i in range(len(layers))]
    return tuple(
        Stage(peer=f"{name}{i}", tp=tp, first_layer=end - count, last_layer=end)
        for i, (count, end, tp) in enumerate(zip(layers, ends, widths, strict=True))
    )


def parts(pieces: tuple[RankSlice, ...], transfer: bytes = b"t" * 16) -> tuple[TicketedSlice, ...]:
    return tuple(
        TicketedSlice(rank_slice=each, ticket=TransferTicket(transfer, b"l" * 16, "raw", 1.0)) for each in pieces
    )


def test_one_box_sends_everything_to_one_box() -> None:
    (piece,) = slices_between(stages("p", 4), stages("d", 4), layers=4, kv_heads=2)
    whole = KvSlice(first_layer=0, last_layer=4, first_head=0, last_head=2)
    assert piece == RankSlice(source_peer="p0", source=WorkerRank(), target_peer="d0", target=WorkerRank(), slice=whole)


def test_stages_send_straight_to_the_stages_that_need_it() -> None:
    found = slices_between(stages("p", 1, 3), stages("d", 2, 2), layers=4, kv_heads=2)
    ends = [(each.source_peer, each.target_peer, each.slice.first_layer, each.slice.last_layer) for each in found]
    assert ends == [("p0", "d0", 0, 1), ("p1", "d0", 1, 2), ("p1", "d1", 2, 4)]
    assert [(each.source.stage, each.target.stage) for each in found] == [(0, 0), (1, 0), (1, 1)]


def test_workers_of_one_box_have_their_own_heads() -> None:
    found = slices_between(stages("p", 4), stages("d", 4, tp=2), layers=4, kv_heads=2)
    assert [(each.target.tp, each.slice.first_head, each.slice.last_head) for each in found] == [(0, 0, 1), (1, 1, 2)]


@given(
    st.sampled_from([(6,), (2, 4), (5, 1), (1, 3, 2), (1,) * 6]),
    st.sampled_from([(6,), (3, 3), (1, 5), (2, 2, 2)]),
    st.data(),
)
def test_every_layer_and_head_comes_to_each_of_its_holders_once_and_from_one_that_holds_it(
    left: tuple[int, ...], right: tuple[int, ...], data: st.DataObject
) -> None:
    def widths(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(data.draw(st.sampled_from([1, 2, 4, 8])) for _ in layers)

    prefill, decode = unequal("p", left, widths(left)), unequal("d", right, widths(right))
    found = slices_between(prefill, decode, layers=6, kv_heads=4)
    copies = [
        (each.target_peer, each.target, layer, head)
        for each in found
        for layer in each.slice.layers
        for head in each.slice.heads
    ]
    assert len(copies) == len(set(copies)) == sum(stage.layers * 4 * max(1, stage.tp // 4) for stage in decode)
    check_sends(parts(found), Place(prefill, 0), kv_heads=4)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (stages("p", 5), "5 layers"),
        (stages("p", 4, tp=3), "divide"),
        ((*stages("p", 2), *stages("q", 4)[:0]), "2 layers"),
        (stages("p", 2, 2)[::-1], "starts at layer"),
        (stages("p", 2, 2)[:1] * 2, "starts at layer"),
        ((), "no stages"),
        ((stages("p", 2, 2)[0], stages("p", 2, 2, tp=3)[1]), "divide"),
    ],
)
def test_stages_that_hold_no_such_model_are_refused(wrong: tuple[Stage, ...], said: str) -> None:
    for prefill, decode in ((wrong, stages("d", 4)), (stages("p", 4), wrong)):
        with pytest.raises(PlaceError, match=said):
            slices_between(prefill, decode, layers=4, kv_heads=2)


def forged(piece: RankSlice, **changes: object) -> RankSlice:
    return msgspec.structs.replace(piece, **changes)


def test_what_is_wanted_must_be_here() -> None:
    place = Place(stages("p", 2, 2), 0)
    good = slices_between(place.stages, stages("d", 4), layers=4, kv_heads=2)
    check_sends(parts(good), place, kv_heads=2)
    wrong = [
        (forged(good[0], target_peer="p1"), "another replica"),
        (forged(good[0], source_peer="p1"), "no worker"),
        (forged(good[0], source=WorkerRank(stage=2)), "no worker"),
        (forged(good[0], source=WorkerRank(tp=1)), "no worker"),
        (forged(good[0], slice=good[1].slice), "does not hold"),
        (forged(good[0], slice=KvSlice(first_layer=0, last_layer=2, first_head=1, last_head=3)), "does not hold"),
    ]
    for bad, said in wrong:
        with pytest.raises(PlaceError, match=said):
            check_sends(parts((bad, good[1])), place, kv_heads=2)
    with pytest.raises(PlaceError, match="different transfers"):
        check_sends((*parts(good[:1]), *parts(good[1:], b"u" * 16)), place, kv_heads=2)


def test_a_place_is_what_the_plan_says_of_a_box_among_others() -> None:
    own, other = PeerId("x1"), PeerId("w0")
    replicas = tuple(
        Replica(id=each[0].peer, phase=Phase.MIXED, stages=each) for each in (stages("w", 4), stages("x", 1, 2, 1))
    )
    pairings = tuple(Pairing(prefill=each.id, decode=each.id, weight=0.5) for each in replicas)
    plan = Plan(epoch=1, version=1, service="s", replicas=replicas, pairings=pairings, codec="raw", why=())
    place = find_place(plan, own, "s")
    assert place == Place(stages("x", 1, 2, 1), 1)
    assert place is not None
    assert (place.head, place.is_head, place.partition, place.others) == ("x0", False, (1, 2, 1), ("x0", "x2"))
    assert str(place) == "2/3 layers 1-2"
    for wrong in (find_place(plan, other, "s"), find_place(plan, own, "t"), find_place(None, own, "s")):
        assert wrong is None
    assert find_place(plan, PeerId("stranger"), "s") is None
    assert Place(stages("w", 4), 0).partition == ()
    assert Place(stages("w", 1, 3), 0).partition == (1, 3)


def test_two_boxes_are_several() -> None:
    replica = Replica(id="a0", phase=Phase.MIXED, stages=stages("a", 1, 3))
    alone = Pairing(prefill="a0", decode="a0", weight=1.0)
    plan = Plan(epoch=1, version=1, service="s", replicas=(replica,), pairings=(alone,), codec="raw", why=())
    assert find_place(plan, PeerId("a1"), "s") == Place(replica.stages, 1)
