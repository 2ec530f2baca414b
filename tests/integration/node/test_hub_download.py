"""Models from a hub: what is fetched, and what interrupted and corrupt downloads cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors.numpy import save

from p2pserve.node.models import DownloadProgress

from .small_hub import COMMIT, CONFIG, LARGE, LAYERS, NAME, SHARDS, Hub, open_here, refusal, shards_in, weights

pytestmark = pytest.mark.beside


def test_looking_fetches_no_weights(hub: Hub) -> None:
    model = open_here(NAME)
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
    model = open_here(NAME)
    folder = model.fetch(*layers)
    assert shards_in(folder) == {file for file, _ in hub.fetched()} == set(shards)
    for file in shards:
        assert (folder / file).read_bytes() == hub.files[file]
    hub.asked.clear()
    open_here(NAME).fetch(*layers)
    assert hub.fetched() == []


def test_every_part_of_a_model_is_the_same_service(hub: Hub) -> None:
    model = open_here(NAME)
    model.fetch(0, 1)
    assert open_here(NAME).info == model.info
    hub.commit = "d" * 40
    assert open_here(NAME).info.service == "tiny-dddddddd"


def test_tied_embeddings_come_with_both_ends(hub: Hub) -> None:
    hub.files["config.json"] = json.dumps({**CONFIG, "tie_word_embeddings": True}).encode()
    assert shards_in(open_here(NAME).fetch(3, 4)) == {SHARDS[0], SHARDS[2]}


def test_a_model_in_one_file(hub: Hub) -> None:
    every = {name: tensor for tensors in weights().values() for name, tensor in tensors.items()}
    for file in ("model.safetensors.index.json", *SHARDS):
        del hub.files[file]
    hub.files["model.safetensors"] = save(every)
    model = open_here(NAME)
    assert hub.fetched() == []
    assert shards_in(model.fetch(1, 2)) == {"model.safetensors"}


def test_progress_goes_from_what_is_there_to_all(hub: Hub) -> None:
    model = open_here(NAME)
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
    open_here(NAME).fetch(0, 1)
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


def test_a_cut_download_goes_on_where_it_stopped(hub: Hub) -> None:
    hub.cut_after[SHARDS[1]] = [1_500_000, 400_000]
    folder = open_here(NAME).fetch(1, 3)
    assert (folder / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    starts = [0 if asked is None else int(asked[6:-1]) for _, asked in hub.fetched()]
    assert starts == [0, 1_500_000, 1_900_000]


def test_a_download_that_was_given_up_is_taken_up_again(hub: Hub) -> None:
    hub.cut_after[SHARDS[1]] = [1_500_000, 0, 0, 0]
    assert f"{SHARDS[1]} stopped at 1500000 of" in refusal()
    hub.asked.clear()
    seen: list[DownloadProgress] = []
    folder = open_here(NAME).fetch(1, 3, seen.append)
    assert (folder / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    assert hub.fetched() == [(SHARDS[1], "bytes=1500000-")]
    assert seen[0].done_bytes == 1_500_000


def test_a_hub_without_ranges(hub: Hub) -> None:
    hub.cut_after[SHARDS[1]] = [1_500_000]
    model = open_here(NAME)
    hub.ranges = False
    seen: list[DownloadProgress] = []
    folder = model.fetch(1, 3, seen.append)
    assert (folder / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    assert seen[-1].done_bytes == seen[-1].total_bytes


def test_a_report_that_raises_ends_the_download_and_keeps_what_has_come(hub: Hub) -> None:
    model = open_here(NAME)

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
    folder = open_here(NAME).fetch(1, 3, seen.append)
    assert (folder / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    assert hub.fetched() == [(SHARDS[1], None)] * 2
    assert seen[-1].done_bytes == seen[-1].total_bytes


def test_a_file_that_stays_corrupt(hub: Hub, tmp_path: Path) -> None:
    hub.corrupt[SHARDS[1]] = 5
    assert f"{SHARDS[1]} came twice with a wrong hash; the hub or a proxy" in refusal()
    assert [file for file, _ in hub.fetched()].count(SHARDS[1]) == 2
    hub.corrupt.clear()
    assert (open_here(NAME).fetch() / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_a_corrupt_tokenizer(hub: Hub) -> None:
    hub.corrupt["tokenizer.json"] = 2
    assert "tokenizer.json came twice with a wrong hash" in refusal()


def test_a_file_that_was_cut_in_the_cache_is_fetched_again(hub: Hub) -> None:
    file = open_here(NAME).fetch() / SHARDS[1]
    os.truncate(file.resolve(), 1000)
    hub.asked.clear()
    open_here(NAME).fetch()
    assert file.read_bytes() == hub.files[SHARDS[1]]
    assert [name for name, _ in hub.fetched()] == [SHARDS[1]]


def test_two_downloads_of_one_file_fetch_it_once(hub: Hub) -> None:
    model = open_here(NAME)
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
