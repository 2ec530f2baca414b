"""The words that `plan --explain` explains are those of docs/words.md."""

import re
from pathlib import Path

import pytest

from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.plan import Deadlines
from p2pserve.sdk.explaining import glossary
from p2pserve.sdk.explaining.plan_words import explain_plan

ROOT = Path(__file__).resolve().parents[4]


def test_the_packaged_words_are_the_page() -> None:
    assert glossary.PAGE.read_bytes() == (ROOT / "docs/words.md").read_bytes()


def test_words_are_read_from_the_tables() -> None:
    words = glossary.read_glossary()
    assert words["replica"].startswith("the GPUs that together hold one copy of a model")
    assert words["TP"].startswith("each layer is shared")
    assert words["prefill"] == words["decode"]
    assert words["share"].startswith("the part of all requests")
    assert "word" not in words
    assert not {word for word in words if set(word) <= set("- ")}
    assert not {word for word in words if word.endswith("*")}, "words that are not used are no glossary"


def test_an_unknown_word_is_no_word() -> None:
    with pytest.raises(KeyError):
        glossary.meaning_of("flux")


def test_every_word_of_the_issue_is_on_the_page() -> None:
    for word in (
        *("replica", "phase", "TP", "PP", "layer range", "goodput", "attainment", "TTFT", "TPOT", "E2E", "share"),
        *("orchestration", "prefill chunk", "chunk", "codec", "limit", "busy", "batch", "objective", "capacity"),
    ):
        assert glossary.meaning_of(word)


def test_a_plan_alone_is_explained_by_its_own_figures() -> None:
    one = Replica(
        id="a", phase=Phase.PREFILL, step_tokens=2048,
        stages=(
            Stage(peer="a", tp=2, first_layer=0, last_layer=20), Stage(peer="b", tp=1, first_layer=20, last_layer=32)
        ),
    )  # fmt: skip
    two = Replica(
        id="c", phase=Phase.MIXED, stages=(Stage(peer="c", tp=4, first_layer=0, last_layer=32),), step_tokens=256
    )
    plan = Plan(
        epoch=1, version=2, service="m", replicas=(one, two), codec="kv4", why=(), deadlines=Deadlines(ttft_s=1.5),
        pairings=(Pairing(prefill="a", decode="c", weight=0.75), Pairing(prefill="c", decode="c", weight=0.25)),
    )  # fmt: skip
    here = {each.word: each.here for each in explain_plan(plan).words}
    assert here["replica"] == "2 replicas on 7 GPUs, of 32 layers each"
    assert here["phase"] == "prefill: a; mixed: c"
    assert here["TP"] == "c has TP 4"
    assert here["PP"] == "a has 2 stages"
    assert here["layer range"] == "a holds [0,20) on a, [20,32) on b"
    assert here["share"] == "75.0% of requests go from a to c, the most of 2 pairings"
    assert here["orchestration"] == "X: 0.750 of requests prefill on a; Y: 1.000 of those decode on c"
    assert here["prefill chunk"] == "256 tokens a step at most on c, 2048 on a"
    assert here["TTFT"] == "the plan is for 1.5 s"
    assert "TPOT" not in here, "no deadline, and nothing is expected of a plan alone"


def test_a_definition_is_written_once() -> None:
    source = (ROOT / "sdk/explaining/plan_words.py").read_text("utf-8")
    for word, meaning in glossary.read_glossary().items():
        assert len(meaning) < 40 or meaning not in re.sub(r"\s+", " ", source), word
