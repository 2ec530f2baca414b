"""Models: every way a folder can be none is one line, and two models never share a name for their KV."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest

from p2pserve.node.model import ModelError, open_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}


def make(folder: Path, *, config: object = CONFIG, weights: bytes = b"w" * 100, leave_out: str = "") -> Path:
    folder.mkdir()
    text = config if isinstance(config, str) else json.dumps(config)
    for name, content in {
        "config.json": text.encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": weights,
    }.items():
        if name != leave_out:
            (folder / name).write_bytes(content)
    return folder


def refusal(name: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(str(name))
    text = str(caught.value)
    assert text.startswith("model ")
    assert "\n" not in text
    return text


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in CONFIG.items() if name != key}


def test_a_model_is_described(tmp_path: Path) -> None:
    model = open_model(str(make(tmp_path / "tiny")))
    info = model.info
    assert (info.name, info.layers, info.hidden, info.kv_heads, info.head_dim) == ("tiny", 4, 128, 2, 32)
    assert (info.vocabulary, info.max_model_len) == (4096, 512)
    assert info.service.startswith("tiny-")
    assert model.folder == tmp_path / "tiny"


def test_a_link_and_a_relative_path_are_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "tiny")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert open_model("link").info == open_model("./tiny").info == open_model(str(folder)).info


def test_config_without_optional_fields(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    info = open_model(
        str(make(tmp_path / "a", config={**config, "head_dim": 64, "max_position_embeddings": None}))
    ).info
    assert (info.kv_heads, info.head_dim, info.max_model_len) == (4, 64, 2048)


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "~/missing-folder-of-mine", "missing", "a/b/c", ""])
def test_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no such folder" in refusal(name)


def test_a_home_of_nobody() -> None:
    assert "no such folder" in refusal("~nobody-of-that-name/model")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "this is a file" in refusal(file)


@pytest.mark.parametrize(
    ("leave_out", "said"),
    [
        ("config.json", "no config.json in"),
        ("tokenizer.json", "no tokenizer.json in"),
        ("model.safetensors", "no *.safetensors weights in"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, leave_out: str, said: str) -> None:
    assert said in refusal(make(tmp_path / "a", leave_out=leave_out))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot be read"),
        ("", "cannot be read"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1") + "{}", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "is not a JSON object"),
        (without("architectures"), "not a causal language model (architectures: none named)"),
        ({**CONFIG, "architectures": ["BertModel"]}, "not a causal language model (architectures: BertModel)"),
        ({**CONFIG, "architectures": "LlamaForCausalLM"}, "not a causal language model"),
        ({**CONFIG, "architectures": 5}, "not a causal language model"),
        (without("num_hidden_layers"), "lacks or garbles 'num_hidden_layers'"),
        (without("vocab_size"), "lacks or garbles 'vocab_size'"),
        ({**CONFIG, "hidden_size": "wide"}, "lacks or garbles"),
        ({**CONFIG, "hidden_size": None}, "lacks or garbles"),
        ({**CONFIG, "num_attention_heads": 0, "num_key_value_heads": 1}, "lacks or garbles"),
        (json.dumps(CONFIG).replace("4096", "Infinity"), "lacks or garbles"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, config: object, said: str) -> None:
    assert said in refusal(make(tmp_path / "a", config=config))


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", leave_out="config.json")
    (folder / "config.json").mkdir()
    assert "cannot be read" in refusal(folder)


def test_a_link_to_weights_that_are_gone(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", leave_out="model.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert "model.safetensors cannot be read" in refusal(folder)


# ---- the hub ----------------------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE=1 and an empty cache; the library has read its environment already."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("offline")
def test_an_id_that_is_not_in_the_cache_while_offline() -> None:
    assert "not in the local cache and the hub cannot be reached" in refusal("owner/name-of-nothing")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["owner/na me", "owner/--", "owner/name.git"])
def test_an_id_that_is_none(name: str) -> None:
    assert "not a Hugging Face id" in refusal(name)


class TimedOut(Exception):
    """Stands in for an error of the library's HTTP client."""


class Response:
    """As much of an HTTP response as its error looks at."""

    status_code = 401
    headers: ClassVar[dict[str, str]] = {}
    request = None


@pytest.mark.parametrize(
    ("make_error", "said"),
    [
        ("http", "answered 401"),
        (TimedOut("too\nslow"), "cannot be fetched from the hub: too slow"),
        (ConnectionResetError(104, "reset"), "cannot be reached"),
    ],
)
def test_a_hub_that_refuses_or_breaks_off(monkeypatch: pytest.MonkeyPatch, make_error: Any, said: str) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    response: Any = Response()
    error = HfHubHTTPError("no", response=response) if make_error == "http" else make_error

    def fail(*args: object, **settings: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert said in refusal("owner/name")


# ---- fingerprints -----------------------------------------------------------------------------------------


def service(folder: Path) -> str:
    return open_model(str(folder)).info.service


def test_a_copy_of_a_model_is_the_same_service(tmp_path: Path) -> None:
    first = make(tmp_path / "tiny")
    (tmp_path / "other").mkdir()
    copy = shutil.copytree(first, tmp_path / "other" / "tiny")
    os.utime(copy / "model.safetensors", (1, 1))
    assert service(first) == service(copy)


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": b"v" * 100},
        {"weights": b"w" * 99 + b"x"},
        {"weights": b"w" * 101},
        {"config": {**CONFIG, "rope_theta": 1.0}},
    ],
)
def test_other_weights_are_another_service(tmp_path: Path, changed: dict[str, Any]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert service(make(tmp_path / "a" / "tiny")) != service(make(tmp_path / "b" / "tiny", **changed))


def test_another_tokenizer_is_another_service(tmp_path: Path) -> None:
    folder = make(tmp_path / "tiny")
    before = service(folder)
    (folder / "tokenizer.json").write_bytes(b'{"a": 1}')
    assert service(folder) != before
