"""What the owner of a box says of the models that it may be given, and what `status` says of those boxes."""

import os
from pathlib import Path

import msgspec
import pytest

from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.services.catalogue import CatalogueEntry, ServiceCatalogue
from p2pserve.coordinator.services.hosting import HostedModel, HostingOffer
from p2pserve.node.settings import HostingSettings
from p2pserve.sdk.actions.status_view import hosting_faults, hosting_lines, unplaced_lines
from p2pserve.sdk.cli import main
from p2pserve.sdk.errors import UsageError
from p2pserve.sdk.options.hosting import read_hosting

from ..commands.parsing import parse
from ..test_reports import FIRST, MODEL, SECOND, advert, node, status

JOIN = ["join", "--bootstrap", "p2p_worker_x"]


def given(*options: str) -> HostingSettings | None:
    return read_hosting(parse([*JOIN, *options]))


def test_a_box_without_a_model_takes_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "before")
    assert given() == HostingSettings()
    assert os.environ["HF_HUB_CACHE"] == "before"
    folder = tmp_path / "new" / "models"
    found = given("--only", "chat", "--only", "code", "--models-dir", str(folder), "--max-disk-gib", "200")
    assert found == HostingSettings(only=("chat", "code"), models_dir=folder, max_disk_gib=200.0)
    assert folder.is_dir()
    assert os.environ["HF_HUB_CACHE"] == str(folder)
    assert given("--not", "big") == HostingSettings(excluded=("big",))


def test_a_box_with_a_model_is_given_nothing() -> None:
    assert given("--model", "bundled") is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "bundled", "--only", "chat"), "only: it is for a box that takes what it is given"),
        (("--model", "bundled", "--not", "chat"), "not: it is for a box"),
        (("--model", "bundled", "--max-disk-gib", "0"), "max-disk-gib: it is for a box"),
        (("--model", "bundled", "--models-dir", "/x"), "models-dir: it is for a box"),
        (("--only", "two\nlines"), r"only: 'two\nlines' is no name"),
        (("--not", ""), "not: '' is no name"),
        (("--only", "chat", "--not", "chat"), "not: chat is also what --only names"),
        (("--served-model-name", "mine"), "model: --served-model-name is for one model"),
        (("--models-dir", "/proc/nowhere"), "models-dir: /proc/nowhere cannot be made"),
    ],
)
def test_what_cannot_be_is_told_by_its_option(options: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        given(*options)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_several_nodes_of_a_box_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOIN, "--replicas", "2"]) == 2
    assert "model: --replicas divides this box for one model" in capsys.readouterr().err


def test_status_says_what_boxes_make_ready_and_what_nobody_hosts() -> None:
    models = {
        "big": HostedModel(fits=20, layers=80),
        "ghost": HostedModel(fault="model no/such-model: the hub has none" + "!" * 200),
        "chat": HostedModel(fits=4, layers=4),
    }
    fetching = HostingOffer(prepares="chat", detail="downloads x: 1 of 9 GB", models=models)
    waiting = HostingOffer(detail="waits: the catalogue is empty")
    hosts = [
        node(FIRST, advert=msgspec.structs.replace(advert(), hosting=fetching)),
        node(SECOND, advert=msgspec.structs.replace(advert(), model=None, hosting=waiting)),
    ]
    entries = [CatalogueEntry(name=name, model=f"a/{name}") for name in ("big", "ghost")]
    listed = ServiceCatalogue(version=1, entries=(*entries, CatalogueEntry(name="chat", model=MODEL.name)))
    shown = msgspec.structs.replace(status(*hosts), catalogue=listed)
    first, second = name_of(FIRST), name_of(SECOND)
    assert hosting_lines(shown) == [
        f"hosting: {first} makes chat ready: downloads x: 1 of 9 GB",
        f"hosting: {second} waits: the catalogue is empty",
    ]
    big, ghost = unplaced_lines(shown)
    assert big == f"not hosted: big ({first}: has room for 20 of 80 layers)"
    assert ghost.startswith(f"not hosted: ghost ({first}: model no/such-model")
    assert len(ghost) < 150
    assert hosting_faults(shown, "ghost") == {FIRST: models["ghost"].fault}
    assert hosting_lines(status(*hosts[:0])) == unplaced_lines(status(*hosts)) == []


def test_status_says_what_shares_a_box_and_what_has_no_room_beside_it() -> None:
    models = {name: HostedModel(fits=4, layers=4, weight_bytes=12 << 30) for name in ("chat", "big")}
    offer = HostingOffer(models=models, beside=(FIRST, SECOND), room_bytes=20 << 30)
    one = node(FIRST, advert=msgspec.structs.replace(advert(), hosting=msgspec.structs.replace(offer, hosts="chat")))
    two = node(SECOND, advert=msgspec.structs.replace(advert(), model=None, hosting=offer))
    first, second = name_of(FIRST), name_of(SECOND)
    assert hosting_lines(status(one, two)) == [f"shared: {first} and {second} are one box: chat"]
    lying = msgspec.structs.replace(offer, beside=(), hosts="big")
    alone = node(SECOND, advert=msgspec.structs.replace(advert(), model=None, hosting=lying))
    assert hosting_lines(status(one, alone)) == [], "only one of them says so"
    lacking = "no room beside chat: 24.0 GiB of weights, and there is room for 20.0"
    assert hosting_faults(status(one, two), "big") == {SECOND: lacking}
    roomy = msgspec.structs.replace(offer, room_bytes=24 << 30)
    two = node(SECOND, advert=msgspec.structs.replace(advert(), model=None, hosting=roomy))
    assert hosting_faults(status(one, two), "big") == {}


def test_status_says_which_nodes_with_models_are_one_box() -> None:
    shared = msgspec.structs.replace(advert(), beside=(FIRST, SECOND))
    other = msgspec.structs.replace(
        shared, model=msgspec.structs.replace(MODEL, shape=msgspec.structs.replace(MODEL.shape, name="other"))
    )
    lines = hosting_lines(status(node(FIRST, advert=shared), node(SECOND, advert=other)))
    assert lines == [f"shared: {name_of(FIRST)} and {name_of(SECOND)} are one box: {MODEL.name} and other"]
    assert hosting_lines(status(node(FIRST, advert=shared), node(SECOND, advert=advert()))) == []


def test_a_box_for_several_services_has_one_gpu_and_no_model_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    several = ("--max-services", "2")
    assert main([*JOIN, "--model", "bundled", *several]) == 2
    assert "max-services: it is for a box that takes what it is given" in capsys.readouterr().err
    assert main([*JOIN, "--emulate", "2xA40", "--kv-cache-mib", "4096", *several]) == 2
    assert "max-services: engines that share a process have one GPU, and this box has 2" in capsys.readouterr().err
    assert main([*JOIN, "--emulate", "1xA40", *several]) == 2
    assert "kv_cache_mib: say how much" in capsys.readouterr().err
