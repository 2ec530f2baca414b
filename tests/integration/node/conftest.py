"""A hub for one test, and nothing else that a model could come from."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from safetensors.numpy import save

from .small_hub import CONFIG, Handler, Hub, weights


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
    yield hub
    close_session()
    server.shutdown()
    thread.join()
    server.server_close()
