"""Models from a hub: a small one on loopback that can refuse, cut off and corrupt what it sends."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from safetensors.numpy import save

from p2pserve.node.models import DownloadProgress, ModelError, download, open_model

pytestmark = pytest.mark.beside

NAME = "owner/tiny"
COMMIT = "c" * 39 + "1"
LAYERS = 4
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "vocab_size": 4096,
}
SHARDS = ("model-1.safetensors", "model-2.safetensors", "model-3.safetensors")
NO_HEADERS: Mapping[str, str] = {}
LARGE = 300_000  # elements: more than fits into the buffers of a connection that is cut


def weights() -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Three shards: embeddings and layer 0; layers 1 and 2; layer 3 and the head."""
    random = np.random.default_rng(5)

    def make() -> np.ndarray[Any, Any]:
        return random.random(LARGE, np.float32)

    return {
        SHARDS[0]: {"model.embed_tokens.weight": make(), "model.layers.0.mlp.weight": make()},
        SHARDS[1]: {"model.layers.1.mlp.weight": make(), "model.layers.2.mlp.weight": make()},
        SHARDS[2]: {"model.layers.3.mlp.weight": make(), "model.norm.weight": make(), "lm_head.weight": make()},
    }


@dataclass(frozen=True)
class Asked:
    """One request as the hub saw it."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Hub:
    """What the hub has, what it does wrong, and what it was asked."""

    files: dict[str, bytes]
    url: str = ""
    commit: str = COMMIT
    gated: bool = False
    token: str | None = None  # the only one that is let in; None: everybody
    status: int | None = None  # answer everything with it
    garbage: bool = False
    cut_after: dict[str, list[int]] = field(default_factory=dict)  # file -> bytes after which its next answers are cut
    corrupt: dict[str, int] = field(default_factory=dict)  # file -> how many more whole answers are wrong
    ranges: bool = True
    asked: list[Asked] = field(default_factory=list)

    def hash_of(self, path: str) -> str:
        content = self.files[path]
        if path.endswith(".safetensors"):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()

    def fetched(self) -> list[tuple[str, str | None]]:
        """File and range of each request for content; requests for headers of weights do not count."""
        found = [(each.path.rpartition("/")[2], each.range) for each in self.asked if each.method == "GET"]
        return [each for each in found if each[0].endswith(".safetensors") and each[1] != "bytes=0-100000"]


class Handler(BaseHTTPRequestHandler):
    """The parts of the hub's HTTP interface that huggingface_hub uses for a model."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        hub = self.hub
        token = self.headers.get("Authorization")
        hub.asked.append(Asked(self.command, self.path, self.headers.get("Range"), token))
        allowed = hub.token is None or token == f"Bearer {hub.token}"
        if hub.garbage:
            self.send(200, b"<html>hello</html>", body=body)
        elif hub.status is not None:
            self.send(hub.status, b"", body=body)
        elif NAME not in self.path:
            self.send(404, b"", body=body, headers={"X-Error-Code": "RepoNotFound"})
        elif not allowed and not hub.gated:
            self.send(401, b"", body=body, headers={"X-Error-Code": "RepoNotFound"})
        elif self.path.startswith(f"/api/models/{NAME}"):
            self.send(200, self.listing(), body=body)
        elif not allowed:
            self.send(403, b"", body=body, headers={"X-Error-Code": "GatedRepo"})
        else:
            self.send_file(self.path.rpartition("/")[2], body=body)

    def listing(self) -> bytes:
        siblings = []
        for path, content in self.hub.files.items():
            each: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": self.hub.hash_of(path)}
            if path.endswith(".safetensors"):
                each["blobId"] = "f" * 40
                each["lfs"] = {"size": len(content), "sha256": self.hub.hash_of(path), "pointerSize": 100}
            siblings.append(each)
        return json.dumps({"id": NAME, "modelId": NAME, "sha": self.hub.commit, "siblings": siblings}).encode()

    def send_file(self, path: str, *, body: bool) -> None:
        hub = self.hub
        marks = {"X-Repo-Commit": hub.commit, "ETag": f'"{hub.hash_of(path)}"' if path in hub.files else ""}
        if path not in hub.files:
            self.send(404, b"", body=body, headers={"X-Error-Code": "EntryNotFound"})
            return
        content, start = hub.files[path], 0
        asked = self.headers.get("Range")
        if asked is not None and hub.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first)
            content = content[start : int(last) + 1] if last else content[start:]
        wrong = body and asked is None and hub.corrupt.get(path, 0) > 0
        if wrong:
            hub.corrupt[path] -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        cuts = hub.cut_after.get(path, []) if body and asked != "bytes=0-100000" else []
        cut = cuts.pop(0) if cuts else None
        self.send(206 if asked is not None and hub.ranges else 200, content, body=body, cut=cut, headers=marks)

    def send(
        self,
        status: int,
        content: bytes,
        *,
        body: bool,
        cut: int | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub with one model, for which the library of this process has an empty cache and no token."""
    shards = {file: save(tensors) for file, tensors in weights().items()}
    index = {"weight_map": {name: file for file, tensors in weights().items() for name in tensors}}
    small = {"config.json": CONFIG, "tokenizer.json": {}, "model.safetensors.index.json": index}
    files = {name: json.dumps(value).encode() for name, value in small.items()}
    others = {"README.md": b"# Tiny", "consolidated.safetensors": save({"x": np.zeros(3)}), "onnx/config.json": b"{}"}
    hub = Hub({**files, **others, **shards})
    handler = type("HubHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"  # the library has read HF_ENDPOINT already
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(download, "WAITS_S", (0.0, 0.0))
    yield hub
    close_session()
    server.shutdown()
    thread.join()
    server.server_close()


def refusal(name: str = NAME) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(name).fetch()
    text = str(caught.value)
    assert text.startswith(f"model {name}: ")
    assert "\n" not in text
    return text


def shards_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


# ---- looking and fetching ---------------------------------------------------------------------------------


def test_looking_fetches_no_weights(hub: Hub) -> None:
    model = open_model(NAME)
    assert model.info.service == f"tiny-{COMMIT[:8]}"
    assert model.info.weights.layers == (4 * LARGE,) * LAYERS
    assert (model.info.weights.embeddings, model.info.weights.head) == (4 * LARGE, 8 * LARGE)
    assert shards_in(model.folder) == set()
    assert hub.fetched() == []
    assert {path.name for path in model.folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    }


@pytest.mark.parametrize(
    ("layers", "shards"),
    [((0, 1), SHARDS[:1]), ((0, 2), SHARDS[:2]), ((1, 3), SHARDS[1:2]), ((3, 4), SHARDS[2:]), ((0, 4), SHARDS)],
)
def test_a_stage_fetches_its_shards(hub: Hub, layers: tuple[int, int], shards: tuple[str, ...]) -> None:
    model = open_model(NAME)
    folder = model.fetch(*layers)
    assert shards_in(folder) == {file for file, _ in hub.fetched()} == set(shards)
    for file in shards:
        assert (folder / file).read_bytes() == hub.files[file]
    hub.asked.clear()
    open_model(NAME).fetch(*layers)
    assert hub.fetched() == []


def test_every_part_of_a_model_is_the_same_service(hub: Hub) -> None:
    model = open_model(NAME)
    model.fetch(0, 1)
    assert open_model(NAME).info == model.info
    hub.commit = "d" * 40
    assert open_model(NAME).info.service == "tiny-dddddddd"


def test_tied_embeddings_come_with_both_ends(hub: Hub) -> None:
    hub.files["config.json"] = json.dumps({**CONFIG, "tie_word_embeddings": True}).encode()
    assert shards_in(open_model(NAME).fetch(3, 4)) == {SHARDS[0], SHARDS[2]}


def test_a_model_in_one_file(hub: Hub) -> None:
    every = {name: tensor for tensors in weights().values() for name, tensor in tensors.items()}
    for file in ("model.safetensors.index.json", *SHARDS):
        del hub.files[file]
    hub.files["model.safetensors"] = save(every)
    model = open_model(NAME)
    assert hub.fetched() == []
    assert shards_in(model.fetch(1, 2)) == {"model.safetensors"}


def test_progress_goes_from_what_is_there_to_all(hub: Hub) -> None:
    model = open_model(NAME)
    model.fetch(0, 1)
    seen: list[DownloadProgress] = []
    model.fetch(0, 2, seen.append)
    total = sum(len(hub.files[file]) for file in SHARDS[:2])
    done = [each.done_bytes for each in seen]
    assert {each.total_bytes for each in seen} == {total}
    assert done == sorted(done)
    assert (done[0], done[-1]) == (len(hub.files[SHARDS[0]]), total)


def test_the_token_is_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    open_model(NAME).fetch(0, 1)
    assert {each.token for each in hub.asked} == {"Bearer hf_secret"}


def test_the_environment_counts(hub: Hub, tmp_path: Path) -> None:
    """In a process of its own: the library reads it when it is imported."""
    hub.token = "hf_secret"
    program = f"from p2pserve.node.models import open_model; print(open_model('{NAME}').fetch(1, 2))"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}
    run = [sys.executable, "-c", program]
    first = subprocess.run(run, env=environment, capture_output=True, text=True, check=True, timeout=60)
    folder = tmp_path / "home" / "hub" / "models--owner--tiny" / "snapshots" / COMMIT
    assert first.stdout == f"{folder}\n"
    assert shards_in(folder) == {SHARDS[1]}
    hub.asked.clear()
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    second = subprocess.run(run, env=offline, capture_output=True, text=True, check=True, timeout=60)
    assert second.stdout == first.stdout
    assert hub.asked == []


# ---- interrupted and corrupt ------------------------------------------------------------------------------


def test_a_cut_download_goes_on_where_it_stopped(hub: Hub) -> None:
    hub.cut_after[SHARDS[1]] = [1_500_000, 400_000]
    folder = open_model(NAME).fetch(1, 3)
    assert (folder / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    starts = [0 if asked is None else int(asked[6:-1]) for _, asked in hub.fetched()]
    assert starts == [0, 1_500_000, 1_900_000]


def test_a_download_that_was_given_up_is_taken_up_again(hub: Hub) -> None:
    hub.cut_after[SHARDS[1]] = [1_500_000, 0, 0, 0]
    assert f"{SHARDS[1]} stopped at 1500000 of" in refusal()
    hub.asked.clear()
    seen: list[DownloadProgress] = []
    folder = open_model(NAME).fetch(1, 3, seen.append)
    assert (folder / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    assert hub.fetched() == [(SHARDS[1], "bytes=1500000-")]
    assert seen[0].done_bytes == 1_500_000


def test_a_hub_without_ranges(hub: Hub) -> None:
    hub.cut_after[SHARDS[1]] = [1_500_000]
    model = open_model(NAME)
    hub.ranges = False
    seen: list[DownloadProgress] = []
    folder = model.fetch(1, 3, seen.append)
    assert (folder / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    assert seen[-1].done_bytes == seen[-1].total_bytes


def test_a_report_that_raises_ends_the_download_and_keeps_what_has_come(hub: Hub) -> None:
    model = open_model(NAME)

    def stop(progress: DownloadProgress) -> None:
        if progress.done_bytes >= 1 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fetch(1, 3, stop)
    hub.asked.clear()
    model.fetch(1, 3)
    (only,) = hub.fetched()
    assert only[1] is not None


def test_a_corrupt_file_is_fetched_once_more(hub: Hub) -> None:
    hub.corrupt[SHARDS[1]] = 1
    seen: list[DownloadProgress] = []
    folder = open_model(NAME).fetch(1, 3, seen.append)
    assert (folder / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    assert hub.fetched() == [(SHARDS[1], None)] * 2
    assert seen[-1].done_bytes == seen[-1].total_bytes


def test_a_file_that_stays_corrupt(hub: Hub, tmp_path: Path) -> None:
    hub.corrupt[SHARDS[1]] = 5
    assert f"{SHARDS[1]} came twice with a wrong hash; the hub or a proxy" in refusal()
    assert [file for file, _ in hub.fetched()].count(SHARDS[1]) == 2
    hub.corrupt.clear()
    assert (open_model(NAME).fetch() / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_a_corrupt_tokenizer(hub: Hub) -> None:
    hub.corrupt["tokenizer.json"] = 2
    assert "tokenizer.json came twice with a wrong hash" in refusal()


def test_a_file_that_was_cut_in_the_cache_is_fetched_again(hub: Hub) -> None:
    file = open_model(NAME).fetch() / SHARDS[1]
    os.truncate(file.resolve(), 1000)
    hub.asked.clear()
    open_model(NAME).fetch()
    assert file.read_bytes() == hub.files[SHARDS[1]]
    assert [name for name, _ in hub.fetched()] == [SHARDS[1]]


def test_two_downloads_of_one_file_fetch_it_once(hub: Hub) -> None:
    model = open_model(NAME)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            model.fetch(1, 3)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(hub.fetched()) == 1
    assert (model.folder / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]


# ---- refused ----------------------------------------------------------------------------------------------


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


def test_a_disk_that_is_full(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(NAME)
    monkeypatch.setattr("p2pserve.node.models.hub.RESERVE_BYTES", 1 << 60)
    with pytest.raises(ModelError, match=r"GB are to be fetched and .* GB are free .* set HF_HOME"):
        model.fetch()
    assert hub.fetched() == []


# ---- without a hub ----------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("hub", "offline")
def test_offline_and_nothing_in_the_cache() -> None:
    assert "not in the local cache, and HF_HUB_OFFLINE is set; unset it once" in refusal()


def test_offline_with_a_part_in_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = open_model(NAME)
    online.fetch(1, 3)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = open_model(NAME)
    assert model.info == online.info
    assert model.fetch(1, 2) == online.folder
    with pytest.raises(ModelError, match=f"{SHARDS[0]} is not in the local cache and the hub cannot be reached"):
        model.fetch(0, 2)
    assert hub.asked == []


def test_a_hub_that_is_away(hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    online = open_model(NAME)
    online.fetch()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with caplog.at_level(logging.WARNING, "p2pserve.node.models.hub"):
        assert open_model(NAME).info == online.info
    assert "is served from the cache" in caplog.text
    assert "not in the local cache, and the hub cannot be reached" in refusal("owner/other")
