"""When a prompt's layers leave: each exactly once, in every mode, and by measurement where nobody asks otherwise."""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.routing.layerwise import SendDecision, SendMode
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket
from p2pserve.node.engine.protocol import KvSlice, Outlet
from p2pserve.node.engine.settings import TransferSettings
from p2pserve.node.engine.transfers.pacing import Pacer, Pacing, SlowDown
from p2pserve.node.engine.vllm.layout import Shard

LINK = LinkTicket(link=b"l" * 16, secret=b"s" * 32, lease_s=600.0)
TICKET = TransferTicket(transfer=b"t" * 16, link=LINK.link, codec="kv4", deadline_s=30.0)
LAYERS = 24


def pacer_of(layers: int = LAYERS) -> Pacer:
    return Pacer(Shard(layers=range(layers), heads=range(8), head_dim=128, dtype=torch.bfloat16))


def outlet_of(
    gbps: float = 1.0,
    rtt_s: float = 0.001,
    pacing: Literal["auto", "layerwise", "serialised"] = "auto",
    streams: tuple[int, ...] = (4,),
    heads: int = 8,
) -> Outlet:
    paths = tuple(DialPath("192.0.2.1", 1, label=f"path{i}", streams=n) for i, n in enumerate(streams))
    part = KvSlice(first_layer=0, last_layer=LAYERS, first_head=0, last_head=heads)
    return Outlet(slice=part, ticket=TICKET, link=LINK, paths=paths, gbps=gbps, rtt_s=rtt_s, pacing=pacing)


def sent_layers(pacing: Pacing, layers: int) -> list[int]:
    """The layers in the order in which one step hands them over; what is serialised leaves at its end."""
    found = [each for position in range(layers) for each in pacing.layers_due(position, layers)]
    return found if pacing.layerwise else [*found, *range(layers)]


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(1, 130), group=st.integers(1, 140), mode=st.sampled_from(SendMode))
def test_each_layer_leaves_exactly_once_and_never_before_it_is_computed(
    layers: int, group: int, mode: SendMode
) -> None:
    pacing = Pacing(SendDecision(mode, group, 0.0, 0.0, "a test"), pacer_of(layers), "kv4")
    assert sent_layers(pacing, layers) == list(range(layers))
    for position in range(layers):
        due = pacing.layers_due(position, layers)
        assert len(due) <= group
        assert all(each <= position for each in due)
        assert not due or due[-1] == position


def pacing_of(pacer: Pacer, mode: SendMode) -> Pacing:
    return Pacing(SendDecision(mode, 1, 0.0, 0.0, "a test"), pacer, "kv4")


def measured(pacer: Pacer, *, hold_up_s: float = 0.0005, token_s: float = 0.0005, slowed_down: float = 1.0) -> None:
    """An engine that has prefilled, announced and encoded for a while; a prefill beside which layers leave takes
    `slowed_down` times as long."""
    for tokens in (100, 400, 800):
        pacer.on_prefill([pacing_of(pacer, SendMode.SERIALISED)], tokens, tokens * token_s)
        pacer.on_prefill([pacing_of(pacer, SendMode.LAYERWISE)], tokens, tokens * token_s * slowed_down)
    for tokens in (100, 200, 400, 800):
        pacer.on_hold_up("kv4", tokens, 1, hold_up_s)
        pacer.on_frame("kv4", 1 << 20, 0.0005)


def test_before_anything_is_measured_layers_leave_one_by_one() -> None:
    """So that all of it gets measured."""
    pacing = pacer_of().decide("kv4", 1000, outlet_of())
    assert (pacing.mode.mode, pacing.mode.layers_per_group) == (SendMode.LAYERWISE, 1)
    assert "not measured yet" in pacing.mode.why


def test_the_engine_decides_by_what_it_has_measured_and_by_the_link() -> None:
    """A short prompt on a fast link is not worth announcing layers one by one, a long one on a slow link is."""
    pacer = pacer_of()
    measured(pacer, hold_up_s=0.002)
    short = pacer.decide("kv4", 8, outlet_of(gbps=100.0))
    long = pacer.decide("kv4", 2000, outlet_of(gbps=0.5))
    assert short.mode.mode is SendMode.SERIALISED
    assert long.mode.mode is SendMode.LAYERWISE
    assert long.mode.visible_layerwise_s < long.mode.visible_serialised_s
    assert sent_layers(short, LAYERS) == sent_layers(long, LAYERS) == list(range(LAYERS))


def test_layers_stay_when_leaving_would_slow_the_prefill_down_by_more_than_it_hides() -> None:
    """On a slow link they leave all the same: there is more to hide."""
    ways = {"near": outlet_of(gbps=5.0), "far": outlet_of(gbps=0.5)}
    free, slowed = pacer_of(), pacer_of()
    measured(free)
    measured(slowed, slowed_down=1.2)
    modes = {
        name: (free.decide("kv4", 500, way).mode, slowed.decide("kv4", 500, way).mode) for name, way in ways.items()
    }
    assert [mode.mode for mode in modes["near"]] == [SendMode.LAYERWISE, SendMode.SERIALISED]
    assert [mode.mode for mode in modes["far"]] == [SendMode.LAYERWISE, SendMode.LAYERWISE]
    at_ease, hurt = modes["near"]
    assert hurt.visible_layerwise_s > hurt.visible_serialised_s > at_ease.visible_layerwise_s
    assert hurt.layers_per_group == LAYERS
    assert "slowed down by 0.0 ms" in at_ease.why
    assert "slowed down by 50.0 ms" in hurt.why  # a fifth of 0.25 s


def test_what_holds_the_engine_up_counts_for_the_first_token_too() -> None:
    """Three announcements of 2 ms would be worth it for the second token alone."""
    pacer = pacer_of()
    measured(pacer, hold_up_s=0.002)
    mode = pacer.decide("kv4", 500, outlet_of(gbps=10.0)).mode
    assert mode.visible_layerwise_s < mode.visible_serialised_s < mode.visible_layerwise_s + 3 * 0.002
    assert mode.mode is SendMode.SERIALISED


def test_both_ways_are_taken_in_turn_until_the_prefills_of_each_are_known() -> None:
    pacer = pacer_of()
    taken = []
    for _ in range(8):
        pacing = pacer.decide("kv4", 500, outlet_of(gbps=0.5))
        taken.append(pacing.mode.mode.value[0])
        pacer.on_prefill([pacing], 500, 0.25)
        pacer.on_hold_up("kv4", 500, LAYERS, 0.001)
        pacer.on_frame("kv4", 1 << 20, 0.0005)
    assert "".join(taken) == "lslslsll"


def test_when_the_machine_changes_both_ways_are_measured_again() -> None:
    """Else the way that is not taken would be judged by a time when the machine was quieter, and stay taken."""
    pacer, outlet = pacer_of(), outlet_of(gbps=100.0)
    measured(pacer, slowed_down=2.0)
    taken: list[SendMode] = []

    def prefill(machine: float) -> None:
        mode = pacer.decide("kv4", 400, outlet).mode.mode
        taken.append(mode)
        beside = 2.0 if mode is SendMode.LAYERWISE else 1.0
        pacer.on_prefill([pacing_of(pacer, mode)], 400, 0.2 * beside * machine)

    for _ in range(10):
        prefill(1.0)
    assert taken == [SendMode.SERIALISED] * 10
    for _ in range(20):
        prefill(3.0)
    again = taken[10:]
    assert again.count(SendMode.LAYERWISE) == TransferSettings().prefills_enough
    assert again[-8:] == [SendMode.SERIALISED] * 8


def test_a_step_is_slowed_down_by_any_transfer_whose_layers_leave_beside_it() -> None:
    pacer = pacer_of()
    measured(pacer)
    both = [pacing_of(pacer, mode) for mode in SendMode]
    for _ in range(8):
        pacer.on_prefill(both, 500, 2 * 500 * 0.0005)
    assert pacer.decide("kv4", 500, outlet_of(gbps=5.0)).mode.mode is SendMode.SERIALISED


def test_a_prefill_that_was_held_up_by_others_decides_nothing() -> None:
    """On a busy machine any may take ten times as long."""
    for mode in SendMode:
        pacer = pacer_of()
        measured(pacer)
        pacer.on_prefill([pacing_of(pacer, mode)], 400, 10 * 400 * 0.0005)
        assert pacer.decide("kv4", 500, outlet_of(gbps=0.5)).mode.mode is SendMode.LAYERWISE


def test_a_link_that_carries_half_of_it_is_as_good_as_one_twice_as_fast() -> None:
    pacer = pacer_of()
    measured(pacer)
    half, whole = outlet_of(gbps=0.5, heads=4), outlet_of(gbps=1.0)
    assert pacer.decide("kv4", 500, half).mode == pacer.decide("kv4", 500, whole).mode
    assert pacer.decide("kv4", 500, outlet_of(gbps=0.5)).mode != pacer.decide("kv4", 500, whole).mode


def test_a_link_that_moves_nothing_is_no_reason_to_fail() -> None:
    pacer = pacer_of()
    measured(pacer)
    assert pacer.decide("kv4", 100, outlet_of(gbps=0.0)).mode.mode is SendMode.SERIALISED


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize(("tokens", "gbps"), [(8, 100.0), (2000, 0.5)])
def test_what_is_asked_for_is_done(is_measured: bool, tokens: int, gbps: float) -> None:
    pacer = pacer_of()
    if is_measured:
        measured(pacer, hold_up_s=0.002)
    for pacing in ("layerwise", "serialised"):
        found = pacer.decide("kv4", tokens, outlet_of(gbps, pacing=pacing))
        assert found.mode.mode.value == pacing
        assert found.layerwise == (pacing == "layerwise")
        assert sent_layers(found, LAYERS) == list(range(LAYERS))
        if found.mode.why == "asked for":  # otherwise than it would have decided
            assert found.mode.layers_per_group == {"layerwise": 1, "serialised": LAYERS}[pacing]


def test_a_link_without_paths_is_no_reason_to_fail() -> None:
    pacer = pacer_of()
    measured(pacer)
    assert pacer.decide("kv4", 100, outlet_of(streams=())).mode.visible_serialised_s > 0.0


LAYERWISE, SERIALISED = SendMode.LAYERWISE, SendMode.SERIALISED


def usual_s(tokens: int) -> float:
    return 0.001 * tokens


def slow_down_of(layerwise: list[float], serialised: list[float], enough: int = 2) -> SlowDown:
    """Prefills that took so many times as long as usual, of different lengths."""
    found = SlowDown(TransferSettings(prefills_enough=enough, changed=1.5))
    for mode, parts in ((LAYERWISE, layerwise), (SERIALISED, serialised)):
        for number, part in enumerate(parts):
            tokens = 100 * (1 + number)
            found.on_prefill(mode, tokens, part * usual_s(tokens))
    return found


@pytest.mark.parametrize(
    ("layerwise", "serialised", "fraction"),
    [([3.0, 2.0], [1.0, 1.2], 1.4), ([1.0, 9.0, 2.0], [0.5, 1.5, 1.0], 1.0), ([1.0, 1.0], [1.0, 1.2], 0.0)],
)
def test_what_leaving_layers_add_is_the_difference_of_medians(
    layerwise: list[float], serialised: list[float], fraction: float
) -> None:
    assert slow_down_of(layerwise, serialised).fraction(usual_s) == pytest.approx(fraction)


@pytest.mark.parametrize(
    ("layerwise", "serialised", "unmeasured"),
    [(0, 0, "l"), (1, 0, "s"), (1, 1, "l"), (2, 1, "s"), (1, 2, "l"), (2, 2, "")],
)
def test_the_mode_of_which_fewer_prefills_are_known_is_tried_until_there_are_enough(
    layerwise: int, serialised: int, unmeasured: str
) -> None:
    mode = slow_down_of([1.0] * layerwise, [1.0] * serialised).unmeasured_mode
    assert mode is {"l": LAYERWISE, "s": SERIALISED, "": None}[unmeasured]


@pytest.mark.parametrize(
    ("parts", "forgotten"),
    [
        ([1.0, 1.0, 1.51, 1.51], True),
        ([1.0, 1.0, 1.49, 1.49], False),
        ([1.0, 1.0, 0.66, 0.66], True),
        ([1.0, 1.0, 0.67, 0.67], False),
        ([1.0, 9.0, 9.0], False),  # one before the last two is not enough
        ([1.0, 1.0, 1.0, 9.0, 9.0], True),
    ],
)
def test_prefills_of_another_time_are_forgotten_but_for_the_last(parts: list[float], forgotten: bool) -> None:
    slow_down = slow_down_of(parts, [1.0, 1.0])
    slow_down.notice_change(LAYERWISE, usual_s)
    assert slow_down.unmeasured_mode is (SERIALISED if forgotten else None)
    if forgotten:
        for _ in range(2):
            slow_down.on_prefill(SERIALISED, 100, usual_s(100))
        assert slow_down.fraction(usual_s) == pytest.approx(max(0.0, parts[-1] - 1.0))


def test_codecs_are_measured_apart_and_a_transfer_feeds_its_own() -> None:
    pacer = pacer_of()
    measured(pacer)
    assert "not measured yet" in pacer.decide("raw", 100, outlet_of()).mode.why
    pacing = pacer.decide("raw", 100, outlet_of(streams=(2, 3)))
    pacing.on_frame(1 << 20, 0.001)
    assert "frames" not in pacer.decide("raw", 100, outlet_of()).mode.why
    assert "not measured yet" not in pacer.decide("kv4", 100, outlet_of()).mode.why
