"""When each layer of a transfer was on its way."""

from __future__ import annotations

from p2pserve.node.engine.protocol import MAX_LAYER_TIMES, LayerTimes
from p2pserve.node.engine.transfers.layer_meter import LayerMeter


def test_a_layer_is_on_its_way_from_its_first_frame_to_its_last_acknowledgement() -> None:
    meter = LayerMeter(range(2, 4))
    meter.on_sent(2, 10, 5.0)
    meter.on_sent(3, 20, 5.5)
    meter.on_sent(2, 30, 6.0)
    meter.on_acknowledged(2, 6.5)
    meter.on_acknowledged(3, 7.0)
    meter.on_acknowledged(2, 8.0)
    assert meter.times() == (
        LayerTimes(first_layer=2, last_layer=3, begin_s=0.0, end_s=3.0, wire_bytes=40),
        LayerTimes(first_layer=3, last_layer=4, begin_s=0.5, end_s=2.0, wire_bytes=20),
    )
    assert repr(meter) == "<LayerMeter 2 of 2 layers>"


def test_layers_that_never_arrived_are_left_out() -> None:
    meter = LayerMeter(range(2))
    assert meter.times() == ()
    meter.on_sent(0, 10, 1.0)
    assert meter.times() == ()


def test_of_many_layers_several_are_told_of_together() -> None:
    meter = LayerMeter(range(100))
    for layer in range(100):
        meter.on_sent(layer, 1, float(layer))
        meter.on_acknowledged(layer, layer + 1.5)
    times = meter.times()
    assert len(times) == 50 <= MAX_LAYER_TIMES
    assert times[0] == LayerTimes(first_layer=0, last_layer=2, begin_s=0.0, end_s=2.5, wire_bytes=2)
    assert times[-1].last_layer == 100
