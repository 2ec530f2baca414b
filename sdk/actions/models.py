"""`p2pserve models` and the commands after it: what a network serves, and what an admin wants it to serve."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ...bootstrap import RemoteError, Role
from ...coordinator.demand import mean_lengths
from ...coordinator.names import name_of
from ...coordinator.services.catalogue import EMPTY, CatalogueEntry, ServiceCatalogue, find_slo_fault
from ...node.catalogue.refusals import NOT_OWNER
from ...node.messages import Advert, Status
from ...node.owner.messages import CatalogueChange
from ..client import Client
from ..errors import AccessRefused, NotReady, RequestFailed, UsageError
from .network import client_of, show_network
from .status_view import CLIENT, hosting_faults, keep_whole, open_console, print_prose

MODEL_COLUMNS: Final = ("service", "model", "boxes", "ready", "tokens", "KV tokens")


class OfferedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that boxes of a network offer, or the catalogue has. `service` is what a request calls it, or `name`, or
    `entry`: as the catalogue does. `longest`: tokens of a prompt with its answer; `kv_tokens`: that fit on all ready
    boxes together; `removed`: boxes offer it, and it gets no new requests."""

    service: str
    name: str
    boxes: int = 0
    ready: int = 0
    longest: int = 0
    kv_tokens: int = 0
    entry: str = ""
    slo: str = ""
    weight: float = 1.0
    removed: bool = False

    @property
    def called(self) -> str:
        """As the catalogue calls it, or else its service's id."""
        return self.entry or self.service


def show_list(arguments: SimpleNamespace) -> int:
    """`p2pserve models list`."""
    show_network(arguments, _print_list)
    return 0


def show_one(arguments: SimpleNamespace) -> int:
    """`p2pserve models show`."""
    with client_of(arguments) as client:
        status = client.status()
    found = [each for each in list_models(status) if arguments.name in (each.entry, each.service, each.name)]
    if not found:
        there = ", ".join(each.called for each in list_models(status)) or "none"
        raise UsageError(f"name: this network has no {arguments.name!r}; it has {there}")
    if arguments.format == "json":
        print(json.dumps([_describe_json(each, status) for each in found]))
        return 0
    for each in found:
        print_prose(describe_model(each, status), open_console())
    return 0


def add(arguments: SimpleNamespace) -> int:
    """`p2pserve models add`."""
    change = CatalogueChange(add=read_entry(arguments.name, arguments.model, arguments.slo, arguments.weight))
    return _change(arguments, change, f"{arguments.name} is in the catalogue, with the model {arguments.model}")


def remove(arguments: SimpleNamespace) -> int:
    """`p2pserve models remove`."""
    text = f"{arguments.name} is out of the catalogue: it gets no new requests, and those that run come to their end"
    return _change(arguments, CatalogueChange(remove=arguments.name), text)


MODEL_COMMANDS: Final[dict[str, Callable[[SimpleNamespace], int]]] = {
    "list": show_list,
    "show": show_one,
    "add": add,
    "remove": remove,
}


def read_entry(name: str, model: str, slo: str | None, weight: float) -> CatalogueEntry:
    """What is to be added. Raises UsageError for what the network would refuse, and for a folder of this machine that
    holds no model."""
    try:
        entry = CatalogueEntry(name=name, model=model, slo=slo or "", weight=weight)
    except ValueError as error:
        raise UsageError(str(error)) from None
    # Where only the client is installed, there is no planner that reads them: the box with the key looks again.
    with suppress(ModuleNotFoundError):
        if fault := find_slo_fault(entry.slo):
            raise UsageError(fault)
    folder = Path(model)
    if model.startswith("/") and folder.exists() and not (folder / "config.json").is_file():
        raise UsageError(f"model: {model} is no folder of a model: there is no config.json in it")
    return entry


def _change(arguments: SimpleNamespace, change: CatalogueChange, text: str) -> int:
    """Have the box with the network's key change the catalogue. Raises NotReady, AccessRefused, UsageError,
    RequestFailed."""
    with client_of(arguments) as client:
        changed = _ask_owner(client, change)
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(changed)))
    else:
        print_prose([f"{text} (version {changed.version})"], open_console())
    return 0


def _ask_owner(client: Client, change: CatalogueChange) -> ServiceCatalogue:
    """The catalogue as the box with the network's key has changed it."""
    nodes = client.status().nodes
    for owner in (node.peer for node in nodes if node.role == Role.ADMIN.value and node.state == "alive"):
        try:
            return client.change_catalogue(change, owner).catalogue
        except RequestFailed as error:
            if not _has_no_key(error):
                raise
    away = "the box that ran `p2pserve bootstrap` is away, and nobody else has the network's key; try later"
    raise NotReady(f"catalogue: {away}")


def _has_no_key(error: RequestFailed) -> bool:
    """Whether another box is to be asked. Raises AccessRefused or UsageError where that would not help."""
    cause = error.__cause__
    if not isinstance(cause, RemoteError):
        return False
    if cause.code == "forbidden":
        raise AccessRefused(
            "token: only an admin of the network changes its catalogue; make a token on the box that ran `bootstrap`: "
            "p2pserve token create --role admin"
        ) from error
    if cause.code == "invalid":
        raise UsageError(cause.message) from error
    return cause.code == NOT_OWNER


def list_models(status: Status) -> list[OfferedModel]:
    """The models of all living boxes, in order of service, and then those of the catalogue that no box has."""
    catalogue = status.catalogue or EMPTY
    adverts = [
        node.advert
        for node in status.nodes
        if node.role != CLIENT and node.state == "alive" and node.advert is not None and node.advert.model is not None
    ]
    found = []
    for service in sorted({advert.model.service for advert in adverts if advert.model is not None}):
        offers = [advert for advert in adverts if advert.model is not None and advert.model.service == service]
        first = offers[0].model
        assert first is not None
        entry = catalogue.entry_of(service, first.name)
        engines = [each.engine for each in offers if each.engine is not None and each.engine.state == "ready"]
        found.append(
            OfferedModel(
                service=service,
                name=first.name,
                boxes=len(offers),
                ready=len(engines),
                longest=max((engine.max_model_len for engine in engines), default=0),
                kv_tokens=sum(engine.kv_tokens for engine in engines),
                removed=catalogue.is_removed(service, first.name),
                **_tell_entry(entry),
            )
        )
    there = {each.entry for each in found}
    lacking = (entry for entry in catalogue.entries if entry.name not in there)
    return [*found, *(OfferedModel(service="", name=entry.model, **_tell_entry(entry)) for entry in lacking)]


def _tell_entry(entry: CatalogueEntry | None) -> dict[str, Any]:
    return {} if entry is None else {"entry": entry.name, "slo": entry.slo, "weight": entry.weight}


def describe_model(model: OfferedModel, status: Status) -> list[str]:
    """All that is known of one, in lines for people."""
    service = f", service {model.service}" if model.service else ""
    lines = [f"{model.called}: model {model.name}{service}"]
    if model.entry:
        lines.append(f"  deadlines {model.slo or 'as the network plans for'}, weight {model.weight:g}")
    elif not model.removed:
        lines.append("  not in the catalogue: its boxes were started with it")
    if model.removed:
        lines.append("  out of the catalogue: it gets no new requests")
    boxes, faults = _boxes_of(model, status), hosting_faults(status, model.entry)
    lines.append(
        f"  boxes: {', '.join(boxes)}" if boxes else "  no box has it yet: requests for it are told to come again"
    )
    lines += [f"  not hosted by {name_of(peer)}: {fault}" for peer, fault in sorted(faults.items())]
    if model.ready:
        lines.append(f"  {model.longest} tokens at most, {model.kv_tokens} tokens of KV on {model.ready} ready")
    lengths = _mean_lengths(model, status)
    if lengths is not None:
        lines.append(f"  requests have {lengths[0]:.0f} tokens and answers {lengths[1]:.0f}, on average")
    return lines


def _describe_json(model: OfferedModel, status: Status) -> dict[str, Any]:
    lengths = _mean_lengths(model, status)
    told: dict[str, Any] = {"prompt_tokens": lengths[0], "output_tokens": lengths[1]} if lengths is not None else {}
    told["not_hosted_by"] = hosting_faults(status, model.entry)
    return {**msgspec.to_builtins(model), "nodes": _boxes_of(model, status), **told}


def _boxes_of(model: OfferedModel, status: Status) -> list[str]:
    return [name_of(peer) for peer, _ in _offers_of(model, status)]


def _offers_of(model: OfferedModel, status: Status) -> list[tuple[str, Advert]]:
    return [
        (node.peer, node.advert)
        for node in status.nodes
        if node.state == "alive" and node.advert is not None and node.advert.model is not None
        if node.advert.model.service == model.service
    ]


def _mean_lengths(model: OfferedModel, status: Status) -> tuple[float, float] | None:
    """Tokens of a prompt and of an answer, as gateways have seen them lately, or else as the catalogue remembers."""
    seen = mean_lengths(advert.demand for _, advert in _offers_of(model, status) if advert.demand is not None)
    entry = status.catalogue.find(model.entry) if status.catalogue is not None else None
    return seen or (entry.lengths if entry is not None else None)


def _print_list(status: Status, arguments: SimpleNamespace, console: Console) -> None:
    found = list_models(status)
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        print_models(found, console)


def print_models(models: Sequence[OfferedModel], console: Console) -> None:
    """A table; where that is too wide for long names, which are typed back, a paragraph for each. Or that there is
    none."""
    if not models:
        console.print("models: no box of this network offers one; start one with `p2pserve join --model ...`, or have")
        console.print("boxes that joined without a model host one: `p2pserve models add NAME --model ...`")
        return
    table = Table(*MODEL_COLUMNS, box=None, pad_edge=False, header_style="bold")
    for each in models:
        figures = (str(value) if value else "-" for value in (each.longest, each.kv_tokens))
        boxes = "removed" if each.removed else str(each.boxes)
        table.add_row(each.called, each.name, boxes, str(each.ready), *figures)
    keep_whole(table, *MODEL_COLUMNS)
    if Measurement.get(console, console.options.update(max_width=10**4), table).maximum <= console.width:
        console.print(table)
        return
    for each in models:
        longest = f", {each.longest} tokens at most" if each.longest else ""
        kv = f", {each.kv_tokens} tokens of KV" if each.kv_tokens else ""
        console.print(f"{each.called}\n    {each.name}")
        removed = "removed, " * each.removed
        console.print(f"    {removed}{each.boxes} box{'es' * (each.boxes != 1)}, {each.ready} ready{longest}{kv}")
