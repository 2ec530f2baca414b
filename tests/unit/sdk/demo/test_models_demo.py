"""`p2pserve demo --models` before and after its run: what it refuses, what it asks, how it shows what it found."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
import trio
from rich.console import Console

from p2pserve.sdk.demo.models_demo import (
    ModelAnswer,
    ModelsDemoReport,
    find_problems,
    fold_lines,
    questions,
    run_models_demo,
    show_models_report,
)
from p2pserve.sdk.errors import UsageError

from ..commands.parsing import parse

CODE = ModelAnswer(
    client=1,
    model="bundled",
    prompt_end="    def pop(self):\n",
    text="        return self.items.pop()\n\n\n\ndef f():",
    finish="length",
    prompt_tokens=541,
    completion_tokens=64,
    ttft_s=0.7,
    tpot_s=0.0242,
    tokens_agreeing=64,
    identical_to_own_engine=True,
)
PROSE = msgspec.structs.replace(CODE, client=2, model="bundled-prose", text=' had "been" so' * 20 + ".\n\nShe went.")
REPORT = ModelsDemoReport(
    ok=True,
    problems=(),
    services={"bundled": "llama-1", "bundled-prose": "llama-2"},
    engine_pids=(7,),
    answers=(CODE, PROSE),
    asking_s=3.9,
    engines_ready_s=21.7,
    elapsed_s=33.0,
    peak_memory_mib=1350.0,
)


@pytest.mark.parametrize(
    ("option", "value"), [("nodes", "3"), ("prompt", "import "), ("codec", "raw"), ("model", "/some/model")]
)
def test_options_of_the_other_demo_are_refused_by_name(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError(given)

    monkeypatch.setattr(trio, "run", refuse)
    with pytest.raises(UsageError, match=f"--models has .*; leave --{option} out"):
        run_models_demo(parse(["demo", "--models", f"--{option}", value]))


def test_each_client_asks_its_model_for_two_different_texts() -> None:
    asked = questions()
    assert [(each.client, each.model) for each in asked] == [(1, "bundled")] * 2 + [(2, "bundled-prose")] * 2
    assert len({each.prompt for each in asked}) == 4
    assert all(1000 < len(each.prompt) < 2000 for each in asked)


def test_it_is_shown_within_80_columns() -> None:
    told = io.StringIO()
    show_models_report(REPORT, Console(file=told, width=200, soft_wrap=True, highlight=False, markup=False))
    lines = [line.rstrip() for line in told.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert "            return self.items.pop()" in lines  # code as it is
    assert "    She went." in lines
    assert lines[-1] == "everything worked"
    shown = "2 bundled-prose 541 + 64 700 ms 24.2 ms 64 of 64 tokens"
    assert shown in {" ".join(line.split()) for line in lines}


def test_long_lines_are_folded_between_words_and_short_ones_stay() -> None:
    assert fold_lines("    code = 1\n\nx", "  ") == ["      code = 1", "", "  x"]
    folded = fold_lines("word " * 40, "    ")
    assert " ".join(line.strip() for line in folded).split() == ["word"] * 40
    assert len(folded) == 3


def test_what_did_not_go_as_it_should_have_is_said() -> None:
    assert find_problems([CODE, PROSE], (7,)) == ()
    parted = msgspec.structs.replace(PROSE, tokens_agreeing=9, identical_to_own_engine=False)
    lost = msgspec.structs.replace(CODE, finish="error", completion_tokens=3)
    assert find_problems([lost, parted], (7, 8)) == (
        "the engines are in 2 processes",
        "bundled: ended with 'error' after 3 tokens",
        "bundled-prose: parts from an engine of its own after 9 tokens",
    )
