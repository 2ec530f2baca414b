"""A network namespace and a TUN device for each box. Needs root on Linux, `ip`, and /dev/net/tun.

A box's namespace is called `p2pwan-<process>-<box>`, after the process that forwards its packets,
so that what a killed process has left can be told from what is in use. TUN devices vanish with the
process that made them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from .errors import WanUnavailable
from .scenario import Scenario

PREFIX = "p2pwan"
TUN = "/dev/net/tun"
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
# Before each packet: flags, kind of segmentation, header bytes, segment bytes, where the checksum is and goes.
VNET_HEADER = struct.Struct("=BBHHHH")
NEEDS_CHECKSUM = 0x01  # of its flags: whoever takes the packet computes its checksum
DEVICE = "wan0"
# Addresses that programs take for public ones, as those of rented boxes are; no packet leaves the namespaces.
PUBLIC = "11.77"
# Of each box behind NAT: behind most routers it is an address of this kind, and the same as behind the next one.
PRIVATE = "192.168.1.2"
# Every drop is to be the emulated router's: the device's own queue holds more than TCP ever has under way.
DEVICE_QUEUE = 50_000

# Linux's defaults, whatever this machine's are: the one-stream limit comes from the 4 MB of tcp_wmem.
SYSCTLS = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv4/tcp_rmem": "4096 131072 6291456",
    "ipv4/tcp_wmem": "4096 16384 4194304",
    "ipv4/tcp_window_scaling": "1",
    "ipv4/tcp_sack": "1",
    "ipv4/tcp_timestamps": "1",
    "ipv4/tcp_slow_start_after_idle": "1",
    # Not the default: a connection shall not start from what an earlier one met.
    "ipv4/tcp_no_metrics_save": "1",
}


def unavailable() -> str | None:
    """Why there can be no namespaces with TUN devices here; None if there can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's; this is {sys.platform}"
    if os.geteuid() != 0:
        return f"needs root to make network namespaces, and this is user {os.geteuid()}: run it as root (sudo)"
    if shutil.which("ip") is None:
        return "there is no `ip` command: install iproute2"
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        os.close(os.open(TUN, os.O_RDWR | os.O_CLOEXEC))
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except OSError as error:
        return f"{TUN}: {error.strerror}: give the container the device (docker: --device {TUN} --cap-add NET_ADMIN)"
    except WanUnavailable as error:
        return f"{error}: network namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN (docker: --privileged)"
    return None


def running() -> dict[str, tuple[int, str]]:
    """Namespaces of all emulated networks: name -> process that made it, and box."""
    pattern = re.compile(rf"({PREFIX}-(\d+)-(.+))")
    folder = Path("/run/netns")
    names = [pattern.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return {match[1]: (int(match[2]), match[3]) for match in names if match}


def sweep(*, of: int | None = None) -> list[str]:
    """Remove the namespaces of processes that are gone, or of process `of`."""
    removed = []
    for name, (pid, _) in running().items():
        if pid == of or (of is None and not Path(f"/proc/{pid}").exists()):
            _remove(name)
            removed.append(name)
    return removed


class Namespaces:
    """A scenario's boxes, as a context manager; `devices`: box -> its TUN descriptor. `addresses` are what others see;
    `inside`: the own ones of boxes behind NAT."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        names = list(scenario.boxes)
        self.namespaces = {name: f"{PREFIX}-{os.getpid()}-{name}" for name in names}
        self.addresses = {name: f"{PUBLIC}.{i // 250}.{i % 250 + 1}" for i, name in enumerate(names)}
        self.inside = {name: PRIVATE for name, box in scenario.boxes.items() if box.behind_nat}
        self.devices: dict[str, int] = {}
        self.notes: list[str] = []

    def __repr__(self) -> str:
        return f"<Namespaces {PREFIX}-{os.getpid()}-*: {len(self.devices)} boxes>"

    def __enter__(self) -> Self:
        sweep()
        try:
            for number, name in enumerate(self._scenario.boxes):
                self._open(number, name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def aggregate(self, together: bool) -> None:
        """Whether the boxes' kernels give TCP segments by up to 64 KB at a time, as they do to a
        network card, or each packet for itself."""
        offload = TUN_F_CSUM | (TUN_F_TSO4 if together else 0)
        for descriptor in self.devices.values():
            fcntl.ioctl(descriptor, TUNSETOFFLOAD, offload)

    def close(self) -> None:
        """Kill what runs in the boxes, remove them and their devices."""
        sweep(of=os.getpid())
        while self.devices:
            os.close(self.devices.popitem()[1])

    def _open(self, number: int, name: str) -> None:
        namespace = self.namespaces[name]
        device = f"pw{os.getpid()}x{number}"
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        _ip("netns", "add", namespace)
        try:
            descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self.devices[name] = descriptor
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
        except OSError as error:
            raise WanUnavailable(f"{TUN}: {error.strerror}") from error
        _ip("link", "set", device, "netns", namespace, "name", DEVICE)
        mtu, queue = str(self._scenario.mtu), str(DEVICE_QUEUE)
        failed = self._set(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        inside = self.inside.get(name)
        _ip(
            "-n",
            namespace,
            "addr",
            "add",
            f"{self.addresses[name]}/16" if inside is None else f"{inside}/24",
            "dev",
            DEVICE,
        )
        _ip("-n", namespace, "link", "set", DEVICE, "mtu", mtu, "txqueuelen", queue, "up")
        _ip("-n", namespace, "route", "add", "default", "dev", DEVICE)
        if number == 0:
            self.notes += failed

    def _set(self, namespace: str) -> list[str]:
        """Give TCP Linux's defaults; returns what the kernel does not let us set, as notes."""
        settings = {**SYSCTLS, "ipv4/tcp_congestion_control": self._scenario.congestion}
        lines = [f"echo {value} >/proc/sys/net/{key} || echo {key}" for key, value in settings.items()]
        lines.append("cat /proc/sys/net/ipv4/tcp_congestion_control")
        script = "exec 2>/dev/null\n" + "\n".join(lines)
        *failed, congestion = _ip("netns", "exec", namespace, "sh", "-c", script).split()
        notes = []
        for key in failed:
            if key.endswith("tcp_congestion_control"):
                notes.append(f"{settings[key]}: TCP uses {congestion}, as the kernel allows a namespace no other")
            else:
                notes.append(
                    f"this machine's own net.{key.replace('/', '.')}: the kernel would not set {settings[key]}"
                )
        return notes


def _remove(namespace: str) -> None:
    """Kill what runs in a namespace of ours, and remove it."""
    try:
        for pid in _ip("netns", "pids", namespace).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        _ip("netns", "del", namespace)
    except WanUnavailable:
        if (Path("/run/netns") / namespace).exists():
            raise


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise WanUnavailable(f"`ip {' '.join(arguments[:3])}`: {said}")
    return done.stdout


def command(namespace: str, argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` in a namespace, without a parent process."""
    return ["ip", "netns", "exec", namespace, *argv]
