"""Models on a Hugging Face hub: what a repository holds, and fetching just the files that are needed.

Files lie in the hub's own cache, so other programs find them and they find those of others:

    $HF_HOME/hub/models--<owner>--<name>/blobs/<hash>                 the bytes
                                        /blobs/<hash>.incomplete      what has come of them
                                        /snapshots/<commit>/<file>    a link to the blob
                                        /p2pserve/<commit>.json       sizes of all shards, for when the hub is away

HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT are huggingface_hub's, which reads them.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import final
from uuid import uuid4

import msgspec
from huggingface_hub import HfApi, constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import disable_progress_bars, httpx

from .checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, StageLayers, Tensor, read_header, read_index
from .download import CorruptError, DownloadMeter, DownloadSettings, IncompleteError, RemoteFile, fetch, is_whole
from .errors import ModelError
from .progress import Report

_log = logging.getLogger(__name__)

HEADERS_AT_ONCE = 8
_SMALL = (".json", ".jinja")  # configuration and tokenizer; weights are fetched by stage


def find(name: str, settings: DownloadSettings) -> Repository:
    """Look up `owner/name` and its files. Without a hub, what the cache has of it counts. Raises ModelError."""
    disable_progress_bars()  # ours are shown
    api = HfApi()
    with _explained(name, api.endpoint):
        try:
            info = api.model_info(name, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except (OfflineModeIsEnabled, httpx.TransportError) as error:
            return _cached(name, error, settings)
        except HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise
            return _cached(name, error, settings)
        # Without a revision, so that the cache notes which commit `main` is: that is what is looked up without a hub.
        config = Path(api.hf_hub_download(name, "config.json"))
        commit = config.parent.name
        if commit != info.sha:  # somebody has just pushed
            info = api.model_info(name, revision=commit, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        files = {}
        for sibling in info.siblings or ():
            path, digest = sibling.rfilename, sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
            if "/" in path or not path.endswith((*_SMALL, ".safetensors")):
                continue
            if digest is None or sibling.size is None:
                raise ModelError(f"model {name}: {api.endpoint} tells no hash of {path}; take another HF_ENDPOINT")
            url = hf_hub_url(name, path, revision=commit, endpoint=api.endpoint)
            files[path] = RemoteFile(path=path, url=url, size=sibling.size, hash=digest)
        return Repository(name, config.parent, files, api, settings)


def _cached(name: str, cause: Exception, settings: DownloadSettings) -> Repository:
    """What is in the cache of a model, since the hub cannot be asked. Raises ModelError."""
    config = try_to_load_from_cache(name, "config.json")
    offline = isinstance(cause, OfflineModeIsEnabled)
    if not isinstance(config, str):
        why = "HF_HUB_OFFLINE is set; unset it" if offline else f"the hub cannot be reached ({_line(cause)}); go online"
        raise ModelError(f"model {name}: not in the local cache, and {why} once, or give a folder") from cause
    if not offline:
        _log.warning("the hub cannot be reached (%s): %s is served from the cache", _line(cause), name)
    return Repository(name, Path(config).parent, None, HfApi(), settings)


@final
class Repository:
    """One commit of a model, and what of it is in the local cache: `folder`, which holds only what was fetched."""

    def __init__(
        self,
        name: str,
        folder: Path,
        files: Mapping[str, RemoteFile] | None,
        api: HfApi,
        settings: DownloadSettings,
    ) -> None:
        self.name = name
        self.folder = folder
        self.commit = folder.name
        self._files = files  # None: the hub is not asked
        self._api = api
        self._settings = settings
        self._repository = folder.parent.parent

    def __repr__(self) -> str:
        known = "offline" if self._files is None else f"{len(self._files)} files"
        return f"<Repository {self.name} {self.commit[:8]} {known}>"

    def fetch_small(self) -> None:
        """Fetch what belongs to a model besides its weights. Raises ModelError."""
        if self._files is not None:
            self._fetch(self._files, [path for path in self._files if path.endswith(_SMALL)])

    def fetch_weights(self, checkpoint: Checkpoint, layers: StageLayers, report: Report | None) -> None:
        """Fetch the shards that hold the tensors of a stage. Raises ModelError, and what `report` raises."""
        wanted = [shard.file for shard in checkpoint.needed(layers)]
        if self._files is None:
            missing = [file for file in wanted if not (self.folder / file).is_file()]
            if missing:
                raise ModelError(
                    f"model {self.name}: {missing[0]} is not in the local cache and the hub cannot be reached; unset "
                    "HF_HUB_OFFLINE or give a folder"
                )
        else:
            self._fetch(self._files, wanted, report)

    def count_missing(self, checkpoint: Checkpoint, layers: StageLayers) -> int:
        """Bytes that `fetch_weights` would fetch; 0 where the hub is not asked."""
        if self._files is None:
            return 0
        wanted = [self._files[shard.file] for shard in checkpoint.needed(layers)]
        return self._count_lacking(file for file in wanted if not is_whole(self._blob(file), file))

    def checkpoint(self, *, tied: bool) -> Checkpoint:
        """Sizes of all weights, from the headers of the shards; kept for when the hub is away. Raises ModelError."""
        kept = self._repository / "p2pserve" / f"{self.commit}.json"
        try:
            return msgspec.json.decode(kept.read_bytes(), type=Checkpoint)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            pass  # never written, or by another version: read the headers
        files = self._weight_files()
        with _explained(self.name, self._api.endpoint), ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
            headers = dict(zip(files, pool.map(self._header, files), strict=True))
            sizes = {file: self._size(file) for file in files}
            checkpoint = Checkpoint.of(headers, sizes, tied=tied)
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(msgspec.json.encode(checkpoint))
        return checkpoint

    def _weight_files(self) -> tuple[str, ...]:
        """The shards, as the index names them; else the only one. Raises ModelError."""
        present = set(self._files) if self._files is not None else {path.name for path in self.folder.iterdir()}
        if INDEX_FILE in present:
            try:
                files = tuple(sorted(set(read_index(self.folder / INDEX_FILE).values())))
            except (OSError, ValueError) as error:
                raise ModelError(f"model {self.name}: {_line(error)}") from error
        else:
            files = (SINGLE_FILE,)
        missing = [file for file in files if file not in present]
        if missing and files == (SINGLE_FILE,):
            raise ModelError(f"model {self.name}: no {SINGLE_FILE} weights there; take a model in safetensors format")
        if missing:
            where = "the local cache" if self._files is None else "the hub"
            raise ModelError(f"model {self.name}: {missing[0]} is named by {INDEX_FILE} and is not in {where}")
        return files

    def _header(self, file: str) -> dict[str, Tensor]:
        here = self.folder / file
        if self._files is None or (here.is_file() and here.stat().st_size == self._files[file].size):
            try:
                return read_header(here)
            except ValueError as error:
                raise ModelError(f"model {self.name}: {error}; delete {here} and fetch it again") from error
        found = self._api.parse_safetensors_file_metadata(self.name, file, revision=self.commit)
        return {name: Tensor(t.dtype, t.data_offsets[1] - t.data_offsets[0]) for name, t in found.tensors.items()}

    def _size(self, file: str) -> int:
        return self._files[file].size if self._files is not None else (self.folder / file).stat().st_size

    def _fetch(self, listed: Mapping[str, RemoteFile], paths: Iterable[str], report: Report | None = None) -> None:
        files = [listed[path] for path in paths]
        with _explained(self.name, self._api.endpoint):
            missing = [file for file in files if not is_whole(self._blob(file), file)]
            self._check_space(missing)
            meter = DownloadMeter(sum(file.size for file in files), report)
            for file in files:
                if file not in missing:
                    meter.add(file.size, file.path)
            self._fetch_in_threads(missing, meter)
            for file in files:
                self._link(file)

    def _fetch_in_threads(self, files: Iterable[RemoteFile], meter: DownloadMeter) -> None:
        """Fetch the files, several at a time. The first error ends all, and is raised."""
        waits_s = self._settings.waits_s
        with ThreadPoolExecutor(self._settings.connections) as pool:
            try:
                for done in as_completed(
                    [pool.submit(fetch, file, self._blob(file), meter, waits_s) for file in files]
                ):
                    done.result()
            finally:  # also when this thread is interrupted
                meter.stop()
                pool.shutdown(wait=False, cancel_futures=True)

    def _blob(self, file: RemoteFile) -> Path:
        return self._repository / "blobs" / file.hash

    def _check_space(self, files: Iterable[RemoteFile]) -> None:
        """Raise ModelError when the files do not fit the disk."""
        lacking = self._count_lacking(files)
        free = shutil.disk_usage(self._repository).free
        if lacking > 0 and lacking + self._settings.reserve_bytes > free:
            raise ModelError(
                f"model {self.name}: {lacking / 1e9:.1f} GB are to be fetched and {free / 1e9:.1f} GB are free on the "
                f"disk of {constants.HF_HUB_CACHE}; make room, or set HF_HOME to a folder on another disk"
            )

    def _count_lacking(self, files: Iterable[RemoteFile]) -> int:
        """Bytes that are still to be fetched of files that are not whole; what has come of them counts."""
        lacking = 0
        for file in files:
            partial = self._blob(file).with_name(f"{file.hash}.incomplete")
            lacking += file.size - (partial.stat().st_size if partial.is_file() else 0)
        return lacking

    def _link(self, file: RemoteFile) -> None:
        """Make the file appear in the snapshot, as the cache's layout has it."""
        link = self.folder / file.path
        if not is_whole(link, file):
            fresh = link.with_name(f"{link.name}.{uuid4().hex}")
            fresh.symlink_to(Path("..", "..", "blobs", file.hash))
            fresh.replace(link)  # in one step: somebody else may be making the same link


@contextmanager
def _explained(name: str, endpoint: str) -> Iterator[None]:
    """Turn what can go wrong with a hub and a disk into ModelError, with the fix."""
    try:
        yield
    except GatedRepoError as error:
        text = f"it is gated; accept its licence at {endpoint}/{name}, and set HF_TOKEN to a token of that account"
        raise ModelError(f"model {name}: {text}") from error
    except RepositoryNotFoundError as error:
        text = f"{endpoint} has no such model; check the name, and set HF_TOKEN if it is private"
        raise ModelError(f"model {name}: {text}") from error
    except RemoteEntryNotFoundError as error:
        file = error.response.url.path.rpartition("/")[2]
        raise ModelError(f"model {name}: {endpoint} has no {file} for it, and it cannot be served without") from error
    except HfHubHTTPError as error:
        raise ModelError(f"model {name}: {_refusal(endpoint, error)}") from error
    except HFValidationError as error:
        raise ModelError(f"model {name}: not a Hugging Face id: {_line(error)}") from error
    except IncompleteError as error:
        raise ModelError(f"model {name}: {error}; start again, and it goes on from there") from error
    except CorruptError as error:
        text = f"{error}; the hub or a proxy on the way is broken: try again later, or set another HF_ENDPOINT"
        raise ModelError(f"model {name}: {text}") from error
    except (LocalEntryNotFoundError, httpx.TransportError) as error:
        raise ModelError(f"model {name}: {endpoint} cannot be reached ({_line(error)}); try again later") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            text = f"no space left on the disk of {constants.HF_HUB_CACHE}; make room, or set HF_HOME to another disk"
        else:
            text = f"{error.filename or constants.HF_HUB_CACHE} cannot be used: {error.strerror}; set HF_HOME"
        raise ModelError(f"model {name}: {text}") from error
    # A captive portal or a wrong HF_ENDPOINT answers with pages instead of JSON.
    except (SafetensorsParsingError, ValueError, KeyError, TypeError) as error:
        text = f"{endpoint} does not answer as a hub does ({_line(error)}); check HF_ENDPOINT"
        raise ModelError(f"model {name}: {text}") from error


def _refusal(endpoint: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    match status:
        case 401:
            return f"{endpoint} does not accept the token; set HF_TOKEN to a valid one, or unset it"
        case 403:
            return f"{endpoint} forbids it to this token; set HF_TOKEN to one that may read the model"
        case 429:
            return f"{endpoint} limits the rate of requests; try again later, or set HF_TOKEN"
        case _:
            return f"{endpoint} answered {status}; try again later"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
