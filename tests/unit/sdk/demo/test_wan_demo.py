"""`p2pserve demo --wan` before anything is started: what it refuses, and where it cannot run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2pserve.node.box.errors import NodeError
from p2pserve.sdk.demo import wan_demo
from p2pserve.sdk.demo.demo import describe_timeout
from p2pserve.sdk.demo.wan_demo import run_wan_demo
from p2pserve.sdk.errors import UsageError
from p2pserve.sdk.failures import EXIT_FAILED, EXIT_USAGE, explain

from ..commands.parsing import parse


def arguments(*given: str) -> SimpleNamespace:
    return parse(["demo", "--wan", *given])


@pytest.mark.parametrize(
    ("option", "value"),
    [("nodes", "3"), ("prompt", "import "), ("codec", "raw"), ("max-tokens", "5"), ("model", "/some/model")],
)
def test_options_of_the_other_demo_are_refused_by_name(option: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"leave --{option} out") as caught:
        run_wan_demo(arguments(f"--{option}", value))
    assert explain(caught.value) == (EXIT_USAGE, str(caught.value))


def test_where_there_are_no_namespaces_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(kind: str) -> str:
        assert kind == "tun", "a proxy has no boxes behind NAT"
        return "network namespaces are Linux's; this is darwin"

    monkeypatch.setattr(wan_demo, "unavailable", lack)
    with pytest.raises(NodeError) as caught:
        run_wan_demo(arguments())
    assert explain(caught.value) == (
        EXIT_FAILED,
        "wan: the emulated network cannot run here: network namespaces are Linux's; this is darwin",
    )


def test_nothing_is_started_where_an_option_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError(given)

    monkeypatch.setattr(trio, "run", refuse)
    monkeypatch.setattr(wan_demo, "unavailable", refuse)
    with pytest.raises(UsageError):
        run_wan_demo(arguments("--nodes", "2"))


def test_a_run_that_was_too_slow_says_how_to_give_it_longer() -> None:
    said = describe_timeout(120.0, "a link degrades", "--wan ")
    assert "while a link degrades" in said
    assert "`p2pserve demo --wan --timeout-s 240`" in said
