"""A small hub on loopback that can refuse, cut off and corrupt what it sends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pserve.node.models import ModelError, OpenedModel, open_model
from p2pserve.node.models.download import DownloadSettings

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


def open_here(name: str, *, reserve_bytes: int = 0) -> OpenedModel:
    """A model from the hub, without pauses between tries."""
    return open_model(name, DownloadSettings(waits_s=(0.0, 0.0), reserve_bytes=reserve_bytes))


def refusal(name: str = NAME) -> str:
    with pytest.raises(ModelError) as caught:
        open_here(name).fetch()
    text = str(caught.value)
    assert text.startswith(f"model {name}: ")
    assert "\n" not in text
    return text


def shards_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}
