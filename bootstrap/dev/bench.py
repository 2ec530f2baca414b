"""How soon a network of boxes is whole, replaces its coordinator and notices losses, and what it costs.

    python -m p2pserve.bootstrap.bench [--parts join,loss,repair,idle,strangers,calm,churn] [--format json]

Boxes are processes of this machine with emulated engines: agents, sockets and plans are real, GPUs
are not. Seconds are from the event to the last box that has said so. `churn` is simulated: the same
machines, on a simulated network. `repair`: from the coordinator's line that a box is gone, or from the box's own line
that its engine has ended, to the next plan.
"""

import argparse
import gc
import json
import multiprocessing
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import psutil

from ..addresses import Address
from ..settings import NetworkSettings
from ..trust.tokens import Bootstrap
from .boxes import BoxNetwork, BoxProcess
from .simulation import Simulation, Weather, identity_of

PARTS: Final = ("join", "loss", "repair", "idle", "strangers", "calm", "churn")
WHOLE_S: Final = 180.0
NOTICED_S: Final = 60.0
BUSY_LOOPS: Final = 3

Figures = dict[str, float | int | None]


def grow(boxes: BoxNetwork, count: int) -> float:
    """Let all but the first box join at once; seconds until the network is whole."""
    if not boxes.all:
        boxes.start_first()
    began = time.monotonic()
    boxes.join(range(1, count))
    boxes.wait(lambda: boxes.are_whole(boxes.running()), WHOLE_S, f"{count} boxes to be one network")
    return time.monotonic() - began


def measure_join(count: int, watch_s: float) -> Figures:
    """Many join at once, and what happens in the time after that."""
    with BoxNetwork() as boxes:
        whole_s = grow(boxes, count)
        settled = time.monotonic()
        time.sleep(watch_s)
        return {
            "join_s": whole_s,
            "epochs": max(box.leader[1] for box in boxes.running() if box.leader is not None),
            "leaders_after": sum(at > settled for box in boxes.running() for at, _ in box.leaders),
            "gone_after": sum(at > settled for box in boxes.running() for at, _ in box.gone),
        }


def _leader_of(boxes: BoxNetwork) -> BoxProcess:
    found = {box.leader[0] for box in boxes.running() if box.leader is not None}
    return next(box for box in boxes.running() if box.peer in found)


def _replaced_s(boxes: BoxNetwork, lost: BoxProcess, act: Callable[[BoxProcess], None]) -> float:
    others = [box for box in boxes.running() if box is not lost]
    act(lost)
    return boxes.wait(
        lambda: (
            all(box.leader is not None and box.leader[0] != lost.peer for box in others)
            and len({box.leader for box in others}) == 1
        ),
        NOTICED_S,
        "another coordinator",
    )


def measure_loss(count: int, times: int) -> Figures:
    """The coordinator is killed, and stopped; another box is killed. Medians."""
    killed, hung, gone = [], [], []
    with BoxNetwork() as boxes:
        grow(boxes, count)
        for _ in range(times):
            leader = _leader_of(boxes)
            killed.append(_replaced_s(boxes, leader, boxes.kill))
            _restore(boxes, leader)
            leader = _leader_of(boxes)
            hung.append(_replaced_s(boxes, leader, lambda box: boxes.signal(box, signal.SIGSTOP)))
            boxes.signal(leader, signal.SIGCONT)
            boxes.wait(lambda: boxes.are_whole(boxes.running()), WHOLE_S, "the stopped box to be back")
            victim = next(box for box in boxes.running()[1:] if box is not _leader_of(boxes))
            gone.append(_gone_s(boxes, victim))
            _restore(boxes, victim)
    return {
        "killed_replaced_s": statistics.median(killed),
        "hung_replaced_s": statistics.median(hung),
        "killed_gone_s": statistics.median(gone),
    }


def measure_repair(count: int, times: int) -> Figures:
    """A box is killed, and an engine is: seconds from when that is known to the coordinator's next plan, and until
    every box follows that. Medians."""
    lost, engine = [], []
    with BoxNetwork() as boxes:
        grow(boxes, count + 1)  # the first has no engine
        for turn in range(times):
            leader = _leader_of(boxes)
            others = [box for box in boxes.running()[1:] if box is not leader]
            engine.append(_repaired_s(boxes, leader, others[2 * turn % len(others)], "engine"))
            boxes.wait(lambda: boxes.are_whole(boxes.running()), WHOLE_S, "an engine to be back")
            victim = others[(2 * turn + 1) % len(others)]
            lost.append(_repaired_s(boxes, leader, victim, "lost"))
            _restore(boxes, victim)
    return {
        "boxes": count,
        "lost_planned_s": statistics.median(planned for planned, _ in lost),
        "lost_followed_s": statistics.median(followed for _, followed in lost),
        "engine_planned_s": statistics.median(planned for planned, _ in engine),
        "engine_followed_s": statistics.median(followed for _, followed in engine),
    }


def _repaired_s(boxes: BoxNetwork, leader: BoxProcess, victim: BoxProcess, cause: str) -> tuple[float, float]:
    """Seconds from when a failure is known to the coordinator's plan, and until all others follow it."""
    known_at, plan = _next_plan(boxes, leader, victim, cause)
    left = [box for box in boxes.running() if cause == "engine" or box is not victim]
    boxes.wait(lambda: all(_followed_at(box, plan) for box in left), NOTICED_S, "all to follow the plan")
    return _followed_at(leader, plan) - known_at, max(_followed_at(box, plan) for box in left) - known_at


def _next_plan(boxes: BoxNetwork, leader: BoxProcess, victim: BoxProcess, cause: str) -> tuple[float, str]:
    """When it was known that the victim had failed, and the coordinator's first plan after that."""
    began = time.monotonic()
    if cause == "lost":
        boxes.kill(victim)
    else:
        boxes.end_engine(victim)

    def known_at() -> float | None:
        gone = [at for at, peer in leader.gone if peer == victim.peer and at >= began]
        told = gone if cause == "lost" else [at for at in victim.engine_ended_at if at >= began]
        return told[0] if told else None

    def plan_since() -> str:
        at = known_at()
        return next((plan for made, plan in leader.plans if at is not None and made >= at), "")

    boxes.wait(lambda: bool(plan_since()), NOTICED_S, f"a plan after {cause}")
    at = known_at()
    assert at is not None
    return at, plan_since()


def _followed_at(box: BoxProcess, plan: str) -> float:
    """When a box followed a plan, or a later one; 0: it has not yet."""
    number = tuple(map(int, plan.split(".")))
    return next((at for at, each in box.plans if tuple(map(int, each.split("."))) >= number), 0.0)


def _gone_s(boxes: BoxNetwork, victim: BoxProcess) -> float:
    others = [box for box in boxes.running() if box is not victim]
    boxes.kill(victim)
    return boxes.wait(lambda: all(victim.peer not in box.alive for box in others), NOTICED_S, "a dead box to be gone")


def _restore(boxes: BoxNetwork, lost: BoxProcess) -> None:
    """Start a box again where it was, and wait until all is whole."""
    boxes.restart(lost)
    boxes.wait(lambda: boxes.are_whole(boxes.running()), WHOLE_S, "a restarted box to be back")


def measure_idle(count: int, seconds: float, settle_s: float) -> Figures:
    """What an agent costs when nobody asks, ``settle_s`` after new boxes have begun to measure their links. In a large
    network that opens sessions which no overlay needs; they are closed first."""
    settings = NetworkSettings.wan()
    with BoxNetwork() as boxes:
        grow(boxes, count)
        time.sleep(settle_s + (settings.part_s if count > settings.full_mesh else 0.0))
        agents = [psutil.Process(box.process.pid) for box in boxes.running()[1:]]
        before = [sum(agent.cpu_times()[:2]) for agent in agents]
        heard_before = bytes_heard()
        time.sleep(seconds)
        heard = bytes_heard()
        used = [sum(agent.cpu_times()[:2]) - start for agent, start in zip(agents, before, strict=True)]
        rates = [sum(heard_since(heard_before, heard, agent.pid).values()) / seconds for agent in agents if heard]
        return {
            "agent_cpu_percent": 100.0 * statistics.median(used) / seconds,
            "agent_rss_mb": statistics.median(agent.memory_info().rss for agent in agents) / 1e6,
            "agent_bytes_s": statistics.mean(rates) if rates else None,
        }


Connection = tuple[int, str, str]
"""A process, and where the two ends of one of its TCP connections are."""


def bytes_heard() -> dict[Connection, int]:
    """What the kernel counts of each open TCP connection; nothing where there is no `ss` (iproute2)."""
    if shutil.which("ss") is None:
        return {}
    said = subprocess.run(("ss", "-tinHOp"), capture_output=True, text=True, check=True).stdout
    heard: dict[Connection, int] = {}
    for line in said.splitlines():
        owner, count = re.search(r"pid=(\d+)", line), re.search(r"bytes_received:(\d+)", line)
        if owner is not None and count is not None:
            here, there = line.split()[3:5]
            heard[int(owner[1]), here, there] = int(count[1])
    return heard


def heard_since(before: Mapping[Connection, int], after: Mapping[Connection, int], pid: int) -> dict[Connection, int]:
    """What one process has heard meanwhile over each connection that is open still. What those heard that have been
    closed is not counted anywhere; they carried next to nothing, or they would not have been."""
    return {key: count - before.get(key, 0) for key, count in after.items() if key[0] == pid}


def measure_strangers(sockets: int, entries: int, times: int) -> Figures:
    """How long a box takes to join, from its process's start until it sees all, undisturbed and beside an attacker that
    holds silent sockets open and tells of members that do not exist. Medians."""
    with BoxNetwork() as boxes:
        grow(boxes, 3)
        alone = [_join_s(boxes) for _ in range(times)]
        boxes.attack(sockets, entries)
        beside = [_join_s(boxes) for _ in range(times)]
        mb = max(psutil.Process(box.process.pid).memory_info().rss for box in boxes.running()) / 1e6
        return {
            "join_undisturbed_s": statistics.median(alone),
            "join_disturbed_s": statistics.median(beside),
            "most_rss_mb": mb,
            "silent_sockets": sockets,
            "invented_members": entries,
        }


def _join_s(boxes: BoxNetwork) -> float:
    others = {box.peer for box in boxes.running()}
    (new,) = boxes.join((len(others),))
    took = boxes.wait(lambda: others <= new.alive, WHOLE_S, "a box to join")
    boxes.kill(new)
    boxes.wait(lambda: all(new.peer not in box.alive for box in boxes.running()), NOTICED_S, "it to be gone")
    return took


def _spin() -> None:
    while True:
        pass


def measure_calm(count: int, seconds: float) -> Figures:
    """How often a living box is called gone, idle and beside three busy loops."""
    with BoxNetwork() as boxes:
        grow(boxes, count)
        counts = []
        for loops in (0, BUSY_LOOPS):
            busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(loops)]
            for each in busy:
                each.start()
            began = time.monotonic()
            time.sleep(seconds)
            for each in busy:
                each.terminate()
                each.join()
            counts.append(sum(at > began for box in boxes.running() for at, _ in box.gone))
        return {"false_gone_idle": counts[0], "false_gone_busy": counts[1], "watched_s": seconds}


def simulate_churn(count: int) -> Figures:
    """A tenth is killed and as many join: seconds until every view is right, and bytes heard per node and second."""
    network = Simulation(count_bytes=True, weather=Weather(latency_s=0.05))
    network.found(count)
    network.run(12.0)
    for node in network.running():
        node.bytes_heard = 0
    network.run(10.0)
    idle = [node.bytes_heard / 10.0 for node in network.running()]
    names = [node.name for node in network.running()]
    network.rng.shuffle(names)
    for name in names[: count // 10]:
        network.kill(name)
    left = network.running()
    for number in range(count + 1, count + 1 + count // 10):
        asked = [Bootstrap(each.place.host, each.place.port, each.peer) for each in network.rng.sample(left, 2)]
        network.add(str(number), identity_of(number), Address("192.0.2.1", 4000 + number), named=asked)
    began = network.now
    while not _are_right(network) and network.now < began + 60.0:
        network.run(0.5)
    return {
        "simulated_converged_s": network.now - began if _are_right(network) else None,
        "simulated_bytes_s": statistics.mean(idle),
        "simulated_bytes_s_max": max(idle),
    }


def _are_right(network: Simulation) -> bool:
    everybody = {node.peer for node in network.running()}
    return all(node.peering.liveness.living | {node.peer} == everybody for node in network.running())


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Figures]:
    """All parts that were asked for, by part and number of boxes."""
    found: dict[str, Figures] = {}

    def note(name: str, figures: Figures) -> None:
        found[name] = figures
        say(f"{name:<10} " + ", ".join(f"{key} {_number(value)}" for key, value in figures.items()))

    if "join" in options.parts:
        note(f"join {options.many}", measure_join(options.many, 20.0))
    if "loss" in options.parts:
        for count in options.nodes:
            note(f"loss {count}", measure_loss(count, options.times))
    if "repair" in options.parts:
        note(f"repair {options.repaired}", measure_repair(options.repaired, options.times))
    if "idle" in options.parts:
        for count in (2, 10, options.many):
            note(f"idle {count}", measure_idle(count, options.seconds, options.settle_s))
    if "strangers" in options.parts:
        note("strangers", measure_strangers(2000, 10_000, options.times))
    if "calm" in options.parts:
        note(f"calm {options.many}", measure_calm(options.many, options.calm_s))
    if "churn" in options.parts:
        gc.freeze()
        note(f"churn {options.simulated}", simulate_churn(options.simulated))
    return found


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m p2pserve.bootstrap.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--parts", type=_parts, default=PARTS, help=f"of {','.join(PARTS)} (default: all)")
    add("--nodes", type=_counts, default=(6, 16), help="boxes of `loss` (default: 6,16)")
    add("--many", type=int, default=30, help="boxes of `join`, `idle` and `calm` (default: 30)")
    add("--repaired", type=int, default=32, help="boxes of `repair`, of one emulated GPU each (default: 32)")
    add("--simulated", type=int, default=1000, help="nodes of `churn` (default: 1000)")
    add("--times", type=int, default=3, help="of each loss or repair, for the median (default: 3)")
    add("--seconds", type=float, default=30.0, help="that `idle` measures (default: 30)")
    add(
        "--settle-s",
        type=float,
        default=60.0,
        help="before that, without sessions to be closed (default: 60)",
    )
    add("--calm-s", type=float, default=600.0, help="that `calm` watches, twice (default: 600)")
    add("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    said = sys.stderr if options.format == "json" else sys.stdout

    def say(text: str) -> None:
        said.write(f"{text}\n")
        said.flush()

    found = measure(options, say)
    if options.format == "json":
        sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not set(parts) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} is not of {','.join(PARTS)}")
    return parts


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))
