"""What a box that lies says of itself."""

import random
from typing import Any

import msgspec

from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import Advert, EngineAdvert
from p2pserve.sdk.chaos.liar import forge_advert, spoil

HONEST = Advert(
    hardware=Hardware(cores=4, memory_gib=8.0, processor="x"),
    draining=True,
    engine=EngineAdvert(state="restarting", kv_tokens=100),
)


def test_a_forged_advert_is_well_formed_and_of_a_better_box() -> None:
    forged = msgspec.msgpack.decode(forge_advert(random.Random(0), msgspec.msgpack.encode(HONEST)), type=Advert)
    assert forged.engine is not None
    assert (forged.engine.state, forged.draining) == ("ready", False)
    assert forged.engine.kv_tokens > 100
    assert forged.stats is not None
    assert forged.stats.running == 0


def test_what_is_spoilt_differs_in_one_place_and_the_honest_value_stays() -> None:
    honest: dict[str, Any] = {"a": [1, 2], "b": {"c": 3}}
    for seed in range(20):
        assert spoil(random.Random(seed), honest) != honest
    assert honest == {"a": [1, 2], "b": {"c": 3}}
