"""What a box that hosts what it is given can do of each entry, and which it is to host."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pserve.coordinator.services.catalogue import EMPTY, CatalogueEntry, ServiceCatalogue
from p2pserve.coordinator.services.hosting import HostedModel, HostingOffer
from p2pserve.node.box.errors import NodeError
from p2pserve.node.box.fitting import measure_room
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.catalogue.hosting import (
    HostingLife,
    Looked,
    describe_idle,
    find_due,
    find_taken,
    find_wanted,
    leave_room,
)
from p2pserve.node.catalogue.messages import HostedService, HostingPlan
from p2pserve.node.catalogue.shelf import (
    CANNOT,
    ModelShelf,
    NotHosted,
    describe_fault,
    measure_disk,
    measure_shared_room,
)
from p2pserve.node.messages import EngineAdvert
from p2pserve.node.models import ModelError
from p2pserve.node.settings import BoxEngineSettings, HostingSettings

CHAT, CODE = CatalogueEntry(name="chat", model="a/chat"), CatalogueEntry(name="code", model="/srv/models/coder")
LISTED = ServiceCatalogue(version=1, entries=(CHAT, CODE))
ABLE, UNABLE = HostedModel(fits=4, layers=4), HostedModel(fault="too large")
GIB = 1 << 30


def given(name: str) -> HostingPlan:
    return HostingPlan(epoch=1, serial=1, services=(HostedService(name=name, boxes=("me",)),))


@pytest.mark.parametrize(
    ("plan", "hosts", "wanted"),
    [
        (given("chat"), "", "chat"),
        (given("chat"), "code", "chat"),
        (given("code"), "chat", "chat"),  # it cannot
        (given("prose"), "chat", "chat"),  # nothing of that name
        (given("chat"), "prose", "chat"),
        (None, "chat", "chat"),
        (None, "prose", ""),  # which is in the catalogue no more
        (HostingPlan(epoch=1, serial=2), "chat", "chat"),  # what the coordinator does not speak of stays
        (HostingPlan(epoch=1, serial=2), "", ""),
        (HostingPlan(epoch=1, serial=2, idle=("me",)), "chat", ""),
        (HostingPlan(epoch=1, serial=2, idle=("other",)), "chat", "chat"),
    ],
)
def test_a_box_hosts_what_it_is_given_and_can_do_and_else_what_it_has(
    plan: HostingPlan | None, hosts: str, wanted: str
) -> None:
    assert find_wanted(plan, "me", LISTED, {"chat": ABLE, "code": UNABLE, "prose": ABLE}, hosts) == wanted


def test_a_node_hosts_nothing_that_another_of_its_box_has_and_nothing_without_room_beside_it() -> None:
    models = {name: HostedModel(fits=4, layers=4, weight_bytes=size) for name, size in (("chat", 10), ("code", 20))}
    models["part"] = HostedModel(fits=3, layers=4, weight_bytes=1)
    assert leave_room(models, (), 0) == models
    assert set(leave_room(models, ("chat",), 30)) == {"code"}
    assert set(leave_room(models, ("chat",), 29)) == set()
    assert set(leave_room(models, ("code", "gone"), 30)) == {"chat"}


def test_of_what_two_nodes_of_a_box_prepare_the_first_ones_counts_whoever_is_away() -> None:
    offers = {name: HostingOffer(hosts=f"{name} has", prepares=f"{name} wants") for name in "abc"}
    has = {name: f"{name} has" for name in "abc"}
    assert find_taken("abc", "b", offers) == {has["a"], has["c"], "a wants"}
    assert find_taken("abc", "a", offers) == {has["b"], has["c"]}
    del offers["a"]
    assert find_taken("abc", "b", offers) == {has["c"]}
    assert find_taken("", "b", {}) == set()


def test_new_entries_are_looked_at_first_and_what_was_not_possible_again() -> None:
    looked = {"chat": Looked(CHAT, UNABLE, 60.0)}
    assert find_due(LISTED, looked, 100.0) == CODE
    looked["code"] = Looked(CODE, ABLE, float("inf"))
    assert [find_due(LISTED, looked, now) for now in (0.0, 60.0)] == [None, CHAT]
    changed = CatalogueEntry(name="code", model="a/other")
    assert find_due(ServiceCatalogue(version=2, entries=(changed,)), looked, 0.0) == changed
    assert find_due(EMPTY, looked, 100.0) is None


def test_a_box_that_hosts_nothing_says_why() -> None:
    assert "the catalogue is empty" in describe_idle(EMPTY)
    assert "given it nothing" in describe_idle(LISTED)


class Backend:
    """Inspects models of four layers: `fits` of them; what it is asked for is kept."""

    def __init__(self, fits: int = 4, missing: int = 0, name: str = "", error: Exception | None = None) -> None:
        self.fits, self.missing, self.name, self.error = fits, missing, name, error
        self.asked: list[str] = []

    def inspect(self, model: str, hardware: object, knobs: object) -> Any:
        self.asked.append(model)
        if self.error is not None:
            raise self.error
        weights = SimpleNamespace(of_stage=lambda first, last, float_bytes: 250 * float_bytes * (last - first))
        info = SimpleNamespace(name=self.name or Path(model).name, service="s", layers=4, weights=weights, shape=None)
        if "/" in model and not model.startswith("/") and not self.name:
            info.name = model
        files = SimpleNamespace(info=info, count_missing=lambda layers: self.missing, fetch=self.fetch)
        return SimpleNamespace(model=files, share=SimpleNamespace(layers=self.fits))

    def fetch(self, first: int, last: int, report: Any) -> None:
        self.asked.append(f"fetch {first}-{last}")


def shelf(backend: Backend, **hosting: Any) -> ModelShelf:
    """Of a box without a GPU, whose engines compute in float32: a number of a weight takes four bytes."""
    settings: Any = SimpleNamespace(hosting=HostingSettings(**hosting), engine=BoxEngineSettings(), beside=())
    made: Any = backend
    return ModelShelf(made, Hardware(cores=1, memory_gib=8.0, processor=""), settings)


def test_what_a_box_can_do_of_a_model_is_what_its_engine_says() -> None:
    found = shelf(Backend(fits=3, missing=7)).examine(CHAT)
    assert found == HostedModel(fits=3, layers=4, weight_bytes=4000, missing_bytes=7)
    assert found.is_possible


@pytest.mark.parametrize(
    ("hosting", "backend", "fault"),
    [
        ({"only": ("code",)}, Backend(), "its owner has said --only code"),
        ({"excluded": ("chat",)}, Backend(), "its owner has said --not for it"),
        ({}, Backend(error=ModelError("model a/chat: no\nsuch model")), "model a/chat: no such model"),
        ({}, Backend(error=NodeError("model x: not one layer fits")), "model x: not one layer fits"),
        ({}, Backend(name="another"), "model: a/chat is called another here"),
    ],
)
def test_what_is_not_possible_is_told_in_a_line(hosting: dict[str, Any], backend: Backend, fault: str) -> None:
    found = shelf(backend, **hosting).examine(CHAT)
    assert not found.is_possible
    assert found.fault.startswith(fault)


def test_a_model_in_the_boxs_own_folder_is_taken_from_there(tmp_path: Path) -> None:
    (tmp_path / "coder").mkdir()
    backend = Backend()
    own = shelf(backend, models_dir=tmp_path)
    own.examine(CODE)
    (tmp_path / "coder" / "config.json").write_text("{}")
    own.examine(CODE)
    own.examine(CHAT)
    assert backend.asked == ["/srv/models/coder", str(tmp_path / "coder"), "a/chat"]


def test_downloads_take_no_more_disk_than_the_owner_allows(tmp_path: Path) -> None:
    (tmp_path / "held").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to(tmp_path / "held")
    assert 1000 <= measure_disk(tmp_path) < 1100
    assert measure_disk(tmp_path / "nowhere") == 0
    tight = shelf(Backend(missing=GIB), models_dir=tmp_path, max_disk_gib=1.0)
    assert tight.examine(CHAT).fault.startswith("max-disk-gib: 1.0 GiB are to be fetched")
    with pytest.raises(NotHosted):
        tight.fetch(CHAT, lambda progress: None)
    roomy = Backend(fits=3, missing=GIB)
    shelf(roomy, models_dir=tmp_path, max_disk_gib=1.1).fetch(CHAT, lambda progress: None)
    assert roomy.asked[-1] == "fetch 0-3"
    assert shelf(Backend(missing=0), models_dir=tmp_path, max_disk_gib=0.0).examine(CHAT).is_possible


def test_a_fault_is_short_and_never_empty() -> None:
    assert describe_fault(OSError()) == "OSError"
    assert len(describe_fault(ModelError("x" * 5000))) == 300
    assert ModelError in CANNOT


def test_an_engine_that_was_given_up_is_offered_no_more() -> None:
    life = HostingLife(shelf(Backend()), None, {"chat": Looked(CHAT, ABLE, 0.0)})
    assert (life.offer(None).models["chat"], life.hosts, life.served) == (ABLE, "", None)
    life.placed = SimpleNamespace(entry=CHAT, served=None)  # type: ignore[assignment]
    assert life.offer(EngineAdvert(state="ready")).models["chat"].is_possible
    failed = life.offer(EngineAdvert(state="failed", detail="out of memory"))
    assert failed.models["chat"].fault == "its engine has failed: out of memory"
    assert failed.hosts == "chat"


@pytest.mark.parametrize(("memory_gib", "whole_gib"), [(None, None), (5.0, 6.0)])
def test_weights_of_engines_that_share_a_process_have_what_the_pool_of_kv_leaves(
    memory_gib: float | None, whole_gib: float | None
) -> None:
    box = Hardware(cores=4, memory_gib=64.0, processor="")
    each = BoxEngineSettings(kv_cache_mib=4096, memory_gib=memory_gib)  # of 6 GiB in all, 4 for KV and 1 for each
    room = measure_room(box, BoxEngineSettings(kv_cache_mib=4096, memory_gib=whole_gib), tp=1).memory_bytes
    assert measure_shared_room(box, each, 2) == room - (4 << 30)
    assert measure_shared_room(box, each, 1) == 0
