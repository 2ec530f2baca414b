"""Emulated boxes: cards as people name them, models by name or folder, and what a box of them can hold."""

from dataclasses import replace

import pytest

from p2pserve.coordinator.costs.gpus import GpuError
from p2pserve.coordinator.costs.model_shape import KV_CACHE_DTYPES
from p2pserve.node.box.errors import NodeError
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.engine.emulated.model import emulated_hardware, emulated_model, inspect_model, parse_cards
from p2pserve.node.models import BUNDLED, BUNDLED_MODELS, ModelError
from p2pserve.node.settings import BoxEngineSettings

HARDWARE = Hardware(cores=2, memory_gib=8.0, processor="x")


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("4xA40", 4, "A40-48GB"),
        ("l4", 1, "L4-24GB"),
        (" 2 x RTX 4090 ", 2, "RTX-4090-24GB"),
        ("8*H100", 8, "H100-SXM5-80GB"),
    ],
)
def test_cards_are_named_as_people_write_them(text: str, count: int, name: str) -> None:
    cards = parse_cards(text)
    assert (cards.count, cards.gpu.name) == (count, name)
    box = emulated_hardware(cards, HARDWARE)
    assert box.emulated
    assert [gpu.name for gpu in box.gpus] == [name] * count
    assert box.summary().startswith(f"emulated {count}x {name}")


@pytest.mark.parametrize("text", ["", "4x", "0xA40", "100xA40", "4xA41", "A40x4"])
def test_cards_that_there_are_none_of(text: str) -> None:
    with pytest.raises(GpuError, match="emulate"):
        parse_cards(text)


def test_a_model_is_a_known_name_or_a_folder() -> None:
    cards = parse_cards("2xA40")
    known = emulated_model("Llama-30B", cards)
    assert known.info.service == "llama-30b-emulated"
    assert known.folder == BUNDLED
    assert known.emulation.vocabulary == 4096  # no more than the tokenizer has
    assert known.info.weights.of_stage(0, 60) == known.emulation.model.weight_bytes
    bundled = emulated_model("bundled", cards)
    assert bundled.info.service.startswith("llama-emulated-")
    assert bundled.info.max_model_len == 2048
    prose = emulated_model("bundled-prose", cards)
    assert (prose.info.layers, prose.folder) == (6, BUNDLED_MODELS["bundled-prose"])
    with pytest.raises(ModelError, match="is not known"):
        emulated_model("llama-31b", cards)


def test_a_box_offers_what_its_cards_hold() -> None:
    knobs = BoxEngineSettings(backend="emulated", emulate="4xA40")
    box = emulated_hardware(parse_cards("4xA40"), HARDWARE)
    assert inspect_model("llama-30b", box, knobs).share.tp == 4
    for changes, words in (
        ({"emulate": "1xA40"}, "no room for KV"),
        ({"tp": 3}, "cannot share the 52 heads and 52 KV heads"),
        ({"tp": 5}, "more than the 4"),
    ):
        changed = replace(knobs, **changes)
        here = emulated_hardware(parse_cards(changed.emulate or ""), HARDWARE)
        with pytest.raises(NodeError, match=words):
            inspect_model("llama-30b", here, changed)


def test_throttling_is_told_to_the_engine() -> None:
    box = emulated_hardware(parse_cards("4xA40"), HARDWARE)
    plain = BoxEngineSettings(backend="emulated", emulate="4xA40")
    assert inspect_model("llama-30b", box, plain).options["throttling"] is None
    slower = replace(plain, emulate_throttle=(60.0, 1.5))
    assert inspect_model("llama-30b", box, slower).options["throttling"] == {"after_s": 60.0, "factor": 1.5}


def test_kv_in_8_bits_is_told_to_the_engine_and_to_others() -> None:
    box = emulated_hardware(parse_cards("4xA40"), HARDWARE)
    plain = BoxEngineSettings(backend="emulated", emulate="4xA40")
    served, eight = (
        inspect_model("llama-30b", box, replace(plain, kv_cache_dtype=dtype)) for dtype in KV_CACHE_DTYPES[:2]
    )
    chosen = inspect_model("llama-30b", box, replace(plain, kv_cache_dtype="choose"))
    assert chosen.model.info == served.model.info, "nobody knows the quality of this one"
    assert eight.model.info.service == served.model.info.service
    assert eight.model.info.shape == served.model.info.shape.with_kv_cache_dtype("fp8")
    assert eight.options["model"]["kv_value_bytes"] == 1
