"""An option that may be given several times, and settings made from options."""

import argparse
import inspect
import time
from datetime import UTC, datetime

import pytest

from p2pserve.kvtransport.probing.figures import BoxFigures
from p2pserve.node.settings import BoxEngineSettings, BoxLinkSettings
from p2pserve.sdk.demo.demo import DemoSettings
from p2pserve.sdk.live.comparison_command import build_parser
from p2pserve.sdk.live.nodes import LiveSettings
from p2pserve.sdk.options.values import duration, moment, settings_of, throttle, ttft_limit

from .parsing import parse

JOINING = ["join", "--bootstrap", "token"]


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        ([], "", None),
        ([], "env", "env"),
        (["--bootstrap", "a"], "env", "a"),
        (["--bootstrap", "a,b", "--bootstrap", "c"], "env", "a,b,c"),
    ],
)
def test_values_are_listed_and_replace_the_environment(
    arguments: list[str], variable: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2PSERVE_BOOTSTRAP", variable)
    assert parse(["status", *arguments]).bootstrap == expected


@pytest.mark.parametrize(
    "text",
    ["2999-12-01T12:00", "2999-12-01 12:00 UTC", "2999-12-01T12:00Z", "2999-12-01T14:00+02:00", "2999-12-01T12:00:00"],
)
def test_a_time_is_utc_unless_it_names_a_zone(text: str) -> None:
    assert datetime.fromtimestamp(moment(text), UTC).isoformat() == "2999-12-01T12:00:00+00:00"
    assert str(moment(text)) == "2999-12-01T12:00 UTC"


def test_throttling_is_a_time_and_a_factor() -> None:
    assert throttle("60:1.5") == (60.0, 1.5)
    assert settings_of(BoxEngineSettings, parse([*JOINING, "--emulate-throttle", "0:2"])).emulate_throttle == (0.0, 2.0)


@pytest.mark.parametrize(
    "text", ["", "60", "60:", ":1.5", "-1:1.5", "60:0", "60:-2", "60:1e9", "nan:1.5", "60:nan", "a:b"]
)
def test_what_is_no_throttling_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"like 60:1\.5"):
        throttle(text)


@pytest.mark.parametrize(("given", "seconds"), [([], 3.0), (["--sweep-s", "0"], 0.0), (["--sweep-s", "2.5"], 2.5)])
def test_how_long_an_engine_is_measured(given: list[str], seconds: float) -> None:
    assert settings_of(BoxEngineSettings, parse([*JOINING, *given])).sweep_s == seconds


@pytest.mark.parametrize(
    ("text", "limit"), [("2x", (2.0, 0.0)), ("0.5x", (0.5, 0.0)), ("8s", (0.0, 8.0)), ("8", (0.0, 8.0))]
)
def test_a_limit_for_first_tokens_is_multiples_or_seconds(text: str, limit: tuple[float, float]) -> None:
    assert parse([*JOINING, "--max-ttft", text]).max_ttft == limit


@pytest.mark.parametrize(
    "text", ["", "x", "s", "0", "0x", "-2x", "nan", "infx", "1e9", "2xs", "2sx", "2ss", "2 x s", "soon"]
)
def test_what_is_no_limit_for_first_tokens_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="like 2x, or seconds"):
        ttft_limit(text)


def test_a_time_may_be_given_from_now() -> None:
    before = time.time()
    assert before + 7200.0 <= moment("2h") <= time.time() + 7200.0


@pytest.mark.parametrize(
    ("text", "fault"), [("2001-01-01T00:00", "has passed"), ("-5m", "is no time"), ("soon", "is no time")]
)
def test_what_is_no_time_to_come_is_refused(text: str, fault: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=fault):
        moment(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600), ("0.5h", 1800)],
)
def test_a_time_from_now_has_a_unit(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "7", "7 years", "-1d", "0s", "nand", "infd", "11000d", "d7"])
def test_what_is_no_time_from_now(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no time from now; write a number and its unit: 90s"):
        duration(text)


OPTIONS = (
    "--up-gbps 2 --usd-per-gb-up 0.1 --usd-per-gb-down 0.2 --relay-gbps 0 --site here --usd-per-s 3 "
    "--max-num-batched-tokens 1024 --tp 2 --emulate 4xA40"
)
JOIN = parse(["join", *OPTIONS.split()])


def test_options_become_the_settings_of_the_same_name() -> None:
    box = settings_of(BoxFigures, JOIN)
    assert box == BoxFigures(up_gbps=2.0, up_usd_per_gb=0.1, down_usd_per_gb=0.2, relay_gbps=0.0)
    assert settings_of(BoxLinkSettings, JOIN) == BoxLinkSettings(site="here", usd_per_s=3.0)
    engine = BoxEngineSettings(
        backend="emulated", max_batched_tokens=1024, tp=2, emulate="4xA40", emulate_specs="dense", sweep_s=3.0
    )
    assert settings_of(BoxEngineSettings, JOIN) == engine


@pytest.mark.parametrize(
    ("kind", "arguments", "others"),
    [
        (BoxEngineSettings, JOIN, {"fitting"}),
        (BoxFigures, JOIN, {"relay_budget_bytes"}),
        (DemoSettings, parse(["demo"]), set()),
        (LiveSettings, build_parser().parse_args([]), set()),
    ],
)
def test_every_setting_has_an_option(kind: type, arguments: argparse.Namespace, others: set[str]) -> None:
    """One that is renamed in one place alone would silently keep its default."""
    assert set(inspect.signature(kind).parameters) - set(vars(arguments)) == others
