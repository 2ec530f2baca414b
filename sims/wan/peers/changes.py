"""How soon every member knows what one has said: our gossip, and an etcd cluster on the same links."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from ..emulated import EmulatedWan
from ..scenario import Scenario, WanBox, WanPair
from .movers import MEMORY
from .programs import PeerFailed, PeerProgram, WanSite
from .turns import OURS

GOSSIP: Final = "p2pserve.bootstrap.dev.gossip_box"
GOSSIP_PORT, PEER_PORT, CLIENT_PORT = 29_800, 2380, 2379
MEMBERS: Final = 5
RTT_MS: Final = 40.0
START_S: Final = 60.0
ANSWER_S: Final = 30.0
ETCD: Final = "etcd"
NO_ETCD: Final = "no `etcd` on the PATH (Debian: apt-get install etcd-server)"


@dataclass(frozen=True, slots=True)
class ChangeTimes:
    """Milliseconds until the last member knew of each change, or why there are none."""

    ours_ms: Sequence[float] = ()
    etcd_ms: Sequence[float] = ()
    ours_failure: str = ""
    etcd_failure: str = ""


def measure_changes(rounds: int, say: Callable[[str], None]) -> ChangeTimes:
    """Changes begin at each member in turn, with ours and with etcd alternately. Raises WanError."""
    names = [f"member{number}" for number in range(MEMBERS)]
    scenario = Scenario(boxes={name: WanBox() for name in names}, default=WanPair(rtt_ms=RTT_MS))
    found: dict[str, list[float]] = {OURS: [], ETCD: []}
    failures: dict[str, str] = {}
    with EmulatedWan(scenario, kind="tun") as wan, ExitStack() as stack:
        sites = [WanSite(wan, name, name) for name in names]
        running: dict[str, list[PeerProgram]] = {}
        for name, start in ((OURS, _start_gossip), (ETCD, _start_etcd)):
            try:
                running[name] = start(sites, stack)
            except PeerFailed as error:
                failures[name] = str(error)
        for number in range(1, 1 + MEMBERS * (1 + rounds)):
            for name in list(running):
                try:
                    took = _time_change(running[name], number)
                except PeerFailed as error:
                    failures[name] = str(error)
                    del running[name]
                    continue
                if number > MEMBERS:  # the first of each member are not counted
                    found[name].append(took)
    for name, times in found.items():
        say(f"{name}: {failures.get(name) or f'{median(times):.1f} ms until all {MEMBERS} members know'}")
    return ChangeTimes(found[OURS], found[ETCD], failures.get(OURS, ""), failures.get(ETCD, ""))


def _start_gossip(sites: Sequence[WanSite], stack: ExitStack) -> list[PeerProgram]:
    """A member in each box; the first is joined by the others."""
    programs = []
    for site in sites:
        hosts = list(dict.fromkeys((site.address("send"), sites[0].address("send"))))
        argv = [sys.executable, "-m", GOSSIP, str(GOSSIP_PORT), hosts[0], *hosts[1:]]
        programs.append(stack.enter_context(PeerProgram(site, "send", argv, {})))
        programs[-1].answer(START_S)
    return programs


def _start_etcd(sites: Sequence[WanSite], stack: ExitStack) -> list[PeerProgram]:
    """A cluster of a member in each box, with its data in memory, and a client beside each. All have etcd's default
    settings."""
    program = shutil.which("etcd")
    if program is None:
        raise PeerFailed(NO_ETCD)
    memory = str(MEMORY) if MEMORY.is_dir() else None
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2pserve-etcd-", dir=memory)))
    hosts = [site.address("send") for site in sites]
    cluster = ",".join(f"m{number}=http://{host}:{PEER_PORT}" for number, host in enumerate(hosts))
    client = f"http://127.0.0.1:{CLIENT_PORT}"
    for number, (site, host) in enumerate(zip(sites, hosts, strict=True)):
        peer = f"http://{host}:{PEER_PORT}"
        argv = [program, "--name", f"m{number}", "--data-dir", str(folder / f"m{number}")]
        argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster]
        argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
        stack.enter_context(PeerProgram(site, "send", argv, {}))
    command = [sys.executable, "-P", str(Path(__file__).with_name("etcd_end.py")), str(CLIENT_PORT)]
    clients = [stack.enter_context(PeerProgram(site, "send", command, {})) for site in sites]
    for each in clients:
        each.answer(START_S)
    return clients


def _time_change(programs: Sequence[PeerProgram], number: int) -> float:
    """Milliseconds from when one was told a number until the last has seen it."""
    origin = programs[number % len(programs)]
    origin.tell({"op": "publish", "number": number})
    began = float(origin.answer(ANSWER_S)["began"])
    for program in programs:
        program.tell({"op": "await", "number": number})
    ended = max(float(program.answer(ANSWER_S)["ended"]) for program in programs)
    return 1e3 * (ended - began)
