"""Real sockets over emulated networks: rates, delays, outages and changes as set; nothing left behind."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2pserve.sims.wan import (
    EmulatedWan,
    Kind,
    Scenario,
    ScenarioError,
    WanBox,
    WanError,
    WanPair,
    WanUnavailable,
    measure,
    namespaces,
    unavailable,
)
from p2pserve.sims.wan.calibrate import calibrate, table
from p2pserve.sims.wan.emulated import environment

from ..node.engine.figures import measured_again

ROOT = Path(__file__).resolve().parents[3]
WAN = [sys.executable, "-m", "p2pserve.sims.wan"]
REASON = unavailable("tun")
needs_tun = pytest.mark.skipif(REASON is not None, reason=f"no TUN emulation here: {REASON}")
KINDS = [pytest.param("tun", marks=needs_tun), "proxy"]


def scenario(gbps: float = 1.0, **pair: float) -> Scenario:
    return Scenario(
        boxes={name: WanBox(up_gbps=gbps, down_gbps=gbps) for name in ("paris", "nyc", "tokyo")},
        default=WanPair(rtt_ms=20),
        pairs={("paris", "nyc"): WanPair(**pair)} if pair else {},
    )


@needs_tun
def test_one_stream_has_the_rate_of_its_window_and_four_have_four_times_that() -> None:
    def check() -> None:
        calibration = calibrate("tun", seconds=3, quick=True)
        figures = table(calibration)
        rows = {row.what: row for row in calibration.rows}
        one, four = rows["1 TCP stream, 1 Gb/s, rtt 100 ms"], rows["4 TCP streams, 1 Gb/s, rtt 100 ms"]
        assert one.expected == 0.225
        assert one.tolerance == 0.15
        assert calibration.ok, figures
        assert 3.3 < four.measured / one.measured < 4.7, figures
        assert json.loads(calibration.to_json())["ok"]

    measured_again(check)


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_takes_as_long_as_set_also_when_it_changes(kind: Kind) -> None:
    with EmulatedWan(scenario(rtt_ms=60), kind=kind) as wan:
        assert wan.kind == kind
        assert wan.cannot_show
        assert 60 <= min(measure.rtt(wan, "paris", "nyc", count=15)) < 66
        wan.set_pair("paris", "nyc", rtt_ms=10)
        assert 10 <= min(measure.rtt(wan, "nyc", "paris", count=15)) < 14
        assert 20 <= min(measure.rtt(wan, "nyc", "tokyo", count=15)) < 25


@pytest.mark.parametrize("kind", KINDS)
def test_flows_to_two_boxes_share_the_senders_cap(kind: Kind) -> None:
    def check() -> None:
        with EmulatedWan(scenario(), kind=kind) as wan, ThreadPoolExecutor(2) as pool:
            wan.set_box("paris", up_gbps=0.2)
            flows = [pool.submit(measure.bulk, wan, "paris", other, streams=4, seconds=2) for other in ("nyc", "tokyo")]
            rates = [flow.result() for flow in flows]
            # Medians of each flow's own slices: where flows take turns, they add up to more. Apart, each has 0.2.
            assert sum(rates) == pytest.approx(0.2, rel=0.35)
            assert min(rates) > 0.002  # how TCP divides it is TCP's affair
            report = wan.statistics()
            assert report.kind == kind
            assert report.lines["paris", "nyc"].bytes > 1e6
            assert report.lines["nyc", "tokyo"].bytes == 0

    measured_again(check)


@needs_tun
def test_packets_are_lost_as_often_as_set() -> None:
    """A receiver that is held up loses some of its own accord: its socket keeps no more than 50 ms of them."""
    with EmulatedWan(scenario(rtt_ms=5, loss=0.1), kind="tun") as wan:

        def check_lossy() -> None:
            assert measure.loss(wan, "paris", "nyc", count=1500) == pytest.approx(0.1, abs=0.04)

        def check_lossless() -> None:
            assert measure.loss(wan, "paris", "tokyo", count=300) == 0

        measured_again(check_lossy)
        measured_again(check_lossless)
        assert wan.statistics().lines["paris", "nyc"].lost > 100
        assert wan.statistics().lines["paris", "tokyo"].lost == 0


@needs_tun
def test_segments_travel_together_until_single_packets_can_be_lost() -> None:
    def bytes_per_packet(wan: EmulatedWan) -> float:
        before = wan.statistics().lines["paris", "nyc"]
        measure.bulk(wan, "paris", "nyc", streams=1, seconds=1)
        after = wan.statistics().lines["paris", "nyc"]
        return (after.bytes - before.bytes) / (after.packets - before.packets)

    with EmulatedWan(scenario(0.3, rtt_ms=5), kind="tun") as wan:
        assert bytes_per_packet(wan) > 3000
        wan.set_pair("paris", "nyc", loss=0.0001)
        assert bytes_per_packet(wan) < 1600  # some of the former ones were still under way


class Ticker:
    """Sends the time every 20 ms over one connection through the network, and keeps of each when it was sent and when
    it arrived, as the boxes' own processes saw it: a clock that all of this machine share."""

    CODE = """
import socket, struct, sys, time
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while True:
    sock.sendall(struct.pack("d", time.monotonic()))
    time.sleep(0.02)
"""
    LISTEN = """
import socket, struct, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
sock, _ = server.accept()
while sent := sock.recv(8, socket.MSG_WAITALL):
    sys.stdout.buffer.write(sent + struct.pack("d", time.monotonic()))
    sys.stdout.flush()
"""

    def __init__(self, wan: EmulatedWan, a: str, b: str) -> None:
        self.seen: list[tuple[float, float]] = []
        listener = [sys.executable, "-c", self.LISTEN, wan.address(b), "9000"]
        self._listener = wan.popen(b, listener, stdout=subprocess.PIPE)
        assert self._listener.stdout is not None
        assert self._listener.stdout.readline() == b"ready\n"
        host, port = wan.route(a, b, 9000)
        wan.popen(a, [sys.executable, "-c", self.CODE, host, str(port)])
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self._listener.stdout is not None
        with self._listener.stdout as pairs:
            while len(pair := pairs.read(16)) == 16:
                self.seen.append(struct.unpack("dd", pair))

    def wait_for_one_sent_after(self, moment: float) -> None:
        deadline = time.monotonic() + 60
        while not self.seen or self.seen[-1][0] < moment:
            assert time.monotonic() < deadline, f"{len(self.seen)} arrived, and nothing that was sent after {moment}"
            time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_in_an_outage_nothing_arrives_and_afterwards_everything(kind: Kind) -> None:
    with EmulatedWan(scenario(rtt_ms=20), kind=kind) as wan:
        ticker = Ticker(wan, "paris", "nyc")
        ticker.wait_for_one_sent_after(0)
        held: list[float] = []
        while not held:  # a sender that is held up for so long sends nothing meanwhile
            asked = time.monotonic()
            wan.outage("paris", "nyc", 1.0)
            begun = time.monotonic()
            ticker.wait_for_one_sent_after(asked + 1.0)  # so that everything before has come, too
            held = [arrived for sent, arrived in ticker.seen if begun <= sent < asked + 1.0]
            assert all(arrived >= asked + 1.0 for arrived in held)
        if kind == "tun":
            assert wan.statistics().lines["paris", "nyc"].dead > 0
    ticker.reader.join()


def test_a_port_where_nobody_listens_resets_the_connection() -> None:
    with EmulatedWan(scenario(rtt_ms=50), kind="proxy") as wan:
        host, port = wan.route("paris", "nyc", 9)
        assert (host, port) == wan.route("paris", "nyc", 9)
        start = time.monotonic()
        with socket.create_connection((host, port)) as sock, pytest.raises(ConnectionResetError):
            sock.recv(1)
        assert time.monotonic() - start > 0.049


def test_through_the_proxy_every_byte_arrives_in_order_and_ends_are_passed_on() -> None:
    data = os.urandom(3_000_000)
    with EmulatedWan(scenario(rtt_ms=10), kind="proxy") as wan:
        with socket.create_server((wan.address("nyc"), 0)) as server:
            route = wan.route("paris", "nyc", server.getsockname()[1])
            with socket.create_connection(route) as near, server.accept()[0] as far, ThreadPoolExecutor(1) as pool:
                answer = pool.submit(read_all, far)
                near.sendall(data)
                near.shutdown(socket.SHUT_WR)
                assert answer.result() == data
                far.sendall(data[::-1])
                far.shutdown(socket.SHUT_WR)
                assert read_all(near) == data[::-1]
        assert wan.statistics().lines["nyc", "paris"].bytes >= len(data)


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_is_refused_and_the_network_goes_on(kind: Kind) -> None:
    with EmulatedWan(scenario(rtt_ms=20), kind=kind) as wan:
        for wrong in (
            lambda: wan.set_pair("paris", "rome", rtt_ms=1),
            lambda: wan.set_pair("paris", "nyc", rtt=1),
            lambda: wan.set_box("paris", up_gbps=-1),
            lambda: wan.outage("paris", "paris", 1),
            lambda: wan.route("paris", "rome", 80),
            lambda: wan.address("rome"),
            lambda: wan.popen("rome", ["true"]),
        ):
            with pytest.raises(ScenarioError):
                wrong()
        assert wan.popen("paris", ["true"]).wait() == 0
        assert repr(wan) == f"<EmulatedWan {kind} of paris, nyc, tokyo: up>"
    with pytest.raises(WanError, match="not up"):
        wan.statistics()
    with pytest.raises(WanError, match="not up"):
        wan.address("paris")


def test_without_root_tun_is_refused_with_the_reason_and_the_proxy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(WanUnavailable, match=r"needs root .* this is user 1000"), EmulatedWan(scenario(), kind="tun"):
        pytest.fail("it started")
    with EmulatedWan(scenario()) as wan:
        assert wan.kind == "proxy"
        assert "needs root" in wan.cannot_show[-1]


def gone(namespace: str) -> bool:
    return namespace not in namespaces.running()


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that holds a network with a sleeping program in it, and says their names."""
    code = """
import signal, sys, time
from p2pserve.sims.wan import *
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without
box = WanBox()
with EmulatedWan(Scenario(boxes={"paris": box, "nyc": box}, default=WanPair()), kind="tun") as wan:
    child = wan.popen("paris", ["sleep", "600"])
    print(wan.command("paris", [])[3], child.pid, flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment())
    with process:
        yield process
        process.kill()


@needs_tun
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_owner_is_killed(owner: subprocess.Popen[str], number: int) -> None:
    assert owner.stdout is not None
    namespace, pid = owner.stdout.readline().split()
    assert not gone(namespace)
    owner.send_signal(number)
    told, deadline = time.monotonic(), time.monotonic() + 60
    while not gone(namespace) or Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the namespace or what ran in it is still there"
        if time.monotonic() > told + 10:  # Python loses an interrupt that comes while it cleans up an object
            owner.send_signal(number)
            told = time.monotonic()
        time.sleep(0.02)


@needs_tun
def test_what_a_killed_emulator_leaves_goes_with_the_block_or_by_hand(owner: subprocess.Popen[str]) -> None:
    with EmulatedWan(scenario(), kind="tun") as wan:
        mine = wan.command("paris", [])[3]
        emulator = namespaces.running()[mine][0]
        os.kill(emulator, signal.SIGKILL)
        with pytest.raises(WanError, match="exit code -9"):
            wan.statistics()
        assert not gone(mine)
    assert gone(mine)
    assert owner.stdout is not None
    namespace = owner.stdout.readline().split()[0]
    emulator = namespaces.running()[namespace][0]
    owner.send_signal(signal.SIGSTOP)  # it neither sees its emulator die nor tidies up
    os.kill(emulator, signal.SIGKILL)
    assert not gone(namespace)
    owner.kill()
    owner.wait()
    while Path(f"/proc/{emulator}").exists():  # until init has buried it
        time.sleep(0.02)
    done = subprocess.run([*WAN, "clean"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert f"removed {namespace}" in done.stdout
    assert gone(namespace)


def wan(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WAN, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, input=text)


def test_the_command_line(tmp_path: Path) -> None:
    check = wan("check")
    assert check.returncode == 0
    assert "proxy: runs here" in check.stdout
    sketch = wan("sketch", "paris-nyc=transatlantic")
    file = tmp_path / "scenario.json"
    file.write_text(sketch.stdout)
    lines = "pair paris nyc rtt_ms=30 loss=0.5\nbox paris up_gbps=x\nroute paris nyc 80\nturn left\nstats\nquit\n"
    run = wan("run", str(file), "--kind", "proxy", text=lines)
    assert run.returncode == 0, run.stderr
    assert "proxy network of 2 boxes; cannot show:" in run.stdout
    assert "error: up_gbps: 'x' is no number" in run.stdout
    assert "error: 'turn left' is no command" in run.stdout
    assert "paris -> nyc" in run.stdout
    inside = wan("run", str(file), "--in", "paris", "--", "sh", "-c", "exit 7")
    assert inside.returncode == 7
    for arguments, says in (
        (("run", str(file), "--in", "rome", "--", "true"), "no box 'rome'"),
        (("run", str(file), "--in", "paris"), "go together"),
        (("sketch", "paris"), "no link"),
        (("sketch", "a-b=warp"), "classes:"),
        (("exec", "nowhere"), "no box 'nowhere'"),
    ):
        refused = wan(*arguments)
        assert refused.returncode == 2, arguments
        assert says in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert wan("run", str(tmp_path / "none.json")).returncode == 1
    assert len(json.loads(wan("classes", "--format", "json").stdout)) == 11
