"""What the owner of an emulated network and its process say to each other, and what each makes of the other's end."""

import io
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from p2pserve.sims.wan import EmulatedWan, Outage, Scenario, ScenarioError, WanBox, WanError, WanPair, WanUnavailable
from p2pserve.sims.wan.control import (
    Commands,
    EmulatorReady,
    EmulatorReply,
    LineRow,
    WanStatistics,
    run_emulator,
    say_ready,
)
from p2pserve.sims.wan.switch import LineStatistics, Switch

TWO = Scenario(boxes={"paris": WanBox(), "nyc": WanBox()}, default=WanPair(rtt_ms=50))


class Refusing:
    """An emulator that makes no route."""

    kind = "refusing"
    strays = 0

    def route(self, a: str, b: str, port: int) -> int:
        if port == 1:
            raise OSError("too many open files")
        raise ScenarioError(f"port: {port} is none")


class Clock:
    """A time that a test sets."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


def commands_of(scenario: Scenario = TWO) -> tuple[Commands, Switch[int], Clock]:
    switch, clock = Switch[int](scenario), Clock()
    return Commands(switch, Refusing(), clock), switch, clock


def ask(commands: Commands, **command: Any) -> EmulatorReply:
    return msgspec.json.decode(commands.feed(msgspec.json.encode(command) + b"\n"), type=EmulatorReply)


@pytest.mark.parametrize(("port", "says"), [(1, "too many open files"), (70_000, "port: 70000 is none")])
def test_a_route_that_cannot_be_is_an_answer_and_not_the_end(port: int, says: str) -> None:
    commands, _, _ = commands_of()
    assert says in ask(commands, type="route", a="paris", b="nyc", port=port).error
    assert ask(commands, type="outage", a="paris", b="nyc", seconds=0).error == ""


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ({"type": "set_pair", "a": "paris", "b": "rome", "changes": {}, "both": True}, "no box 'rome'"),
        ({"type": "set_pair", "a": "paris", "b": "nyc", "changes": {"rtt_ms": "5"}, "both": True}, "Expected `float"),
        ({"type": "set_pair", "a": "paris", "b": "nyc", "changes": {}}, "both"),
        ({"type": "set_box", "box": "nyc", "changes": {"up_gbps": 0.0}}, "up_gbps"),
        ({"type": "outage", "a": "paris", "b": "nyc", "seconds": -1}, "seconds"),
        ({"type": "outage", "a": "paris", "b": "nyc", "seconds": 1, "hours": 1}, "hours"),
        ({"type": "report", "since": 3}, "since"),
    ],
)
def test_a_command_that_cannot_be_is_answered_with_its_field(command: dict[str, Any], says: str) -> None:
    commands, switch, _ = commands_of()
    assert says in ask(commands, **command).error
    assert switch.rtt_ms("paris", "nyc") == 50


def test_only_one_direction_changes_where_only_one_is_meant() -> None:
    commands, switch, _ = commands_of()
    ask(commands, type="set_pair", a="paris", b="nyc", changes={"rtt_ms": 80}, both=False)
    assert (switch.rtt_ms("paris", "nyc"), switch.rtt_ms("nyc", "paris")) == (80, 50)


def test_several_commands_at_once_are_answered_in_their_order_and_half_a_line_waits() -> None:
    commands, _, _ = commands_of()
    bad, good = b'{"type":"route","a":"paris","b":"nyc","port":9}\n', b'{"type":"report"}\n'
    first, second, rest = commands.feed(bad + good + bad[:-1]).split(b"\n")
    assert b"port: 9" in first
    assert b"elapsed_s" in second
    assert rest == b""
    assert b"port: 9" in commands.feed(b"\n")
    assert commands.feed(b"") == b""


def test_an_outage_that_is_ordered_begins_now_and_one_of_the_scenario_when_it_is_due() -> None:
    outages = (Outage(a="paris", b="nyc", start_s=3, seconds=4),)
    commands, switch, clock = commands_of(msgspec.structs.replace(TWO, outages=outages))
    commands.on_timer(52.999)
    assert switch.enter("paris", "nyc", 100, 1, 52.999)
    commands.on_timer(53.0)
    assert not switch.enter("nyc", "paris", 100, 2, 56.9)
    assert switch.enter("nyc", "paris", 100, 3, 57.1)
    clock.now = 60.0
    ask(commands, type="outage", a="paris", b="nyc", seconds=2)
    assert not switch.enter("paris", "nyc", 100, 4, 61.9)
    assert switch.enter("paris", "nyc", 100, 5, 62.1)


def test_outages_that_are_due_together_all_start() -> None:
    outages = tuple(Outage(a="paris", b="nyc", start_s=start, seconds=1) for start in (1, 1, 2, 9))
    commands, switch, _ = commands_of(msgspec.structs.replace(TWO, outages=outages))
    commands.on_timer(52.5)
    assert commands.wake_at() == 59.0
    assert not switch.enter("paris", "nyc", 100, 1, 53.4), "the last that started counts"


def test_a_report_has_each_direction_by_its_ends() -> None:
    figures = LineStatistics(
        packets=1, bytes=2, lost=3, dropped=4, dead=5, waiting_bytes=6, queue_ms_mean=7, queue_ms_max=8
    )
    report = WanStatistics(
        kind="tun", elapsed_s=1, cpu_s=1, late_ms_mean=0, late_ms_max=0, strays=0, boxes={},
        rows=[LineRow("paris", "nyc", figures), LineRow("nyc", "paris", msgspec.structs.replace(figures, lost=9))],
    )  # fmt: skip
    assert report.lines["paris", "nyc"].lost == 3
    assert report.lines["nyc", "paris"].lost == 9


class Owner:
    """The two pipes of an emulator's process."""

    def __init__(self, text: bytes) -> None:
        self.buffer = io.BytesIO(text)
        self.said: list[bytes] = []

    def fileno(self) -> int:
        return -1

    def write(self, _descriptor: int, data: bytes) -> int:
        self.said.append(data)
        return len(data)


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def owner(monkeypatch: pytest.MonkeyPatch, text: bytes) -> Owner:
    made = Owner(text)
    monkeypatch.setattr("sys.stdin", made)
    monkeypatch.setattr("sys.stdout", made)
    monkeypatch.setattr("os.write", made.write)
    return made


@pytest.mark.usefixtures("signals")
def test_an_emulator_runs_the_scenario_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    made = owner(monkeypatch, TWO.to_json().encode() + b"\n")
    ran: list[Scenario] = []

    def run(scenario: Scenario) -> None:
        ran.append(scenario)
        say_ready(EmulatorReady(addresses={"paris": "10.0.0.1"}))

    assert run_emulator(run) == 0
    assert ran == [TWO]
    (line,) = made.said
    assert line.endswith(b"\n")
    assert msgspec.json.decode(line, type=EmulatorReady).addresses == {"paris": "10.0.0.1"}
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    signal.raise_signal(signal.SIGINT)  # is the owner's business


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("error", "unavailable"), [(ScenarioError("boxes: none"), False), (WanUnavailable("no /dev/net/tun"), True)]
)
def test_an_emulator_that_cannot_run_says_why_and_whose_fault_it_is(
    monkeypatch: pytest.MonkeyPatch, error: Exception, unavailable: bool
) -> None:
    made = owner(monkeypatch, TWO.to_json().encode() + b"\n")

    def run(scenario: Scenario) -> None:
        raise error

    assert run_emulator(run) == 1
    said = msgspec.json.decode(made.said[0], type=EmulatorReady)
    assert (said.error, said.unavailable) == (str(error), unavailable)


@pytest.mark.usefixtures("signals")
def test_an_emulator_is_told_no_scenario_or_loses_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    made = owner(monkeypatch, b"{}\n")
    assert run_emulator(lambda scenario: None) == 1
    assert "boxes" in msgspec.json.decode(made.said[0], type=EmulatorReady).error
    made = owner(monkeypatch, TWO.to_json().encode() + b"\n")

    def run(scenario: Scenario) -> None:
        raise BrokenPipeError

    assert run_emulator(run) == 1
    assert made.said == [], "nobody is there to hear it"


def test_a_network_that_is_not_up_says_so() -> None:
    wan = EmulatedWan(TWO, kind="proxy")
    assert repr(wan) == "<EmulatedWan proxy of paris, nyc: down>"
    with pytest.raises(ScenarioError, match="no box 'rome'; boxes: paris, nyc"):
        wan.address("rome")
    for use in (
        lambda: wan.address("paris"),
        lambda: wan.command("paris", ["ls"]),
        lambda: wan.set_box("paris", up_gbps=1.0),
        lambda: wan.outage("paris", "nyc", 1.0),
        wan.statistics,
    ):
        with pytest.raises(WanError, match="use it in its `with` block"):
            use()
    wan.close()
    wan.close()


def test_a_tun_network_where_it_cannot_be_names_the_other_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pserve.sims.wan.namespaces.unavailable", lambda: "needs root")
    with pytest.raises(WanUnavailable, match="needs root; or take kind='proxy'"), EmulatedWan(TWO, kind="tun"):
        pass
