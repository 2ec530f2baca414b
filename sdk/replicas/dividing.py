"""How a box is divided among its nodes: which GPUs, port, folder and options each of them gets. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ...bootstrap import Address, parse_address
from ...bootstrap.trust.tokens import Grant
from ...coordinator.names import count_of
from ...coordinator.regrouping.divisions import CutOffer
from ...node.box.hardware import CPU_KV_CACHE_MIB, VISIBLE
from ...node.engine.emulated.backend import EMULATED
from ..errors import UsageError
from ..options.values import folder_of_node

if TYPE_CHECKING:
    from ...node.engine.emulated.model import Cards

MAX_PORT: Final = 65_535

OF_THE_BOX: Final = ("usd_per_hour", "up_gbps", "down_gbps", "relay_gbps", "memory_gib")
"""Options whose value is the whole box's, whatever runs on it: each node has its share of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """What one node of a box is started with. `folder`: in the home, and what its lines begin with. `options`: those
    that differ from what the command was given. `variables`: of its environment, besides those of the command."""

    folder: str
    listen: Address
    options: Mapping[str, Any]
    variables: Mapping[str, str]

    def with_options(self, more: Mapping[str, Any]) -> NodePart:
        """With these besides."""
        return replace(self, options={**self.options, **more})


def divide_box(options: Mapping[str, Any], replicas: int, visible: Sequence[str]) -> tuple[NodePart, ...]:
    """The parts of so many nodes of a box whose GPUs CUDA knows by these names. `options` are those of `join`. Raises
    UsageError, AddressError or GpuError."""
    emulated = emulated_cards(options)
    each = divide_gpus(len(visible) if emulated is None else emulated.count, replicas)
    if options["tp"] is not None and options["tp"] > each:
        raise UsageError(f"tp: {options['tp']} GPUs are to share each layer, and each of {replicas} nodes has {each}")
    if emulated is not None:
        return _make_parts(options, [{"emulate": f"{each}x{emulated.gpu.name}"}] * replicas, [{}] * replicas)
    cards = [visible[number * each : (number + 1) * each] for number in range(replicas)]
    return _make_parts(options, [{}] * replicas, [{VISIBLE: ",".join(each)} for each in cards])


def share_box(options: Mapping[str, Any], models: Sequence[str | None], gpus: int) -> tuple[NodePart, ...]:
    """The parts of a node for each of these models (None: one that the network gives it) on a box of so many GPUs, of
    which all use the first. Raises UsageError or AddressError."""
    if None in models and gpus > 1:
        raise UsageError(
            f"max-services: engines that share a process have one GPU, and this box has {gpus}; run a join for each "
            "GPU (CUDA_VISIBLE_DEVICES), or leave --max-services out"
        )
    if None not in models and len({*models}) < len(models):
        raise UsageError("model: each is given once; for several replicas of one take --replicas")
    if options["replicas"] != 1:
        raise UsageError("replicas: they are of one model; leave --replicas out, or all models but one")
    if options["tp"] not in (None, 1):
        raise UsageError("tp: engines that share a process have one GPU; leave --tp out, or all models but one")
    memory_mib = options["kv_cache_mib"]
    if memory_mib is None and gpus:
        raise UsageError("kv_cache_mib: say how much of the GPU's memory is for the KV of all models (--kv-cache-mib)")
    memory_mib = memory_mib or CPU_KV_CACHE_MIB
    common: dict[str, Any] = {"tp": 1, "kv_cache_mib": memory_mib}
    if options["memory_gib"] is not None:  # the KV in it is all of them's, the rest is divided
        kv_gib = memory_mib / 1024
        common["memory_gib"] = kv_gib + max(0.0, options["memory_gib"] - kv_gib) / len(models)
    own = [{"model": model, **common} for model in models]
    return _make_parts(options, own, [{}] * len(models))


def _make_parts(
    options: Mapping[str, Any], own: Sequence[Mapping[str, Any]], variables: Sequence[Mapping[str, str]]
) -> tuple[NodePart, ...]:
    """A part for each of these nodes' own options, with the next port and a share of what the box has."""
    if options["engine_channel"] is not None:
        raise UsageError("an engine channel is for one node; leave --engine-channel out")
    listens = list_ports(_listen_of(options), len(own), "listen")
    announced: list[Address | None] = [None] * len(own)
    if options["announce"] is not None:
        announced = [*list_ports(parse_address(options["announce"]), len(own), "announce")]
    shared = share_options(options, len(own))
    return tuple(
        NodePart(
            folder=folder_of_node(number + 1),
            listen=listens[number],
            options={
                **shared,
                **({"http": None} if number else {}),  # one door for all: the network is the same behind each
                **mine,
                "listen": str(listens[number]),
                "port": None,
                "announce": None if (at := announced[number]) is None else str(at),
            },
            variables=variables[number],
        )
        for number, mine in enumerate(own)
    )


def share_options(options: Mapping[str, Any], replicas: int) -> dict[str, float]:
    """What each of so many nodes has of the options that say what the whole box has."""
    return {name: options[name] / replicas for name in OF_THE_BOX if options[name] is not None}


def emulated_cards(options: Mapping[str, Any]) -> Cards | None:
    """The GPUs that the engines of the box only model; None for engines that use its own. Raises GpuError."""
    if options["backend"] != EMULATED.name:
        return None
    from ...node.engine.emulated.model import parse_cards  # with tokenizers, which only such boxes pay

    return parse_cards(options["emulate"] or "", options["emulate_specs"])


def list_cuts(gpus: int) -> tuple[int, ...]:
    """Among how many nodes so many GPUs can be divided evenly."""
    return tuple(number for number in range(1, gpus + 1) if gpus % number == 0)


def divide_gpus(gpus: int, replicas: int) -> int:
    """How many of the box's GPUs each of so many nodes has. Raises UsageError."""
    if not gpus:
        raise UsageError(
            "replicas: this box has no GPUs to divide, and several engines would share the one memory of its "
            "processors; leave --replicas out"
        )
    if gpus % replicas:
        cuts = list_cuts(gpus)
        most = f"{', '.join(map(str, cuts[:-1]))} or {cuts[-1]}" if len(cuts) > 1 else "1"
        raise UsageError(f"replicas: {replicas} nodes cannot share {count_of(gpus, 'GPU')} evenly; take {most}")
    return gpus // replicas


def list_ports(first: Address, replicas: int, field: str) -> tuple[Address, ...]:
    """An address for each node: one port after the other; port 0 is any free one for all. Raises UsageError."""
    last = first.port + replicas - 1
    if first.port and last > MAX_PORT:
        raise UsageError(f"{field}: {replicas} nodes need the ports {first.port} to {last}, and the last is {MAX_PORT}")
    return tuple(Address(first.host, first.port and first.port + number) for number in range(replicas))


def check_places(grant: Grant, replicas: int) -> None:
    """Raise UsageError for a join token that is for fewer boxes than there are nodes: each node takes a place."""
    if grant.uses < replicas:
        raise UsageError(
            f"replicas: each node takes a place of the join token, and {grant.certificate} has {grant.uses} for "
            f"{replicas} nodes; ask the network's owner for another one (p2pserve token create --uses {replicas})"
        )


def choose_offers(
    options: Mapping[str, Any],
    fitting: Sequence[CutOffer],
    visible: Sequence[str],
    mapped: Sequence[int],
    places: int,
) -> tuple[CutOffer, ...]:
    """Of the cuts that fit a box those that the network may choose: with a place of the join token for each node, and
    with ports that can be dialled wherever a provider maps some. None where there is but one."""
    found = []
    for offer in fitting:
        try:
            parts = divide_box(options, offer.replicas, visible)
        except UsageError:
            continue
        if offer.replicas <= places and describe_unmapped(parts, mapped) is None:
            found.append(offer)
    return tuple(found) if len(found) > 1 else ()


def describe_unmapped(parts: Sequence[NodePart], mapped: Sequence[int]) -> str | None:
    """For people, where a provider maps these ports of the box alone: which nodes nobody can dial, and what to do;
    None where there are none."""
    closed = [part for part in parts if part.listen.port and part.listen.port not in mapped]
    if not mapped or not closed or any(part.options["announce"] is not None for part in parts):
        return None
    who = ", ".join(part.folder for part in closed)
    wanted = " ".join(f"-p {part.listen.port}:{part.listen.port}" for part in parts)
    return (
        f"ports: the provider maps {', '.join(map(str, mapped))}, and each node listens on a port of its own: nobody "
        f"can dial {who}; they dial the others, and relays connect them with who cannot be dialled. Rent the box with "
        f"all of its ports open ({wanted}) for direct links"
    )


def _listen_of(options: Mapping[str, Any]) -> Address:
    port = options["port"]
    return parse_address(options["listen"] if port is None else f"0.0.0.0:{port}")
