"""What is said of a hub that refuses, lacks something or is away."""

from __future__ import annotations

import json
import logging

import pytest
from huggingface_hub import constants

from p2pserve.node.models import ModelError

from .small_hub import CONFIG, NAME, SHARDS, Hub, open_here, refusal

pytestmark = pytest.mark.beside


def test_a_model_that_is_not_there(hub: Hub) -> None:
    assert f"{hub.url} has no such model; check the name, and set HF_TOKEN if it is private" in refusal("owner/nothing")


@pytest.mark.parametrize("name", ["owner/na me", "owner/--", "owner/name.git"])
@pytest.mark.usefixtures("hub")
def test_an_id_that_is_none(name: str) -> None:
    assert "not a Hugging Face id" in refusal(name)


@pytest.mark.parametrize("token", [None, "hf_other"])
def test_a_gated_model(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    hub.gated, hub.token = True, "hf_secret"
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    assert f"accept its licence at {hub.url}/{NAME}, and set HF_TOKEN" in refusal()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "set HF_TOKEN"),
        (403, "forbids it to this token"),
        (418, "answered 418; try again later"),
        (503, "not in the local cache, and the hub cannot be reached"),
    ],
)
def test_a_hub_that_refuses(hub: Hub, status: int, said: str) -> None:
    hub.status = status
    assert said in refusal()


def test_something_that_is_no_hub(hub: Hub) -> None:
    hub.garbage = True
    assert "does not answer as a hub does" in refusal()


def test_a_model_that_cannot_be_served_is_refused_before_more_is_fetched(hub: Hub) -> None:
    hub.files["config.json"] = json.dumps({**CONFIG, "num_kv_shared_layers": 2}).encode()
    assert "use the keys and values of others" in refusal()
    assert {each.path.rpartition("/")[2] for each in hub.asked if "/resolve/" in each.path} == {"config.json"}


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "no tokenizer.json in"),
        ("model.safetensors.index.json", "no model.safetensors weights there"),
        (SHARDS[1], f"{SHARDS[1]} is named by model.safetensors.index.json and is not in the hub"),
    ],
)
def test_a_model_that_lacks_a_file(hub: Hub, missing: str, said: str) -> None:
    del hub.files[missing]
    assert said in refusal()


def test_a_disk_that_is_full(hub: Hub) -> None:
    open_here(NAME)  # what belongs to a model besides its weights is here from now on
    model = open_here(NAME, reserve_bytes=1 << 60)
    with pytest.raises(ModelError, match=r"GB are to be fetched and .* GB are free .* set HF_HOME"):
        model.fetch()
    assert hub.fetched() == []


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("hub", "offline")
def test_offline_and_nothing_in_the_cache() -> None:
    assert "not in the local cache, and HF_HUB_OFFLINE is set; unset it once" in refusal()


def test_offline_with_a_part_in_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = open_here(NAME)
    online.fetch(1, 3)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = open_here(NAME)
    assert model.info == online.info
    assert model.fetch(1, 2) == online.folder
    with pytest.raises(ModelError, match=f"{SHARDS[0]} is not in the local cache and the hub cannot be reached"):
        model.fetch(0, 2)
    assert hub.asked == []


def test_a_hub_that_is_away(hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    online = open_here(NAME)
    online.fetch()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with caplog.at_level(logging.WARNING, "p2pserve.node.models.hub"):
        assert open_here(NAME).info == online.info
    assert "is served from the cache" in caplog.text
    assert "not in the local cache, and the hub cannot be reached" in refusal("owner/other")
