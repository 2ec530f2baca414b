"""Namespaces for the boxes: why there can be none, which `ip` commands are given, and what is removed."""

import os
import subprocess
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from p2pserve.sims.wan import Scenario, WanBox, WanPair, WanUnavailable, namespaces
from p2pserve.sims.wan.namespaces import Namespaces

GONE = 2**22 + 5
"""No process has this number."""
TWO = Scenario(boxes={"paris": WanBox(), "nyc": WanBox()}, default=WanPair(), mtu=1400, congestion="bbr")


class Ip:
    """The `ip` command: `said` by the beginning of a command line; `fails` likewise."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.said: dict[str, str] = {}
        self.fails: dict[str, str] = {}

    def run(self, line: Sequence[str], **options: Any) -> Any:
        name, *arguments = line
        assert name == "ip"
        self.ran.append(" ".join(arguments))
        error = next((text for start, text in self.fails.items() if self.ran[-1].startswith(start)), None)
        out = next((text for start, text in self.said.items() if self.ran[-1].startswith(start)), "cubic\n")
        return SimpleNamespace(returncode=0 if error is None else 1, stdout=out, stderr=error or "")


@pytest.fixture
def ip(monkeypatch: pytest.MonkeyPatch) -> Ip:
    made = Ip()
    monkeypatch.setattr(subprocess, "run", made.run)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "open", lambda path, flags: 99)
    monkeypatch.setattr(os, "close", lambda descriptor: None)
    monkeypatch.setattr("fcntl.ioctl", lambda descriptor, request, value: 0)
    return made


def no_device(path: str, flags: int) -> int:
    raise FileNotFoundError(2, "No such file or directory")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda patch: patch.setattr("sys.platform", "darwin"), "network namespaces are Linux's; this is darwin"),
        (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "this is user 1000: run it as root (sudo)"),
        (lambda patch: patch.setattr("shutil.which", lambda name: None), "install iproute2"),
        (lambda patch: patch.setattr(os, "open", no_device), "/dev/net/tun: No such file or directory: give the"),
    ],
)
def test_why_there_can_be_none_is_said_with_what_to_do(
    change: Callable[[pytest.MonkeyPatch], None], says: str, ip: Ip, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert namespaces.unavailable() is None
    change(monkeypatch)
    reason = namespaces.unavailable()
    assert reason is not None
    assert says in reason
    assert "\n" not in reason


def test_a_namespace_that_may_not_be_made_names_the_capabilities(ip: Ip) -> None:
    ip.fails["netns add"] = "Operation not\n permitted\n"
    reason = namespaces.unavailable()
    assert reason is not None
    assert reason.startswith("`ip netns add ")
    assert "Operation not permitted: network namespaces need CAP_SYS_ADMIN" in reason


def test_trying_leaves_nothing(ip: Ip) -> None:
    assert namespaces.unavailable() is None
    name = f"p2pwan-{os.getpid()}-try"
    assert ip.ran == [f"netns add {name}", f"netns del {name}"]


RUNNING = {
    f"p2pwan-{os.getpid()}-nyc": (os.getpid(), "nyc"),
    f"p2pwan-{GONE}-paris": (GONE, "paris"),
    f"p2pwan-{GONE}-nyc": (GONE, "nyc"),
}


@pytest.mark.parametrize(
    ("of", "removed"),
    [
        (None, [f"p2pwan-{GONE}-paris", f"p2pwan-{GONE}-nyc"]),
        (os.getpid(), [f"p2pwan-{os.getpid()}-nyc"]),
        (12, []),
    ],
    ids=["what nobody uses", "one process's", "another process's"],  # without the number of the process
)
def test_only_what_nobody_uses_or_what_is_asked_for_is_removed(
    of: int | None, removed: list[str], ip: Ip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "running", lambda: RUNNING)
    ip.said["netns pids"] = ""
    assert namespaces.sweep(of=of) == removed
    assert [line for line in ip.ran if line.startswith("netns del")] == [f"netns del {name}" for name in removed]


def test_what_runs_in_a_namespace_is_killed_before_it_goes(ip: Ip, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        killed.append(pid)
        if pid == 7:
            raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(namespaces, "running", lambda: {f"p2pwan-{GONE}-nyc": (GONE, "nyc")})
    ip.said["netns pids"] = "7\n8\n"
    assert namespaces.sweep() == [f"p2pwan-{GONE}-nyc"]
    assert killed == [7, 8], "one that has ended meanwhile stops nothing"
    assert ip.ran[-1] == f"netns del p2pwan-{GONE}-nyc"


def test_a_namespace_that_somebody_else_removed_is_no_error(ip: Ip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "running", lambda: {f"p2pwan-{GONE}-nyc": (GONE, "nyc")})
    ip.fails["netns pids"] = "No such file"
    assert namespaces.sweep() == [f"p2pwan-{GONE}-nyc"]


def test_each_box_has_a_device_with_the_scenarios_mtu(ip: Ip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "running", dict)
    with Namespaces(TWO) as made:
        assert set(made.devices) == {"paris", "nyc"}
        assert "2 boxes" in repr(made)
        assert made.addresses == {"paris": "11.77.0.1", "nyc": "11.77.0.2"}
    assert made.devices == {}
    first = [line for line in ip.ran if "paris" in line]
    me = f"p2pwan-{os.getpid()}-paris"
    assert first[0] == f"netns add {me}"
    assert f"-n {me} addr add 11.77.0.1/16 dev wan0" in first
    assert f"-n {me} link set wan0 mtu 1400 txqueuelen 50000 up" in first
    assert any("echo bbr >/proc/sys/net/ipv4/tcp_congestion_control" in line for line in first)


def test_a_box_behind_nat_has_an_address_of_its_own_and_is_seen_at_its_routers(
    ip: Ip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "running", dict)
    boxes = {"paris": WanBox(), "home": WanBox(behind_nat=True)}
    with Namespaces(Scenario(boxes=boxes, default=WanPair())) as made:
        assert (made.addresses["home"], made.inside) == ("11.77.0.2", {"home": namespaces.PRIVATE})
    me = f"p2pwan-{os.getpid()}-"
    assert f"-n {me}home addr add {namespaces.PRIVATE}/24 dev wan0" in ip.ran
    for box in boxes:
        assert f"-n {me}{box} route add default dev wan0" in ip.ran


def test_what_the_kernel_does_not_set_is_a_note_once(ip: Ip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "running", dict)
    ip.said["netns exec"] = "ipv4/tcp_sack\nipv4/tcp_congestion_control\nreno\n"
    with Namespaces(TWO) as made:
        sack, congestion = made.notes
    assert sack == "this machine's own net.ipv4.tcp_sack: the kernel would not set 1"
    assert congestion == "bbr: TCP uses reno, as the kernel allows a namespace no other"


def test_a_box_that_cannot_be_made_takes_the_others_with_it(ip: Ip, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int | None] = []
    monkeypatch.setattr(namespaces, "running", dict)
    monkeypatch.setattr(namespaces, "sweep", lambda *, of=None: swept.append(of))
    ip.fails[f"netns add p2pwan-{os.getpid()}-nyc"] = "File exists"
    made = Namespaces(TWO)
    with pytest.raises(WanUnavailable, match="File exists"), made:
        pass
    assert swept == [None, os.getpid()]
    assert made.devices == {}


def test_a_command_is_run_in_its_namespace() -> None:
    assert namespaces.command("x", ["ls", "-l"]) == ["ip", "netns", "exec", "x", "ls", "-l"]


def test_as_many_boxes_as_there_may_be_have_addresses_of_their_own() -> None:
    boxes = {f"b{number}": WanBox() for number in range(250)}
    assert len(set(Namespaces(Scenario(boxes=boxes, default=WanPair())).addresses.values())) == 250
