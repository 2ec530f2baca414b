"""`p2pserve chat`, `models`, `version` and what `status` shows of it all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from p2pserve.sdk.actions.chat import converse
from p2pserve.sdk.actions.models import list_models, print_models
from p2pserve.sdk.actions.status_view import print_status
from p2pserve.sdk.cli import main
from p2pserve.sdk.errors import RequestFailed

from ..test_reports import BOOT, FIRST, SECOND, advert, node, status


def talk(lines: list[str], system: str | None = None) -> tuple[str, list[list[dict[str, str]]]]:
    """What is shown of a conversation, and what was asked in it; the model repeats what it was told, but fails on x."""
    shown, asked, left = StringIO(), [], iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    def answers(messages: list[dict[str, str]]) -> Iterator[str]:
        asked.append(messages)
        said = messages[-1]["content"]
        yield said[:1]
        if said == "x":
            raise RequestFailed("no engine\x1b[2J is left")
        yield said[1:]

    converse(read, shown.write, answers, system)  # type: ignore[arg-type]
    return shown.getvalue(), asked


def test_a_conversation_grows() -> None:
    shown, asked = talk(["hello", "again"], system="be brief")
    assert shown == "hello\nagain\n\n"
    assert [turn["role"] for turn in asked[1]] == ["system", "user", "assistant", "user"]
    assert asked[1][2]["content"] == "hello"


def test_a_conversation_for_programs() -> None:
    said = iter(["hello", "fail", ""])

    def answers(messages: list[dict[str, str]]) -> Iterator[str]:
        if messages[-1]["content"] == "fail":
            raise RequestFailed("no engine is left")
        yield from ("he", "llo")

    shown = StringIO()
    converse(lambda _: next(said), shown.write, answers, as_json=True)  # type: ignore[arg-type]
    turns = [json.loads(line) for line in shown.getvalue().splitlines()]
    assert turns == [{"role": "assistant", "content": "hello"}, {"error": "no engine is left"}]


def test_a_turn_that_fails_is_told_and_not_kept() -> None:
    shown, asked = talk(["x", "y", ""])
    assert "no answer: no engine" in shown
    assert "\x1b" not in shown
    assert [turn["content"] for turn in asked[1]] == ["y"]


def test_another_conversation_forgets() -> None:
    assert [len(messages) for messages in talk(["a", "/new", "b"])[1]] == [1, 1]


def test_models_are_counted_by_their_boxes() -> None:
    found = status(node(BOOT, "admin"), node(FIRST, advert=advert()), node(SECOND, advert=advert("starting")))
    (model,) = list_models(found)
    assert (model.boxes, model.ready) == (2, 1)
    text = StringIO()
    print_models([model], Console(file=text, width=80))
    assert model.service in text.getvalue()
    empty = StringIO()
    print_models([], Console(file=empty, width=200))
    assert "p2pserve join --model" in empty.getvalue()


@pytest.mark.parametrize("wide", [False, True])
def test_the_page_fits_a_terminal_unless_it_is_to_be_wide(wide: bool) -> None:
    text = StringIO()
    found = status(node(BOOT, "admin"), node(FIRST, advert=advert("restarting")))
    print_status(found, Console(file=text, width=200), wide=wide)
    table = text.getvalue().splitlines()[:3]
    assert (max(len(line.rstrip()) for line in table) > 80) == wide
    assert "engine of solar-deer: restarting" in text.getvalue()


def test_versions_are_said_also_of_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["p2pserve"]
    assert {"vllm", "torch", "python"} <= found.keys()
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("p2pserve")
