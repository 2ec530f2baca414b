"""Whether a box is fit to join, decided from what was found on it and heard from the network. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ...bootstrap import Address, JoinToken, Role
from ...bootstrap.addresses import FoundAddress, plain_ip
from ...bootstrap.trust.tokens import Bootstrap
from ...coordinator.names import count_of, name_of
from ...node.box.hardware import Hardware
from ...node.box.prerequisites import Prerequisites, list_complaints
from ...node.box.shares import Share
from ...node.box.start_checks import SHARED_MEMORY, Build, contradiction, wanted_bytes
from ...node.links.messages import DialledBack, PlacesLeft
from ...node.links.reachability import CLOCK_S, ReachVerdict, judge
from ...node.messages import Status
from ...node.models import ModelInfo
from ...node.observing.values import BoxClock
from ..errors import UsageError
from ..replicas.dividing import divide_gpus

OLDEST_PYTHON: Final = (3, 11)
KEPT_FREE_BYTES: Final = 1 << 30
"""Of the disk, beside a model: logs, and what engines compile."""
ENGINE_BYTES: Final = 1 << 30  # of memory beside weights and KV: what the programs of a node and its engine take
CPU_FLOAT_BYTES: Final = 4  # of a weight in an engine on a processor
SOON_S: Final = 86400.0
SLOW_GBPS: Final = 0.1  # at which the KV of 4,000 tokens of a model like Llama 3 8B, 146 MB in kv4, takes 12 s


class Fitness(StrEnum):
    """How a check ended. A warning keeps no box from joining."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One check: what was found, and what to do about it where it is not as it should be."""

    check: str
    fitness: Fitness
    found: str
    fix: str = ""


class MemberFound(NamedTuple):
    """What became of asking an address: the round trip of a packet there in seconds, who has proved to be there, or
    why nobody."""

    member: Bootstrap
    rtt_s: float | None = None
    peer: str | None = None
    problem: str = ""


class ModelFound(NamedTuple):
    """A model that can be served, what the box has room for, and bytes of it that are not on its disk."""

    info: ModelInfo
    share: Share | str
    missing_bytes: int


def check_python(version: Sequence[int], system: str, machine: str) -> Diagnosis:
    """Whether nodes run with this Python, on this system."""
    found = f"Python {'.'.join(map(str, version[:3]))} on {system} {machine}"
    if system != "linux":
        return _failed("python", found, "nodes run on Linux; clients, `generate` and `gateway` run here as well")
    if tuple(version[:2]) < OLDEST_PYTHON:
        return _failed("python", found, f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    return _ok("python", found)


def check_engine(build: Build | None, hardware: Hardware, environ: Mapping[str, str], pinned: str) -> Diagnosis:
    """Whether the installed vLLM serves from this hardware, and is of the minor version that is tested."""
    complaint = contradiction(build, hardware, environ)
    if build is None or complaint is not None:
        return fail("vllm", complaint or "")
    if not build.version.startswith(pinned):
        return _warning(
            "vllm", f"{build}; tested is {pinned}x", "run p2pserve selftest; a node does so before it serves"
        )
    return _ok("vllm", str(build))


def check_gpus(hardware: Hardware, box: Prerequisites) -> Diagnosis:
    """Whether engines can use the GPUs: driver, CUDA, and what is compiled with while an engine starts."""
    complaint = next(list_complaints(box, "cuda" if hardware.gpus else "cpu"), None)
    driver = f", driver {box.driver}" if box.driver else ""
    found = f"{hardware.summary()}{driver}" if hardware.gpus else f"CPU only: {hardware.summary()}{driver}"
    if complaint is not None:
        return fail("gpu", f"{found}: {complaint}")
    if not hardware.gpus and box.driver:
        return _warning("gpu", found, "engines see no GPU: start the container with them (docker run --gpus all)")
    return _ok("gpu", found)


def check_cut(hardware: Hardware, replicas: int) -> Diagnosis:
    """Whether the box can be divided among so many nodes."""
    try:
        divide_gpus(len(hardware.gpus), replicas)
    except UsageError as error:
        return fail("replicas", str(error).removeprefix("replicas: "))
    return _ok("replicas", f"{replicas} nodes with {part_of(hardware, replicas).summary()} each")


def part_of(hardware: Hardware, replicas: int) -> Hardware:
    """What the first of so many nodes has of a box that they can share."""
    return msgspec.structs.replace(hardware, gpus=hardware.gpus[: len(hardware.gpus) // replicas])


def check_shared_memory(hardware: Hardware, tp: int, free_bytes: int | None) -> Diagnosis:
    """Whether GPUs that share layers have the shared memory that they want."""
    wanted = wanted_bytes(hardware, tp)
    if free_bytes is None:
        return (_failed if wanted else _ok)("shm", f"no {SHARED_MEMORY}", "mount it, or serve with --tp 1")
    found = f"{SHARED_MEMORY} has {free_bytes >> 20} MiB free, {wanted >> 20} MiB wanted for {tp} GPU(s) a layer"
    if free_bytes < wanted:
        return _failed("shm", found, "start the container with docker run --shm-size=2g, or serve with --tp 1")
    return _ok("shm", found if wanted else f"{SHARED_MEMORY} has {free_bytes >> 20} MiB free; one device needs none")


def check_home(home: Path, running: int | None, problem: str | None) -> Diagnosis:
    """Whether a node can keep its keys and logs in `home`; `running` is the pid of one that does."""
    if problem is not None:
        return _failed("home", f"{home}: {problem}", "give another folder with --home")
    if running is not None:
        return _failed(
            "home", f"{home}: a node is running there (pid {running})", "stop it with p2pserve leave, or give --home"
        )
    return _ok("home", f"{home} can be written")


def check_disk(free_bytes: int, missing_bytes: int, folder: str) -> Diagnosis:
    """Whether what is missing of the model fits the disk of the folder where it is kept."""
    found = f"{folder} has {free_bytes / 1e9:.1f} GB free"
    if missing_bytes:
        found += f", {missing_bytes / 1e9:.1f} GB of the model are to be fetched"
    fix = "make room, or set HF_HOME to a folder on another disk"
    if missing_bytes and free_bytes < missing_bytes + KEPT_FREE_BYTES:
        return _failed("disk", found, fix)
    return _warning("disk", found, fix) if free_bytes < KEPT_FREE_BYTES else _ok("disk", found)


def check_memory(hardware: Hardware, available_bytes: int, model: ModelFound | None) -> Diagnosis:
    """Whether there is room for all layers of the model, or for some: then other boxes must have the rest."""
    found = f"{available_bytes / 2**30:.1f} of {hardware.memory_gib:.1f} GiB available"
    if model is not None and isinstance(model.share, str):
        return _failed("memory", f"{found}: {model.share}", "take a smaller model, or a box with more memory")
    if available_bytes < ENGINE_BYTES:
        return _warning("memory", found, "end what else runs here: a node and its engine take 1 GiB beside the model")
    if model is None or isinstance(model.share, str):
        return _ok("memory", found)
    weights = model.info.weights.of_stage(0, model.share.layers, CPU_FLOAT_BYTES)
    if not hardware.gpus and weights + ENGINE_BYTES > available_bytes:
        return _failed(
            "memory",
            f"{found}; {weights / 2**30:.1f} GiB are the weights, and 1 GiB the engine",
            "end what else runs here, or say with --memory-gib what the model may take",
        )
    fits = f"{found}; {model.share.layers} of {model.info.layers} layers of {model.info.name} fit"
    if model.share.layers < model.info.layers:
        return _warning("memory", fits, "other boxes must hold the rest of the layers before this one serves")
    return _ok("memory", fits)


def check_port(listen: Address, problem: str | None) -> Diagnosis:
    """Whether a node can listen there."""
    if problem is None:
        return _ok("port", f"{listen} is free")
    return fail("port", problem)


def check_announced(announced: FoundAddress | str, listen: Address, *, has_ipv6: bool = False) -> Diagnosis:
    """What others would be told to dial, and whether that can be. A text is why there is no such address. `has_ipv6`:
    this box has an address of the other kind than it would listen on."""
    if isinstance(announced, str):
        return fail("announce", announced)
    address, mapped = announced.address, announced.mapped
    found = f"others are told {address}"
    is_own = address.port == listen.port
    if mapped and listen.port not in mapped and is_own:
        ports = ", ".join(map(str, mapped))
        return _failed("announce", f"{found}, and the provider maps only {ports}", f"listen on one: --port {mapped[0]}")
    ip = plain_ip(address.host)
    if ip is not None and ip.is_loopback and has_ipv6:
        fix = f"listen there: --listen [::]:{listen.port}"
        return _failed("announce", f"{found}: this box has no way out by IPv4, and one by IPv6", fix)
    if ip is not None and not ip.is_global:
        where = "this machine" if ip.is_loopback else "its own private network"
        return _warning("announce", f"{found}: only {where} reaches it", "name the public one: --announce HOST:PORT")
    return _ok("announce", found if is_own else f"{found}, mapped to port {listen.port}")


def check_reach(
    announced: FoundAddress, listen: Address, own: str, answers: Sequence[DialledBack]
) -> Iterator[Diagnosis]:
    """Whether members have met this box where others would be told it is, and what lies between: `answers` are
    theirs, `own` is the address of the interface that leads out of it."""
    verdict, where = judge(answers), f"port {listen.port} at {announced.address}"
    seen = sorted({answer.seen for answer in answers if answer.seen})
    advice = announced.advise(listen, seen[0] if seen else "")
    if verdict is ReachVerdict.UNKNOWN:
        yield note_unseen("reach", "no member has dialled this box", "let members run the same p2pserve release")
        return
    if verdict is ReachVerdict.OPEN:
        yield _ok("reach", f"members reach {where}")
    else:
        why = next((f" ({answer.why.partition('; ')[0]})" for answer in answers if answer.why), "")
        fix = f"{advice}. Until then this box dials the others, and relays connect it with who cannot be dialled"
        yield _warning("reach", f"nobody reaches {where}{why}", fix)
    yield _check_nat(own, seen, advice, is_open=verdict is ReachVerdict.OPEN)


def _check_nat(own: str, seen: Sequence[str], advice: str, *, is_open: bool) -> Diagnosis:
    """Which kind of address translation lies between this box and members, who see it come from `seen`."""
    outside = ", ".join(seen)
    if len(seen) > 1:
        fix = "a provider's NAT with several outside addresses: name the mapped one with --announce HOST:PORT"
        return _warning("nat", f"members see this box come from {outside}", fix)
    if seen and plain_ip(seen[0]) == plain_ip(own):
        return _ok("nat", f"none: members see this box come from its own address {outside}")
    if not is_open:
        return _warning(
            "nat", f"members see this box come from {outside or 'elsewhere'}, and no port is mapped", advice
        )
    return _ok("nat", f"members see this box come from {outside}; its port is mapped")


def check_bandwidth(member: str, up_gbps: float, down_gbps: float) -> Diagnosis:
    """What one connection to a member carries: at least that, as control streams are not made for it."""
    found = f"{up_gbps * 1e3:.0f} Mb/s to {name_of(member)} and {down_gbps * 1e3:.0f} Mb/s back, over one connection"
    if min(up_gbps, down_gbps) < SLOW_GBPS:
        fix = "KV of long prompts takes seconds over it: take a box with more, or serve here with --phase mixed"
        return _warning("bandwidth", found, fix)
    return _ok("bandwidth", found)


def check_packets(member: str, *, is_lost: bool) -> Diagnosis:
    """Whether packets of the size that this box's devices allow get to a member, and back."""
    if not is_lost:
        return _ok("packets", f"large ones get to {name_of(member)} and back")
    found = f"large ones get lost on the way to {name_of(member)} or back, and no router says so; small ones pass"
    fix = (
        "let ICMP through (type 3 code 4, ICMPv6 type 2), or set the device to what the path carries (ip link set eth0 "
        "mtu 1280). Until then each KV link loses some five seconds before it goes on with small packets"
    )
    return _warning("packets", found, fix)


def check_token(token: JoinToken | str, now: float, replicas: int = 1) -> Diagnosis:
    """Whether so many nodes may join by it at unix time `now`, as far as the token itself says; a text is why it is
    none."""
    if isinstance(token, str):
        return fail("token", token)
    grant = token.grant
    left_s = grant.expires_at - now
    lead = ", may lead" if grant.lead else ""
    found = f"{grant.certificate}, {grant.role.value}{lead}, for {grant.uses}, {_describe_days(left_s)}"
    if left_s <= 0:
        return _failed("token", found, f"ask the owner for another (p2pserve token renew {grant.certificate})")
    if grant.role is Role.CLIENT:
        return _warning("token", found, "clients ask with it; to join, this box needs a worker's (p2p_worker_...)")
    if grant.uses < replicas:
        return _failed("token", found, f"{replicas} nodes take a place each: p2pserve token create --uses {replicas}")
    if left_s < SOON_S:
        return _warning("token", found, f"join before, or have it renewed (p2pserve token renew {grant.certificate})")
    return _ok("token", found)


def check_places(token: JoinToken, places: PlacesLeft, replicas: int) -> Diagnosis:
    """Whether so many nodes find a place of the worker's token."""
    left = places.uses - places.taken
    found = f"{left} of {count_of(places.uses, 'place')} left"
    if places.is_holder:
        return _ok("places", f"{found}, and this box has one: it joined with the token before")
    if left < replicas:
        fix = f"ask the owner for another token (p2pserve token create --uses {replicas})"
        return _failed("places", f"{found} of the join token {token.grant.certificate}", fix)
    return _ok("places", found)


def check_refusal(token: JoinToken, problem: str) -> Diagnosis:
    """Why the network did not let this box look around. Members of earlier releases let no worker's token do so."""
    if token.role is Role.WORKER and "is for the role" in problem:
        return note_unseen(
            "network",
            "its members let nobody look around with a worker's token: clock, models, reach, bandwidth and places are "
            "not known",
            "let members run the same p2pserve release, or run this with a client's token (p2p_client_...)",
        )
    return fail("network", problem)


def check_members(found: Iterable[MemberFound]) -> Iterator[Diagnosis]:
    """Who can be reached, address by address. That one is away fails only where all are."""
    members = list(found)
    reached = any(not each.problem for each in members)
    for each in members:
        if each.problem:
            problem, _, fix = each.problem.partition("; ")
            fix = fix or "check the address, the firewall, and that its node is up"
            yield (_warning if reached else _failed)("member", f"{each.member}: {problem}", fix)
            continue
        rtt = f"{each.rtt_s * 1000:.1f} ms away" if each.rtt_s is not None else "it answers"
        yield _ok("member", f"{each.member}: {rtt}, {name_of(each.peer or '')} answers")
    if not members:
        yield _failed("member", "the token names no member to ask", "give one's address: --bootstrap TOKEN,HOST:PORT")


def check_clock(clocks: Sequence[BoxClock]) -> Diagnosis:
    """How far this box's clock is off from those of members, which are as far ahead as they say."""
    if not clocks:
        return note_unseen("clock", "no member has told its own", "let members run the same p2pserve release")
    furthest = max(clocks, key=lambda clock: abs(clock.offset_s))
    offset, error = -furthest.offset_s, furthest.error_s or 0.0
    way = "ahead of" if offset > 0 else "behind"
    found = f"{abs(offset):.3f} s {way} {name_of(furthest.node)}, give or take {error:.3f} s; {len(clocks)} compared"
    if abs(offset) - error > CLOCK_S:
        fix = "set one of the clocks (timedatectl set-ntp true): ends of tokens and times in traces go by them"
        return _warning("clock", found, fix)
    return _ok("clock", found)


def check_network(status: Status, model: ModelFound | None) -> Iterator[Diagnosis]:
    """How many members there are, and whether the model is served."""
    alive = [node for node in status.nodes if node.state == "alive" and node.role != Role.CLIENT.value]
    boxes = count_of(len(alive), "box")
    yield _ok("network", f"{boxes} alive, {'a' if status.coordinator else 'no'} coordinator is elected")
    if model is None:
        return
    offers = [node.advert.model for node in alive if node.advert is not None and node.advert.model is not None]
    same = sum(offer.service == model.info.service for offer in offers)
    if same:
        yield _ok("served", f"{same} box{'es' * (same != 1)} with {model.info.service}")
    else:
        others = ", ".join(sorted({offer.service for offer in offers})) or "no model"
        yield _warning(
            "served",
            f"nobody offers {model.info.service}; the network offers {others}",
            "this box would be the first of its model; to help another, give that with --model",
        )


def check_model(model: ModelFound | str) -> Diagnosis:
    """Whether it can be served; a text is why not."""
    if isinstance(model, str):
        return fail("model", model, "give the folder that holds config.json, or an id such as Qwen/Qwen3-0.6B")
    return _ok("model", f"{model.info.name}: {model.info.service}, {model.info.layers} layers")


def is_fit(found: Iterable[Diagnosis]) -> bool:
    """Whether no check has failed."""
    return all(each.fitness is not Fitness.FAILED for each in found)


def note_unseen(check: str, why: str, fix: str) -> Diagnosis:
    """A check that could not be made has not passed."""
    return _warning(check, why, fix)


def fail(check: str, problem: str, fix: str = "") -> Diagnosis:
    """A check that ended with this line: what is wrong, and after a semicolon the fix, where it is not `fix`."""
    found, _, said = problem.partition("; ")
    return _failed(check, found, said or fix)


def _describe_days(left_s: float) -> str:
    if left_s <= 0:
        return f"ended {-left_s / 86400:.1f} days ago"
    return f"ends in {left_s / 86400:.1f} days"


def _ok(check: str, found: str, fix: str = "") -> Diagnosis:
    return Diagnosis(check=check, fitness=Fitness.OK, found=found)


def _warning(check: str, found: str, fix: str) -> Diagnosis:
    return Diagnosis(check=check, fitness=Fitness.WARNING, found=found, fix=fix)


def _failed(check: str, found: str, fix: str) -> Diagnosis:
    return Diagnosis(check=check, fitness=Fitness.FAILED, found=found, fix=fix)
