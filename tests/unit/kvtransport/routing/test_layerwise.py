"""When KV should leave layer by layer: the formula against a pipeline played through, and the decisions."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import FiguresError
from p2pserve.kvtransport.probing.figures import LinkFigures, bytes_per_s
from p2pserve.kvtransport.routing.layerwise import DecayedLine, KVShape, LayerwiseEstimator, SendDecision, SendMode

SHAPE = KVShape(layers=28, bytes_per_token_layer=1126.0)  # Qwen3-0.6B in kv4
LAN = LinkFigures(rtt_s=0.0005, one_stream_gbps=10.0, capacity_gbps=10.0)
WAN = LinkFigures(rtt_s=0.090, one_stream_gbps=0.23, capacity_gbps=1.0)


def measured(
    *,
    base_s: float = 0.004,
    token_s: float = 40e-6,
    frame_s: float = 80e-6,
    byte_s: float = 0.4e-9,
    hold_up_s: float = 150e-6,
    shape: KVShape = SHAPE,
) -> LayerwiseEstimator:
    estimator = LayerwiseEstimator(shape)
    for tokens in (64, 256, 1024, 2048):
        estimator.on_prefill(tokens, base_s + token_s * tokens)
        size = int(tokens * shape.bytes_per_token_layer)
        estimator.on_frame(size, frame_s + byte_s * size)
        estimator.on_hold_up(tokens, 1, hold_up_s)
    return estimator


def played(ready: list[float], frames: int, encode: float, send: float) -> float:
    """When the last frame has left, if each group of `frames` is encoded in turn, and sent while the next is."""
    encoded = sent = 0.0
    for moment in ready:
        for _ in range(frames):
            encoded = max(encoded, moment) + encode
            sent = max(sent, encoded) + send
    return sent


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([8, 16, 24, 32, 48]),
    st.integers(16, 8192),
    st.floats(1e-6, 2e-4),
    st.floats(1e-6, 1e-3),
    st.floats(1e-11, 3e-9),
    st.floats(1e-6, 2e-3),
    st.floats(0.05, 40.0),
)
def test_the_formula_follows_a_pipeline_played_through(
    layers: int, tokens: int, token_s: float, frame_s: float, byte_s: float, hold_up_s: float, gbps: float
) -> None:
    shape = KVShape(layers, 1126.0)
    estimator = measured(base_s=0.0, token_s=token_s, frame_s=frame_s, byte_s=byte_s, hold_up_s=hold_up_s, shape=shape)
    link = LinkFigures(rtt_s=0.0, one_stream_gbps=gbps, capacity_gbps=gbps)
    mode = estimator.decide(tokens, link, 1)
    prefill = token_s * tokens
    size = tokens * shape.bytes_per_token_layer
    encode, send = frame_s + byte_s * size, size / bytes_per_s(gbps)
    whole = played([prefill + hold_up_s], layers, encode, send) - prefill
    assert mode.visible_serialised_s == pytest.approx(whole, rel=0.02)
    best = math.inf
    for per_group in (1, 2, 4, 8, 16, 32):
        groups = layers // per_group
        if per_group < layers and layers % per_group == 0:
            ready = [(group + 1) * (prefill / groups + hold_up_s) for group in range(groups)]
            best = min(best, played(ready, per_group, encode, send) - prefill)
    # The best size may be one that does not divide the layers, which the player leaves out.
    assert mode.visible_layerwise_s <= best * 1.10
    assert mode.visible_layerwise_s >= min(encode, send)


def shortest(estimator: LayerwiseEstimator, link: LinkFigures, streams: int) -> int:
    """The shortest prompt that is better sent layer by layer, by halving."""
    low, high = 0, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        if estimator.decide(middle, link, streams).mode is SendMode.LAYERWISE:
            high = middle
        else:
            low = middle
    return high


class TestDecisions:
    def test_long_prompts_on_slow_links_go_layer_by_layer(self) -> None:
        mode = measured().decide(2048, WAN, 5)
        assert mode.mode is SendMode.LAYERWISE
        assert mode.visible_layerwise_s < mode.visible_serialised_s
        assert "hold-up" in mode.why

    def test_short_prompts_go_all_at_once(self) -> None:
        mode = measured(hold_up_s=2e-3).decide(8, LAN, 1)
        assert mode.mode is SendMode.SERIALISED
        assert mode.layers_per_group == SHAPE.layers
        assert mode.visible_serialised_s <= mode.visible_layerwise_s

    def test_transfer_as_long_as_prefill_is_hidden_but_for_a_tenth(self) -> None:
        estimator = measured(base_s=0.0, token_s=100e-6, frame_s=10e-6, byte_s=0.01e-9, hold_up_s=20e-6)
        prefill = 2048 * 100e-6
        gbps = 2048 * SHAPE.layers * SHAPE.bytes_per_token_layer / prefill / 1.25e8
        link = LinkFigures(rtt_s=1e-4, one_stream_gbps=gbps, capacity_gbps=gbps)
        mode = estimator.decide(2048, link, 1)
        assert mode.mode is SendMode.LAYERWISE
        assert mode.visible_layerwise_s <= 0.1 * mode.visible_serialised_s
        assert mode.visible_serialised_s == pytest.approx(prefill, rel=0.05)

    def test_where_layer_by_layer_begins_to_pay_comes_from_what_was_measured(self) -> None:
        cheap, dear = measured(hold_up_s=50e-6), measured(hold_up_s=5e-3)
        low, high, slow = shortest(cheap, LAN, 1), shortest(dear, LAN, 1), shortest(dear, WAN, 5)
        assert low < high / 4
        assert slow < high, "a slower link has more to hide"

    def test_where_a_hold_up_costs_a_second_it_never_pays(self) -> None:
        assert measured(hold_up_s=1.0).decide(4096, LAN, 1).mode is SendMode.SERIALISED

    def test_dear_hold_ups_are_spread_over_more_layers(self) -> None:
        few = measured(hold_up_s=5e-6).decide(2048, LAN, 1)
        many = measured(hold_up_s=1e-3).decide(2048, LAN, 1)
        assert few.layers_per_group <= 2 < many.layers_per_group

    def test_a_rising_hold_up_changes_the_mind(self) -> None:
        estimator = measured(hold_up_s=50e-6)
        assert estimator.decide(256, LAN, 1).mode is SendMode.LAYERWISE
        for tokens in (64, 1024) * 200:
            estimator.on_hold_up(tokens, 1, 20e-3)
        assert estimator.decide(256, LAN, 1).mode is SendMode.SERIALISED

    def test_what_a_transfer_costs_for_each_layer_speaks_for_neither(self) -> None:
        """Prompts that went all at once must not make those look dear that go layer by layer."""
        estimator = measured(hold_up_s=0.0)
        for tokens in (200, 300) * 50:
            estimator.on_hold_up(tokens, SHAPE.layers, 20e-6 + 0.5e-6 * tokens * SHAPE.layers)
        mode = estimator.decide(256, LAN, 1)
        assert mode.mode is SendMode.LAYERWISE
        assert mode.visible_layerwise_s < mode.visible_serialised_s / 2

    def test_until_measured_it_goes_layer_by_layer(self) -> None:
        estimator = LayerwiseEstimator(SHAPE)
        estimator.on_prefill(100, 0.01)
        assert estimator.decide(10, LAN, 1) == SendDecision(
            SendMode.LAYERWISE, 1, math.inf, math.inf, "not measured yet: frames, hold-ups"
        )
        assert "frames, hold-ups" in repr(estimator)

    def test_a_single_layer(self) -> None:
        mode = measured(shape=KVShape(1, 100.0)).decide(100, LAN, 1)
        assert mode.layers_per_group == 1

    def test_a_dead_link(self) -> None:
        dead = LinkFigures(rtt_s=0.1, one_stream_gbps=0.0, capacity_gbps=0.0)
        assert measured().decide(100, dead, 1).why == "the link moves nothing"


class TestMeasurement:
    def test_fixed_and_growing_parts_are_told_apart(self) -> None:
        rng = random.Random(3)
        estimator = LayerwiseEstimator(SHAPE)
        for _ in range(200):
            size, tokens = rng.randrange(1000, 4_000_000), rng.randrange(16, 4096)
            estimator.on_frame(size, (100e-6 + 0.5e-9 * size) * rng.uniform(0.9, 1.1))
            estimator.on_prefill(tokens, (0.005 + 50e-6 * tokens) * rng.uniform(0.95, 1.05))
            layers = rng.choice((1, 4, SHAPE.layers))
            estimator.on_hold_up(tokens, layers, (100e-6 + 20e-9 * tokens * layers) * rng.uniform(0.9, 1.1))
        assert estimator.prefill_s(2000) == pytest.approx(0.005 + 0.1, rel=0.05)
        assert estimator.held_up_s(1000, SHAPE.layers) == pytest.approx(100e-6 + 20e-6 * SHAPE.layers, rel=0.05)
        assert "us/token" in repr(estimator)

    def test_a_line_through_exact_points(self) -> None:
        line = DecayedLine(0.9)
        for x in (1.0, 2.0, 5.0):
            line.add(x, 3.0 + 0.5 * x)
        assert line.fit() == pytest.approx((3.0, 0.5))

    def test_while_one_size_has_been_seen_all_of_it_grows(self) -> None:
        line = DecayedLine(1.0)
        assert line.fit() == (0.0, 0.0)
        line.add(4.0, 2.0)
        line.add(4.0, 4.0)
        assert line.fit() == pytest.approx((0.0, 0.75))

    def test_what_shrinks_with_size_is_fixed_and_what_begins_below_nothing_grows(self) -> None:
        falling, steep = DecayedLine(1.0), DecayedLine(1.0)
        for x, y in ((1.0, 4.0), (3.0, 2.0)):
            falling.add(x, y)
        assert falling.fit() == (3.0, 0.0)
        for x, y in ((1.0, 0.0), (2.0, 2.0)):
            steep.add(x, y)
        assert steep.fit() == pytest.approx((0.0, 4.0 / 5.0))

    def test_old_samples_fade(self) -> None:
        line = DecayedLine(0.5)
        line.add(1.0, 100.0)
        for _ in range(20):
            line.add(1.0, 1.0)
        assert line.fit()[1] == pytest.approx(1.0, rel=1e-3)

    @given(st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 10)), min_size=1, max_size=30))
    def test_costs_are_never_negative(self, samples: list[tuple[int, float]]) -> None:
        line = DecayedLine(0.99)
        for size, seconds in samples:
            line.add(size, seconds)
        fixed, byte = line.fit()
        assert fixed >= 0.0
        assert byte >= 0.0

    def test_bad_measurements(self) -> None:
        estimator = LayerwiseEstimator(SHAPE)
        with pytest.raises(FiguresError, match=r"prefill\.tokens is 0"):
            estimator.on_prefill(0, 1.0)
        with pytest.raises(FiguresError, match=r"frame\.seconds is nan"):
            estimator.on_frame(1, math.nan)
        with pytest.raises(FiguresError, match=r"hold_up\.seconds is -1"):
            estimator.on_hold_up(1, 1, -1.0)
        with pytest.raises(FiguresError, match=r"decide\.tokens is 0"):
            estimator.decide(0, LAN, 1)
        with pytest.raises(FiguresError, match=r"shape\.layers"):
            KVShape(0, 1.0)
        with pytest.raises(FiguresError, match=r"shape\.bytes_per_token_layer"):
            KVShape(1, 0.0)
        with pytest.raises(FiguresError, match=r"layerwise\.half_life"):
            LayerwiseEstimator(SHAPE, half_life=0.0)


class TestByHand:
    """Four layers of 1000 bytes per token; 10 ms of prefill and 10 us of hold-up per token (and layer), 0.5 us to
    encode a byte; a link of a million bytes per second at half a second."""

    LINK = LinkFigures(rtt_s=0.5, one_stream_gbps=0.004, capacity_gbps=0.008)

    def estimator(self) -> LayerwiseEstimator:
        made = LayerwiseEstimator(KVShape(4, 1000.0))
        made.on_prefill(100, 1.0)
        made.on_frame(1000, 0.0005)
        made.on_hold_up(50, 2, 0.001)
        return made

    def test_what_both_modes_add_to_a_prompt_of_a_hundred_tokens(self) -> None:
        found = self.estimator().decide(100, self.LINK, 2)
        # All at once: held up for 4 ms, four frames of 100 ms on the link, the first of them 50 ms after it is encoded.
        assert found.visible_serialised_s == pytest.approx(0.004 + 0.4 + 0.05 + 0.5)
        # One at a time: the last is ready after 1 s and four hold-ups, and then takes as long as a frame.
        assert found.visible_layerwise_s == pytest.approx(0.004 + 0.1 + 0.05 + 0.5)
        assert (found.mode, found.layers_per_group) == (SendMode.LAYERWISE, 1)
        assert found.why == "prefill 1000.0 ms, bytes on the link 400.0 ms, hold-up 1.00 ms x 4"

    def test_one_stream_takes_twice_as_long(self) -> None:
        found = self.estimator().decide(100, self.LINK, 1)
        assert found.visible_serialised_s == pytest.approx(0.004 + 0.8 + 0.05 + 0.5)

    @pytest.mark.parametrize(("size", "seconds"), [(1, 0.004), (3, 0.006), (4, 0.004)])
    def test_how_long_groups_hold_the_engine_up(self, size: int, seconds: float) -> None:
        assert self.estimator().held_up_s(100, size) == pytest.approx(seconds), "the last group may be smaller"

    def test_the_least_that_can_be_measured(self) -> None:
        made = LayerwiseEstimator(KVShape(1, 1e-9), half_life=1e-3)
        made.on_prefill(1, 0.0)
        made.on_frame(1, 0.0)
        made.on_hold_up(1, 1, 0.0)
        found = made.decide(1, self.LINK, 1)
        assert found.visible_serialised_s == pytest.approx(0.5)
