"""The catalogue of services: what may be added and removed, what names mean, and what cannot be read."""

import random
from typing import Any

import msgspec
import pytest

from p2pserve.coordinator.bounds import MAX_SERVICES
from p2pserve.coordinator.services.catalogue import (
    EMPTY,
    LENGTH_NEWS,
    MAX_MEAN_TOKENS,
    MAX_REMOVED,
    CatalogueEntry,
    CatalogueError,
    OfferedName,
    ServiceCatalogue,
    add_entry,
    find_slo_fault,
    learn_lengths,
    read_catalogue,
    remove_name,
    write_catalogue,
)

CHAT = CatalogueEntry(name="chat", model="Qwen/Qwen3-8B", slo="5x", weight=2.0)
CODE = CatalogueEntry(name="code", model="/srv/models/coder")
BOTH = add_entry(add_entry(EMPTY, CHAT), CODE)
OFFERS = (OfferedName("Qwen3-8B-1234", "Qwen/Qwen3-8B"), OfferedName("llama-77", "noise"))


def test_each_change_is_one_version_and_travels() -> None:
    assert (EMPTY.version, BOTH.version, BOTH.entries) == (0, 2, (CHAT, CODE))
    assert read_catalogue(write_catalogue(BOTH)) == BOTH
    removed = remove_name(BOTH, "chat")
    assert (removed.version, removed.entries, removed.removed) == (3, (CODE,), ("Qwen/Qwen3-8B",))


def test_a_name_stands_for_the_model_that_boxes_offer() -> None:
    assert [BOTH.model_of(name) for name in ("chat", "code", "noise")] == ["Qwen/Qwen3-8B", "coder", "noise"]
    assert BOTH.entry_of("Qwen3-8B-1234", "Qwen/Qwen3-8B") == CHAT
    assert BOTH.entry_of("llama-1", "coder") == CODE
    assert BOTH.entry_of("llama-1", "noise") is None


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (CHAT, "name: chat is in the catalogue already, with the model Qwen/Qwen3-8B"),
        (CatalogueEntry(name="talk", model=CHAT.model), "model: Qwen/Qwen3-8B is in the catalogue already, as chat"),
        (CatalogueEntry(name="coder", model="a/b"), "name: coder is what boxes of this network call another model"),
        (CatalogueEntry(name="noise", model="a/b"), "name: noise is what boxes of this network call another model"),
        (CatalogueEntry(name="llama-77", model="a/b"), "name: llama-77 is what boxes of this network call another"),
    ],
)
def test_what_would_be_ambiguous_is_not_added(entry: CatalogueEntry, why: str) -> None:
    with pytest.raises(CatalogueError, match=f"^{why}"):
        add_entry(BOTH, entry, OFFERS)


def test_a_box_may_bring_the_model_before_it_is_added_under_its_own_name() -> None:
    named = CatalogueEntry(name="noise", model="/srv/noise")
    assert add_entry(EMPTY, named, OFFERS).entries == (named,)


def test_a_catalogue_takes_so_many_services() -> None:
    full = EMPTY
    for number in range(MAX_SERVICES):
        full = add_entry(full, CatalogueEntry(name=f"s{number}", model=f"a/m{number}"))
    with pytest.raises(CatalogueError, match=f"has {MAX_SERVICES} services"):
        add_entry(full, CHAT)
    assert len(write_catalogue(full)) < 1 << 16, "it must fit one document"


def test_what_a_box_brings_is_removed_by_its_name_or_its_id_and_comes_back_when_it_is_added() -> None:
    for name in OFFERS[1]:
        out = remove_name(EMPTY, name, OFFERS)
        assert out.is_removed(*OFFERS[1])
        assert not out.is_removed(*OFFERS[0])
        back = add_entry(out, CatalogueEntry(name="prose", model="/srv/noise"), OFFERS)
        assert not back.is_removed(*OFFERS[1])
    with pytest.raises(CatalogueError, match=r"^name: this network has no 'nothing'; it has Qwen/Qwen3-8B, noise$"):
        remove_name(EMPTY, "nothing", OFFERS)
    with pytest.raises(CatalogueError, match=r"has no 'noise'; it has Qwen/Qwen3-8B$"):
        remove_name(remove_name(EMPTY, "noise", OFFERS), "noise", OFFERS)


def test_an_entry_may_be_removed_by_its_models_name_and_takes_that_with_it() -> None:
    assert remove_name(BOTH, "chat", OFFERS).is_removed(*OFFERS[0])
    by_model = remove_name(BOTH, "Qwen/Qwen3-8B", OFFERS)
    assert (by_model.entries, by_model.removed) == ((CODE,), ("Qwen/Qwen3-8B",))


def test_what_was_removed_longest_ago_is_forgotten_where_there_is_too_much_of_it() -> None:
    catalogue = EMPTY
    for number in range(MAX_REMOVED + 3):
        catalogue = remove_name(catalogue, f"m{number}", (OfferedName(f"s{number}", f"m{number}"),))
    assert (len(catalogue.removed), catalogue.removed[0]) == (MAX_REMOVED, "m3")
    assert read_catalogue(write_catalogue(catalogue)) == catalogue


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "two\nlines"}, "name"),
        ({"name": "line\n"}, "name"),
        ({"name": "\x1b[2J"}, "name"),
        ({"name": "-x"}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "n" * 65}, "name"),
        ({"name": "ñ"}, "name"),
        ({"model": ""}, "model"),
        ({"model": "a\nb"}, "model"),
        ({"model": " "}, "model"),
        ({"model": "./folder"}, "model"),
        ({"model": "~/folder"}, "model"),
        ({"model": "a/b/c"}, "model"),
        ({"model": "a/../b"}, "model"),
        ({"model": "/"}, "model"),
        ({"weight": 0.0}, "weight"),
        ({"weight": -1.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"weight": 1001.0}, "weight"),
        ({"slo": "5" * 65}, "slo"),
    ],
)
def test_an_entry_that_cannot_be_is_told_by_its_field(changes: dict[str, Any], field: str) -> None:
    fields = {"name": "chat", "model": "a/b", **changes}
    with pytest.raises(ValueError, match=f"^{field}: ") as caught:
        CatalogueEntry(**fields)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    payload = msgspec.msgpack.encode({"version": 1, "entries": [fields]})
    assert read_catalogue(payload) is None


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"version": -1}),
        msgspec.msgpack.encode({"entries": [{"name": f"s{n}", "model": f"a/m{n}"} for n in range(MAX_SERVICES + 1)]}),
        msgspec.msgpack.encode({"entries": [{"name": "a", "model": "a/b"}, {"name": "a", "model": "a/c"}]}),
        msgspec.msgpack.encode({"entries": [{"name": "a", "model": "a/b"}, {"name": "b", "model": "a/b"}]}),
        msgspec.msgpack.encode({"removed": ["x"] * (MAX_REMOVED + 1)}),
        msgspec.msgpack.encode({"removed": ["x" * 513]}),
    ],
)
def test_what_is_no_catalogue_is_nothing(payload: bytes) -> None:
    assert read_catalogue(payload) is None


def test_what_a_later_release_adds_is_skipped() -> None:
    later = {
        "version": 2, "entries": [{"name": "chat", "model": "a/b", "boxes": 3}], "removed": [], "epochs": {"a": 1},
    }  # fmt: skip
    read = read_catalogue(msgspec.msgpack.encode(later))
    assert read == ServiceCatalogue(version=2, entries=(CatalogueEntry(name="chat", model="a/b"),))


def test_bytes_that_are_changed_anywhere_never_raise() -> None:
    rng, sound = random.Random(5), write_catalogue(BOTH)
    for _ in range(2000):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        found = read_catalogue(bytes(data))
        assert found is None or len(found.entries) <= MAX_SERVICES


def test_deadlines_are_those_that_the_planner_takes() -> None:
    assert [find_slo_fault(text) for text in ("", "5x", "ttft=2,tpot=0.1")] == ["", "", ""]
    assert find_slo_fault("soon").startswith("slo: 'soon'")


def test_the_catalogue_remembers_how_long_requests_are_and_changes_only_when_that_is_news() -> None:
    learned = learn_lengths(BOTH, {"chat": (1000.4, 200.0), "prose": (5.0, 5.0)})
    assert (learned.version, learned.entries[0].lengths, learned.entries[1].lengths) == (3, (1000, 200), None)
    assert learn_lengths(learned, {"chat": (1000.0 * LENGTH_NEWS - 1.0, 200.0 / LENGTH_NEWS + 1.0)}) is learned
    assert learn_lengths(learned, {}) is learned
    longer = learn_lengths(learned, {"chat": (1000.0, 200.0 * LENGTH_NEWS)})
    assert longer.entries[0].lengths == (1000, 300)
    assert longer.entries[0].slo == "5x"
    huge = learn_lengths(BOTH, {"chat": (1e12, 0.2)})
    assert huge.entries[0].lengths == (MAX_MEAN_TOKENS, 1)
    assert read_catalogue(write_catalogue(huge)) == huge
