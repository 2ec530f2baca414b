"""The catalogue of a network: which services it is to serve, and which it serves no more. Pure: values in, values out.

    catalogue = add_entry(ServiceCatalogue(), CatalogueEntry(name="chat", model="Qwen/Qwen3-8B", slo="5x"), offers)
    catalogue = remove_name(catalogue, "chat", offers)

The owner of the network signs it, and every node keeps the latest. A box that was started with a model of its own
brings that into the network without an entry: nobody but an admin takes it out again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from ..bounds import MAX_SERVICES, Counter, ModelName

MAX_REMOVED: Final = 64  # names; the oldest is forgotten
MAX_NAME_CHARS: Final = 64
MAX_SLO_CHARS: Final = 64
MAX_WEIGHT: Final = 1000.0
MAX_MEAN_TOKENS: Final = 1 << 24
LENGTH_NEWS: Final = 1.5
"""Mean lengths are told anew when they have changed by so much. Higher: the catalogue changes less often."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
_HUB: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)

EntryName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
MeanTokens = Annotated[int, Meta(ge=0, le=MAX_MEAN_TOKENS)]
Weight = Annotated[float, Meta(gt=0.0, le=MAX_WEIGHT)]


class CatalogueError(ValueError):
    """The catalogue cannot be so; says in one line what is wrong."""


class OfferedName(NamedTuple):
    """What a box offers: its service's id, and what its owner calls the model."""

    service: str
    name: str


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One service. `model`: a folder on the boxes, a Hugging Face id, a bundled or an emulated model.
    `slo`: its deadlines; "": those that the coordinator plans for anyway. `weight`: its part of the boxes that may
    host any service, beside the others'. `prompt_tokens`, `output_tokens`: of its requests on average, as the network
    has learned; 0: nobody has asked."""

    name: EntryName
    model: ModelName
    slo: Annotated[str, Meta(max_length=MAX_SLO_CHARS)] = ""
    weight: Weight = 1.0
    prompt_tokens: MeanTokens = 0
    output_tokens: MeanTokens = 0

    def __post_init__(self) -> None:
        if fault := find_entry_fault(self):
            raise ValueError(fault)

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Tokens of a prompt and of an answer; None where that is not known."""
        return (self.prompt_tokens, self.output_tokens) if self.prompt_tokens and self.output_tokens else None

    @property
    def model_name(self) -> str:
        """What a box that has the model calls it: of a folder the last part."""
        return PurePosixPath(self.model).name if self.model.startswith("/") else self.model


class ServiceCatalogue(msgspec.Struct, frozen=True, kw_only=True):
    """All entries. `version` grows by one with each change. `removed`: services and models, by id or name, that get no
    new requests though boxes offer them."""

    version: Counter = 0
    entries: Annotated[tuple[CatalogueEntry, ...], Meta(max_length=MAX_SERVICES)] = ()
    removed: Annotated[tuple[ModelName, ...], Meta(max_length=MAX_REMOVED)] = ()

    def __post_init__(self) -> None:
        if len({entry.name for entry in self.entries}) < len(self.entries):
            raise ValueError("two entries have one name")
        if len({entry.model_name for entry in self.entries}) < len(self.entries):
            raise ValueError("two entries have one model")

    def find(self, name: str) -> CatalogueEntry | None:
        """The entry of that name."""
        return next((entry for entry in self.entries if entry.name == name), None)

    def entry_of(self, service: str, model_name: str) -> CatalogueEntry | None:
        """The entry of what a box offers, if there is one."""
        return next((entry for entry in self.entries if entry.model_name in (model_name, service)), None)

    def model_of(self, name: str) -> str:
        """What the boxes call that which a request calls so: another name than this one where an entry has it."""
        entry = self.find(name)
        return entry.model_name if entry is not None else name

    def is_removed(self, service: str, model_name: str) -> bool:
        """Whether what a box offers gets no new requests."""
        return not {service, model_name}.isdisjoint(self.removed)


EMPTY: Final = ServiceCatalogue()
_catalogues: Final = msgspec.msgpack.Decoder(ServiceCatalogue)


def write_catalogue(catalogue: ServiceCatalogue) -> bytes:
    """As it travels, and is kept."""
    return msgspec.msgpack.encode(catalogue)


def read_catalogue(payload: bytes) -> ServiceCatalogue | None:
    """A catalogue from its bytes; None for what is none."""
    try:
        return _catalogues.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def find_name_fault(name: str) -> str:
    """Why no entry can be called so, for people; "" where one can."""
    if len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name) is not None:
        return ""
    return (
        f"{name[:80]!r} is no name; write 1 to {MAX_NAME_CHARS} letters, digits and . _ - : / that begin with a letter "
        "or a digit"
    )


def find_entry_fault(entry: CatalogueEntry) -> str:
    """What is wrong with an entry, for people; "" where nothing is."""
    if fault := find_name_fault(entry.name):
        return f"name: {fault}"
    if not entry.model or not entry.model.isprintable() or entry.model != entry.model.strip():
        return f"model: {entry.model[:80]!r} is none; give a folder, bundled or bundled-prose, or a Hugging Face id"
    if entry.model.startswith((".", "~")):
        return (
            f"model: {entry.model[:200]} depends on where it is looked for; give the folder's whole path on the boxes"
        )
    if "/" in entry.model and not entry.model.startswith("/") and _HUB.fullmatch(entry.model) is None:
        return f"model: {entry.model[:200]} is neither a whole path nor a Hugging Face id of the form owner/name"
    if not entry.model_name:
        return f"model: {entry.model[:200]} is no folder of a model"
    if not 0.0 < entry.weight <= MAX_WEIGHT:  # NaN is not, either
        return f"weight: {entry.weight:g} is none; give a number above 0, at most {MAX_WEIGHT:g}"
    return f"slo: it has more than {MAX_SLO_CHARS} characters" if len(entry.slo) > MAX_SLO_CHARS else ""


def add_entry(
    catalogue: ServiceCatalogue, entry: CatalogueEntry, offers: Iterable[OfferedName] = ()
) -> ServiceCatalogue:
    """With one more service; its model is removed no more. `offers`: what the boxes have. Raises CatalogueError."""
    known, offered = catalogue.find(entry.name), tuple(offers)
    if known is not None:
        raise CatalogueError(f"name: {entry.name} is in the catalogue already, with the model {known.model}")
    twin = next((each for each in catalogue.entries if each.model_name == entry.model_name), None)
    if twin is not None:
        raise CatalogueError(f"model: {entry.model} is in the catalogue already, as {twin.name}")
    others = {name for each in offered if entry.model_name not in each for name in each}
    others |= {each.model_name for each in catalogue.entries}
    if entry.name in others:
        raise CatalogueError(f"name: {entry.name} is what boxes of this network call another model")
    if len(catalogue.entries) >= MAX_SERVICES:
        raise CatalogueError(f"the catalogue has {MAX_SERVICES} services, and takes no more; remove one first")
    back = {entry.name, entry.model_name, *(each.service for each in offered if entry.model_name in each)}
    return _changed(
        catalogue, (*catalogue.entries, entry), tuple(each for each in catalogue.removed if each not in back)
    )


def remove_name(catalogue: ServiceCatalogue, name: str, offers: Iterable[OfferedName] = ()) -> ServiceCatalogue:
    """Without the service that is called so: an entry, or what a box was started with. Raises CatalogueError."""
    entry, offered = catalogue.find(name), tuple(offers)
    if entry is not None:
        out = entry.model_name
    elif any(name in each for each in offered) and name not in catalogue.removed:
        out = name
    else:
        raise CatalogueError(f"name: this network has no {name[:80]!r}; it has {_name_all(catalogue, offered)}")
    kept = tuple(each for each in catalogue.entries if each is not entry and out != each.model_name)
    removed = (*(each for each in catalogue.removed if each != out), out)
    return _changed(catalogue, kept, removed[-MAX_REMOVED:])


def learn_lengths(catalogue: ServiceCatalogue, seen: Mapping[str, tuple[float, float]]) -> ServiceCatalogue:
    """With what requests are like now, by entry; the same catalogue where that is no news."""
    entries = tuple(_learn(entry, seen.get(entry.name)) for entry in catalogue.entries)
    return catalogue if entries == catalogue.entries else _changed(catalogue, entries, catalogue.removed)


def _learn(entry: CatalogueEntry, seen: tuple[float, float] | None) -> CatalogueEntry:
    if seen is None:
        return entry
    prompt, output = (min(max(1, round(tokens)), MAX_MEAN_TOKENS) for tokens in seen)
    ratios = [max(a, b) / max(1, min(a, b)) for a, b in ((prompt, entry.prompt_tokens), (output, entry.output_tokens))]
    if entry.lengths is not None and max(ratios) < LENGTH_NEWS:
        return entry
    return msgspec.structs.replace(entry, prompt_tokens=prompt, output_tokens=output)


def _changed(
    catalogue: ServiceCatalogue, entries: tuple[CatalogueEntry, ...], removed: tuple[str, ...]
) -> ServiceCatalogue:
    return ServiceCatalogue(version=catalogue.version + 1, entries=entries, removed=removed)


def _name_all(catalogue: ServiceCatalogue, offers: Sequence[OfferedName]) -> str:
    named = {entry.model_name for entry in catalogue.entries}
    others = (each.name for each in offers if each.name not in named and not catalogue.is_removed(*each))
    names = sorted({*(entry.name for entry in catalogue.entries), *others})
    return ", ".join(names[:MAX_SERVICES]) if names else "none"


def find_slo_fault(text: str) -> str:
    """What is wrong with the deadlines of an entry, for people; "" where nothing is."""
    from ..planning.model.slo import read_slo  # with the planner's libraries, which clients need not have
    from ..planning.model.workload import WorkloadError

    try:
        if text:
            read_slo(text)
    except WorkloadError as error:
        return str(error)
    return ""
