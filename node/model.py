"""Finding and checking a model before anything is started with it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, final

import msgspec

BUNDLED = Path(__file__).resolve().parent / "bundled"


class ModelError(Exception):
    """The model cannot be served. The text is one line that says what is wrong and what to do."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the network needs to know of a model; `service` names it, the same on every box."""

    service: Annotated[str, msgspec.Meta(min_length=1)]
    name: str
    layers: Annotated[int, msgspec.Meta(ge=1)]
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_model_len: int


@final
class Model:
    """A model folder in Hugging Face format that has been looked at."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json", name)
        _check_architecture(self.config, name)
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(f"model {name}: no tokenizer.json in {folder}; convert the tokenizer to the fast format")
        if not any(folder.glob("*.safetensors")):
            raise ModelError(f"model {name}: no *.safetensors weights in {folder}")
        self.info = _info(name, self.config, folder)


def open_model(name: str) -> Model:
    """Resolve `name` (a folder, `bundled`, or a Hugging Face id) and check it. Raises ModelError.

    A Hugging Face id honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE and may download.
    """
    if name == "bundled":
        return Model(name, BUNDLED)
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # ~ of nobody
        raise ModelError(f"model {name}: no such folder: {error}") from error
    if name and path.is_dir():
        return Model(path.resolve().name, path.resolve())
    if name and path.exists():
        raise ModelError(f"model {name}: this is a file; give the folder that holds config.json")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"model {name}: no such folder (and not a Hugging Face id of the form owner/name)")
    return Model(name, _download(name))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except HFValidationError as error:
        raise ModelError(f"model {name}: not a Hugging Face id: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise ModelError(
            f"model {name}: Hugging Face answered {status}; check the name, and HF_TOKEN if it is gated"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model {name}: not in the local cache and the hub cannot be reached; give a folder instead"
        ) from error
    except Exception as error:  # the library lets those of its HTTP client pass, and has changed that client
        text = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"model {name}: it cannot be fetched from the hub: {text}; give a folder instead") from error


def read_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON object from a model's folder. Raises ModelError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model {name}: no {path.name} in {path.parent}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model {name}: {path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"model {name}: {path} is not a JSON object")
    return value


def _check_architecture(config: dict[str, Any], name: str) -> None:
    named = config.get("architectures")
    architectures = named if isinstance(named, list) else []
    if not any(str(a).endswith(("ForCausalLM", "LMHeadModel")) for a in architectures):
        shown = ", ".join(map(str, architectures)) or "none named"
        raise ModelError(f"model {name}: not a causal language model (architectures: {shown})")


def _info(name: str, config: dict[str, Any], folder: Path) -> ModelInfo:
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return ModelInfo(
            service=f"{Path(name).name}-{_fingerprint(folder)}",
            name=name,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            max_model_len=int(config.get("max_position_embeddings") or 2048),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"model {name}: config.json lacks or garbles {error}") from error
    except OSError as error:
        raise ModelError(f"model {name}: {error.filename} cannot be read: {error.strerror}") from error


def _fingerprint(folder: Path) -> str:
    """Eight hex digits that differ between models of one name: KV of one must never reach the other.

    Hashes the configuration and, of each weight file, name, size and first megabyte: reading everything would take
    minutes for a large model.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    digest.update((folder / "tokenizer.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
    return digest.hexdigest()[:8]
